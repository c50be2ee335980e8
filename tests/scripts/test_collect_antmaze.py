"""The script that recollects AntMaze, with a policy of random weights."""

import json
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from conftest import ROOT
from recordings import load_recording

from scripts.collect_antmaze import PLAY_GOALS, Guide, collect
from tap.data.catalog import lookup
from tap.envs.mazes import MAZES
from tap.envs.trial import check_environment
from tap.settings import load_params


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    arrays = {
        "weight_0": (16, 29),
        "bias_0": 16,
        "weight_1": (8, 16),
        "bias_1": 8,
        "log_std_weight": (8, 16),
        "log_std_bias": 8,
    }
    np.savez(tmp_path / "policy.npz", **{name: 0.1 * rng.standard_normal(shape) for name, shape in arrays.items()})
    return tmp_path / "policy.npz"


def read(path: Path) -> dict[str, np.ndarray]:
    keys = ("observations", "actions", "rewards", "terminals", "timeouts", "infos/goal", "infos/qpos", "infos/qvel")
    with h5py.File(path) as file:
        return {key: file[key][:] for key in keys}


def test_collected_data_loads_as_episodes_and_is_reproducible(policy: Path, tmp_path: Path, params_yaml_with) -> None:
    first, again, other = (tmp_path / f"{name}.hdf5" for name in ("first", "again", "other"))
    provenance = collect("umaze-diverse", first, policy=policy, transitions=702, seed=5)
    collect("umaze-diverse", again, policy=policy, transitions=702, seed=5)
    collect("umaze-diverse", other, policy=policy, transitions=1, seed=6)
    assert json.loads(first.with_suffix(".json").read_text()) == provenance
    columns = read(first)
    for key, values in read(again).items():
        np.testing.assert_array_equal(values, columns[key])
    assert not np.array_equal(read(other)["actions"], columns["actions"][:701])

    assert provenance["transitions"] == len(columns["rewards"]) == 1402
    assert np.flatnonzero(columns["timeouts"]).tolist() == [700, 1401]
    assert [len(np.unique(columns["infos/goal"][rows], axis=0)) for rows in (slice(701), slice(701, None))] == [1, 1]
    np.testing.assert_array_equal(columns["observations"][:, :15], columns["infos/qpos"])
    np.testing.assert_array_equal(columns["observations"][:, 15:], columns["infos/qvel"])
    assert np.abs(columns["actions"]).max() <= 1

    fetch = load_params(params_yaml_with("antmaze-umaze-diverse-v0"), "antmaze-umaze-diverse-v0").fetch
    info = lookup("antmaze-umaze-diverse-v0", fetch)
    episodes, report = load_recording(first, info, fetch, tmp_path / "arrays")
    assert report["source"] == "recollected" and episodes.observation_dim == 31 and not report["warnings"]
    check_environment(info, episodes.observation_dim, episodes.action_dim)  # the environment has the data's dimensions


def test_rewards_refer_to_the_goal_of_the_evaluation(extra_data: Path, tmp_path: Path) -> None:
    policy, out = extra_data / "policies/antmaze-goal-direction.npz", tmp_path / "umaze.hdf5"
    provenance = collect("umaze", out, policy=policy, transitions=701, seed=0)
    columns, target = read(out), np.array(provenance["evaluation_goal"])
    following = columns["observations"][1:, :2]
    at_target = [np.hypot(*(position - target)) <= 0.5 for position in following]
    np.testing.assert_array_equal(columns["rewards"][:-1], np.array(at_target, np.float32))
    np.testing.assert_array_equal(columns["terminals"][:-1], at_target)
    assert 0 < columns["rewards"].sum() == provenance["return"]["mean"]
    assert np.abs(columns["observations"][0, :2]).max() <= 0.1  # umaze, not diverse: from the start to the goal's cell
    assert ((columns["infos/goal"][0] - [0, 8]) >= 0).all() and ((columns["infos/goal"][0] - [0, 8]) <= 1.5).all()


def test_ultra_uses_the_cells_of_its_authors(policy: Path, tmp_path: Path) -> None:
    provenance = collect("ultra-play", tmp_path / "ultra.hdf5", policy=policy, transitions=2002, seed=0)
    columns = read(tmp_path / "ultra.hdf5")
    assert np.flatnonzero(columns["timeouts"]).tolist() == [1000, 2001] and provenance["maze"] == "ultra"
    starts, goals = columns["observations"][::1001, :2], columns["infos/goal"][::1001]
    for start, goal in zip(starts, goals, strict=True):
        offsets = np.array([goal - [4 * (j - 1), 4 * (i - 1)] for i, j in PLAY_GOALS["ultra"]])
        assert ((offsets >= -1) & (offsets <= 0.5)).all(axis=1).sum() == 1
        (j, i), inside = np.divmod(start + 4.5, 4.0)  # a start lies within 0.5 m of its cell's centre
        assert (inside <= 1).all()
        assert MAZES["ultra"].opened((11, 7), (11, 9)).rows[int(i)][int(j)] != "1" and (i, j) not in PLAY_GOALS["ultra"]


@pytest.mark.parametrize("name", MAZES)
def test_paths_are_the_shortest(name: str) -> None:
    maze = MAZES[name]
    guide = Guide(maze, maze.centre(maze.goal))
    assert set(guide.steps) == set(maze.free)
    lengths = np.full((len(maze.rows), len(maze.rows[0])), np.inf)
    lengths[maze.goal] = 0
    for _ in maze.free:  # relaxation until nothing changes
        for i, j in maze.free:
            lengths[i, j] = min(
                lengths[i, j], 1 + min(lengths[i, j - 1], lengths[i, j + 1], lengths[i - 1, j], lengths[i + 1, j])
            )
    assert {cell: lengths[cell] for cell in maze.free} == guide.steps
    for cell in maze.free:
        following = maze.cell(guide.waypoint(maze.centre(cell)))
        assert lengths[following] == max(lengths[cell] - 1, 0)
        assert abs(following[0] - cell[0]) + abs(following[1] - cell[1]) <= 1


def test_mistakes_end_with_one_message_and_mazes_are_plotted(policy: Path, tmp_path: Path) -> None:
    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)

    np.savez(tmp_path / "other.npz", weight_0=np.zeros((8, 29)))
    out = str(tmp_path / "umaze.hdf5")
    wrong = run("scripts.collect_antmaze", "umaze", out, "--policy", str(tmp_path / "other.npz"))
    assert wrong.returncode == 1 and "other.npz does not contain a policy's weights" in wrong.stderr
    assert "Traceback" not in wrong.stderr and not Path(out).exists()
    with pytest.raises(ValueError, match="unknown task 'huge-play': choose one of umaze, umaze-diverse, "):
        collect("huge-play", Path(out), policy=policy, transitions=1, seed=0)
    collect("umaze", Path(out), policy=policy, transitions=1, seed=0)
    plotted = run("scripts.plot_mazes", str(tmp_path / "maze.png"), out)
    assert plotted.returncode == 0 and (tmp_path / "maze.png").read_bytes().startswith(b"\x89PNG")
    with h5py.File(tmp_path / "plain.hdf5", "w"):
        pass
    wrong = run("scripts.plot_mazes", str(tmp_path / "maze.png"), str(tmp_path / "plain.hdf5"))
    assert wrong.returncode == 1 and "has no attribute `maze`" in wrong.stderr
