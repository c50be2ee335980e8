import errno
import functools
import http.server
import json
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gymnasium
import gymnasium_robotics
import h5py
import minari
import numpy as np
import pytest
import yaml
from conftest import ROOT
from minari.data_collector import EpisodeBuffer

from pipelines.command_line import main
from pipelines.stages import fetch
from pipelines.stages.evaluation import with_own_environment
from pipelines.stages.params import EvaluateStage
from tap.data.catalog import DatasetInfo, known_datasets
from tap.data.download import obtain
from tap.data.episodes import ARRAYS, Episodes
from tap.envs.make import make_environment
from tap.files import read_json, sha256, write_json
from tap.results import ValidationReport


def write_dataset(path: Path, observation_dim: int = 11, action_dim: int = 3, rows: int = 2000) -> Path:
    """A file in D4RL's layout with episodes of 100 steps."""
    rng = np.random.default_rng(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        file["observations"] = rng.normal(size=(rows, observation_dim)).astype(np.float32)
        file["actions"] = rng.uniform(-1, 1, (rows, action_dim)).astype(np.float32)
        file["rewards"] = np.ones(rows, np.float32)
        file["terminals"] = np.zeros(rows, bool)
        file["timeouts"] = np.arange(rows) % 100 == 99
    return path


class Server(http.server.ThreadingHTTPServer):
    """Serves one file as a plain web server does, with one fault at a time."""

    content = b""
    cut = 0  # bytes after which the next answers break off; 0 for none
    ranges = True  # whether Range is honoured
    status = 200
    asked: list[str]  # Range headers of the requests so far

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/files/hopper.hdf5"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        server, wanted = self.server, self.headers.get("Range", "")
        server.asked.append(wanted)
        if server.status != 200:
            return self.send_error(server.status)
        first = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1]) if wanted and server.ranges else 0
        total = len(server.content)
        if first and first >= total:
            return self.send_error(416)
        self.send_response(206 if first else 200)
        if first:
            self.send_header("Content-Range", f"bytes {first}-{total - 1}/{total}")
        self.send_header("Content-Length", str(total - first))
        self.end_headers()
        self.wfile.write(server.content[first:][: server.cut or None])

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "*")
    with Server(("127.0.0.1", 0), Handler) as server:
        server.content, server.asked = write_dataset(tmp_path / "served.hdf5").read_bytes(), []
        thread = threading.Thread(target=functools.partial(server.serve_forever, poll_interval=0.01))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@dataclass
class Place:
    """A folder for downloads, a lock file, and a dataset to obtain."""

    info: DatasetInfo
    shared: Path
    lock: Path

    def obtain(self) -> Path:
        return obtain(self.info, self.shared, self.lock)

    @property
    def files(self) -> set[str]:
        return {path.name for path in self.shared.iterdir() if path.suffix != ".lock"}


@pytest.fixture
def place(server: Server, tmp_path: Path) -> Place:
    info = replace(known_datasets()["hopper-medium-v2"], url=server.url)
    return Place(info, tmp_path / "shared", tmp_path / "datasets.lock.json")


def test_a_download_appears_whole_and_is_locked(server: Server, place: Place) -> None:
    path = place.obtain()
    assert path == place.shared / "hopper.hdf5"
    assert path.read_bytes() == server.content
    assert place.files == {"hopper.hdf5"}
    entry = {"url": server.url, "sha256": sha256(path), "bytes": len(server.content)}
    assert read_json(place.lock) == {"hopper-medium-v2": entry}
    assert place.obtain() == path
    assert len(server.asked) == 1


def test_downloads_at_the_same_time_are_all_recorded(server: Server, place: Place) -> None:
    ids = [f"{robot}-{data}-v2" for robot in ("hopper", "walker2d", "halfcheetah") for data in ("medium", "expert", "random")]
    for name in ids:
        place.shared.mkdir(exist_ok=True)
        (place.shared / f"{name}.hdf5").write_bytes(server.content)

    def obtain_one(name: str) -> None:
        obtain(replace(known_datasets()[name], url=f"http://host/{name}.hdf5"), place.shared, place.lock)

    with ThreadPoolExecutor(len(ids)) as pool:
        list(pool.map(obtain_one, ids))
    assert set(read_json(place.lock)) == set(ids)


def test_a_download_goes_on_where_it_was_interrupted(server: Server, place: Place) -> None:
    place.shared.mkdir()
    (place.shared / "hopper.hdf5.part").write_bytes(server.content[:1000])
    assert place.obtain().read_bytes() == server.content
    assert server.asked == ["bytes=1000-"]


@pytest.mark.parametrize("ranges", [True, False])
def test_a_broken_off_download_is_noticed_and_finished_later(server: Server, place: Place, ranges: bool) -> None:
    server.cut, server.ranges = len(server.content) // 3, ranges
    if ranges:  # each answer brings a third
        assert place.obtain().read_bytes() == server.content
        assert len(server.asked) == 4
        return
    with pytest.raises(ValueError, match=rf"sent {server.cut} of {len(server.content)} bytes: run again"):
        place.obtain()
    assert place.files == {"hopper.hdf5.part"}
    assert not place.lock.exists()
    server.cut = 0
    assert place.obtain().read_bytes() == server.content


def test_a_download_on_a_full_disk_names_its_file_and_not_the_connection(server: Server, place: Place) -> None:
    place.shared.mkdir()
    part = place.shared / "hopper.hdf5.part"
    part.symlink_to("/dev/full")
    with pytest.raises(OSError) as caught:
        place.obtain()
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(part))


def test_a_leftover_longer_than_the_file_is_fetched_anew(server: Server, place: Place) -> None:
    place.shared.mkdir()
    (place.shared / "hopper.hdf5.part").write_bytes(bytes(len(server.content) + 5))
    assert place.obtain().read_bytes() == server.content


def test_a_download_with_another_digest_is_removed(server: Server, place: Place) -> None:
    place.lock.write_text(json.dumps({"hopper-medium-v2": {"url": "", "sha256": "0" * 64, "bytes": 1}}))
    with pytest.raises(ValueError, match=r"SHA-256 .* expects 0000.*it was removed; run again"):
        place.obtain()
    assert place.files == set()


def test_a_conflict_of_a_merge_in_the_lock_file_is_named_before_a_download(server: Server, place: Place) -> None:
    place.lock.write_text('{\n<<<<<<< HEAD\n"a": {}\n=======\n"b": {}\n>>>>>>> other\n}\n')
    with pytest.raises(
        ValueError, match=r"datasets\.lock\.json, line 2: two versions conflict since a merge: keep one version"
    ):
        place.obtain()
    assert server.asked == []


def test_a_shared_file_with_another_digest_is_refused_but_kept(server: Server, place: Place) -> None:
    path = place.obtain()
    path.write_bytes(server.content[:-1])
    with pytest.raises(ValueError, match=f"delete {path} to download it again"):
        place.obtain()
    path.unlink()
    assert place.obtain().read_bytes() == server.content


def test_what_another_program_left_of_a_download_is_refused_and_not_locked(server: Server, place: Place) -> None:
    write_dataset(place.shared / "hopper.hdf5").write_bytes(server.content[:-1000])
    with pytest.raises(ValueError, match=r"is not a complete HDF5 file .*: delete .*hopper\.hdf5 to download it again"):
        place.obtain()
    assert not place.lock.exists()


def test_a_web_page_in_place_of_the_file_is_refused(server: Server, place: Place) -> None:
    server.content = b"<html>Please log in</html>"
    with pytest.raises(ValueError, match="is not a complete HDF5 file"):
        place.obtain()
    assert place.files == set() and not place.lock.exists()


def test_an_answer_of_404_says_what_to_do(server: Server, place: Place) -> None:
    server.status = 404
    with pytest.raises(ValueError) as error:
        place.obtain()
    for word in (server.url, "404", f"put the file at {place.shared / 'hopper.hdf5'}"):
        assert word in str(error.value)


def test_no_connection_says_what_to_do(server: Server, place: Place) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place.info = replace(place.info, url=f"http://127.0.0.1:{free.getsockname()[1]}/hopper.hdf5")
    with pytest.raises(ValueError) as error:
        place.obtain()
    for word in (str(place.info.url), "Connection refused", f"put the file at {place.shared / 'hopper.hdf5'}"):
        assert word in str(error.value)


def test_two_processes_that_want_one_file_download_it_once(server: Server, place: Place) -> None:
    threads = [threading.Thread(target=place.obtain) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (place.shared / "hopper.hdf5").read_bytes() == server.content
    assert len(server.asked) == 1


def test_a_file_is_looked_for_where_downloads_go_but_not_locked(server: Server, place: Place) -> None:
    place.info = replace(place.info, source="file")
    with pytest.raises(ValueError, match=r"hopper\.hdf5 does not exist: put it there"):
        place.obtain()
    path = write_dataset(place.shared / "hopper.hdf5")
    assert place.obtain() == path
    assert not place.lock.exists() and not server.asked


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty project folder, the current one, whose params.yaml lists a few datasets; its downloads go to `cache`."""
    params = yaml.safe_load((ROOT / "params.yaml").read_text())
    params["datasets"] = {
        "hopper-medium-replay": None,
        "hopper-medium-v2": {"fetch": {"source": "file"}},
        "ant-medium-v2": {"fetch": {"path": "own.hdf5"}},
        "mine": {"fetch": {"path": "own.hdf5", "max_episode_steps": 100}},
        "pendulum": {"fetch": {"path": "own.hdf5", "max_episode_steps": 100, "environment": "InvertedPendulum-v4"}},
    }
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "params.yaml").write_text(yaml.safe_dump(params))
    monkeypatch.chdir(folder)
    monkeypatch.setenv("D4RL_DATASET_DIR", str(tmp_path / "cache"))
    return folder


def test_fetch_of_the_bundled_dataset(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_dataset(project / "data/bundled/hopper-medium-replay.hdf5")
    fetch.run("hopper-medium-replay")
    folder = project / "data/raw/hopper-medium-replay"
    assert {path.name for path in folder.iterdir()} == {"validation.json", "episodes"}
    assert {path.name for path in (folder / "episodes").iterdir()} == {f"{name}.npy" for name in ARRAYS}
    episodes = Episodes.load(folder / "episodes")
    with h5py.File(source) as file:
        for name in ("observations", "actions", "rewards"):
            np.testing.assert_array_equal(getattr(episodes, name), file[name][:])
    assert episodes.offsets.tolist() == list(range(0, 2001, 100)) and not episodes.terminals.any()
    validation = read_json(folder / "validation.json")
    assert validation["digest"] == sha256(source)
    assert (validation["origin"], validation["source"]) == ("data/bundled/hopper-medium-replay.hdf5", "bundled")
    assert (validation["transitions"], validation["episodes"], validation["return"]["mean"]) == (2000, 20, 100.0)
    assert "2000 transitions in 20 episodes" in capsys.readouterr().out
    assert not (project / "datasets.lock.json").exists()


def test_fetch_of_a_d4rl_file_from_the_shared_folder(project: Path) -> None:
    write_dataset(project.parent / "cache" / "hopper_medium-v2.hdf5")
    fetch.run("hopper-medium-v2")
    assert read_json(project / "data/raw/hopper-medium-v2/validation.json")["origin"] == "hopper_medium-v2.hdf5"


def test_fetch_of_a_file_without_environment(project: Path) -> None:
    write_dataset(project / "own.hdf5", observation_dim=5, action_dim=1)
    fetch.run("mine")
    validation = read_json(project / "data/raw/mine/validation.json")
    assert (validation["observation_dim"], validation["normalized_score_mean"], validation["origin"]) == (5, None, "own.hdf5")


@pytest.mark.parametrize(
    ("dataset", "dims", "message"),
    [
        ("ant-medium-v2", (29, 8), "observations have 29 dimensions in the data, but shape (27,) in Ant-v4"),
        ("pendulum", (4, 2), "actions have 2 dimensions in the data, but shape (1,) in InvertedPendulum-v4"),
    ],
)
def test_dimensions_that_do_not_fit_the_environment_are_found(
    project: Path, dataset: str, dims: tuple[int, int], message: str
) -> None:
    write_dataset(project / "own.hdf5", *dims)
    with pytest.raises(ValueError) as error:
        fetch.run(dataset)
    assert message in str(error.value)
    assert not (project / "data/raw").exists()


def test_ants_111_dimensions_fit_its_environment(project: Path) -> None:
    write_dataset(project / "own.hdf5", 111, 8)
    fetch.run("ant-medium-v2")
    assert read_json(project / "data/raw/ant-medium-v2/validation.json")["observation_dim"] == 27


def end_of(monkeypatch: pytest.MonkeyPatch, run: Callable[..., None], *arguments: str) -> int | str | None:
    """What the command line of a stage ends with: an exit code, or a message, which is printed before it ends with 1."""
    monkeypatch.setattr(sys, "argv", ["stage", *arguments])
    with pytest.raises(SystemExit) as exit:
        main(run)
    return exit.value.code


def test_a_mistake_is_one_message_and_exit_code_1(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(end_of(monkeypatch, fetch.run, "mine")).startswith("error: mine: own.hdf5 does not exist")
    assert "check that params.yaml lists it" in str(end_of(monkeypatch, fetch.run, "hopper-medum-v2"))


def test_the_command_line_follows_the_stages_parameters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = []

    def run(dataset: str, seed: int, ablation: str) -> None:
        seen.append((dataset, seed, ablation))

    assert end_of(monkeypatch, run, "hopper-medium-v2", "3", "no-search") == 0
    assert seen == [("hopper-medium-v2", 3, "no-search")]
    assert end_of(monkeypatch, run, "hopper-medium-v2", "three", "no-search") == 2
    capsys.readouterr()
    assert end_of(monkeypatch, fetch.run, "--help") == 0
    assert "Stage fetch" in capsys.readouterr().out


def test_a_fetch_that_fails_leaves_no_report_of_another_file(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_dataset(project / "own.hdf5", observation_dim=5, action_dim=1)
    fetch.run("mine")
    folder = project / "data/raw/mine"
    before = (folder / "episodes/actions.npy").read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    monkeypatch.setenv("DVC_STAGE", "fetch@mine")  # the params are written already
    with pytest.raises(OSError, match="No space"):
        fetch.run("mine")
    assert (folder / "episodes/actions.npy").read_bytes() == before and not (folder / "validation.json").exists()


def collect_for_minari(project: Path, environment: str) -> Path:
    """Two short episodes of the same action, written by the package minari."""
    episodes = []
    with closing(gymnasium.make(environment)) as env:
        for seed in range(2):
            observations = [env.reset(seed=seed)[0], *(env.step(np.ones(2))[0] for _ in range(3))]
            columns = {key: np.stack([each[key] for each in observations]) for key in observations[0]}
            buffer = EpisodeBuffer(
                observations=columns,
                actions=np.ones((3, 2)),
                rewards=np.zeros(3),
                terminations=np.zeros(3, bool),
                truncations=np.arange(3) == 2,
            )
            episodes.append(buffer)
        minari.create_dataset_from_buffers("mine/constant-v0", episodes, env=env)
    return project / "minari/mine/constant-v0"


def test_a_minari_dataset_is_evaluated_in_its_own_environment(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(project / "minari"))
    gymnasium.register_envs(gymnasium_robotics)
    folder = collect_for_minari(project, "PointMaze_UMaze-v3")
    params = yaml.safe_load((project / "params.yaml").read_text())
    facts: dict[str, Any] = {"source": "minari", "path": "mine/constant-v0", "observations": ["observation", "desired_goal"]}
    params["datasets"]["maze"] = {"fetch": facts}
    (project / "params.yaml").write_text(yaml.safe_dump(params))
    fetch.run("maze")
    validation = ValidationReport.read(project / "data/raw/maze/validation.json")
    assert not any("recorded in" in each or "no environment" in each for each in validation.warnings)
    info = with_own_environment(EvaluateStage.read("maze"), validation).info
    with closing(make_environment(info)) as env:
        first = Episodes.load(project / "data/raw/maze/episodes").observations[0]
        np.testing.assert_allclose(env.reset(seed=0)[0], first, rtol=1e-6)
        assert env.spec is not None and env.spec.max_episode_steps == info.max_episode_steps == 300

    metadata = read_json(folder / "data/metadata.json")
    write_json(folder / "data/metadata.json", metadata | {"env_spec": gymnasium.spec("Hopper-v5").to_json()})
    fetch.run("maze")
    validation = ValidationReport.read(project / "data/raw/maze/validation.json")
    assert any(
        "recorded in Hopper-v5, in which no policy can be evaluated here: maze: observations have 6 dimensions" in each
        for each in validation.warnings
    )
    assert with_own_environment(EvaluateStage.read("maze"), validation).info.environment is None

    facts |= {"environment": "gymnasium_robotics:PointMaze_UMaze-v3", "max_episode_steps": 50}
    (project / "params.yaml").write_text(yaml.safe_dump(params))
    fetch.run("maze")
    validation = ValidationReport.read(project / "data/raw/maze/validation.json")
    assert validation.own_environment is None and not any("recorded in" in each for each in validation.warnings)


def test_clipping_needs_bounds(project: Path) -> None:
    states = np.arange(16, dtype=np.float32).reshape(8, 2)
    np.savez(project / "maze.npz", observations=states, actions=100 * states, terminals=np.arange(8) % 4 == 3)
    params = yaml.safe_load((project / "params.yaml").read_text())
    facts: dict[str, Any] = {"source": "ogbench", "path": "maze.npz", "clip_actions": True}
    params["datasets"]["maze"] = {"fetch": facts}
    (project / "params.yaml").write_text(yaml.safe_dump(params))
    with pytest.raises(ValueError, match=r"datasets\.maze\.fetch\.clip_actions: actions have no bounds: set .*action_low"):
        fetch.run("maze")
    facts |= {"action_low": 0, "action_high": 500}
    (project / "params.yaml").write_text(yaml.safe_dump(params))
    fetch.run("maze")
    actions = Episodes.load(project / "data/raw/maze/episodes").actions
    np.testing.assert_array_equal(actions, 100 * states[[0, 1, 2, 4, 5, 6]].clip(max=5))
    assert read_json(project / "data/raw/maze/validation.json")["has_rewards"] is False
