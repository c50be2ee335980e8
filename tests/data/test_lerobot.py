import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import ROOT
from recordings import fetch, read_recording

from tap.data import chunks
from tap.data.catalog import lookup
from tap.data.episodes import Episodes
from tap.data.recording import open_recording

LENGTHS = [5, 1, 7, 4]
NAMES = ["left", "right"]


class Folder:
    """A small dataset as LeRobot writes it, and what was recorded."""

    def __init__(self, path: Path, version: str = "v3.0", lengths: list[int] = LENGTHS) -> None:
        self.path, self.version, rng, rows = path, version, np.random.default_rng(0), sum(lengths)
        self.columns = {
            "observation.state": rng.normal(size=(rows, 2)).astype(np.float32),
            "observation.load": rng.normal(size=rows),
            "action": rng.uniform(-50, 50, (rows, 3)).astype(np.float32),
            "next.reward": rng.normal(size=rows).astype(np.float32),
            "next.success": np.zeros(rows, bool),
            "episode_index": np.repeat(np.arange(len(lengths)), lengths),
            "frame_index": np.concatenate([np.arange(length) for length in lengths]),
        }
        self.columns["next.success"][[2, 4, 16]] = True  # episode 0, and the end of episode 3
        self.features: dict[str, Any] = {name: self.feature(values) for name, values in self.columns.items()}
        self.features["observation.state"]["names"] = {"motors": NAMES}
        self.features["observation.images.top"] = {
            "dtype": "video",
            "shape": [4, 4, 3],
            "names": ["height", "width", "channel"],
        }
        self.counts = {"total_episodes": len(lengths), "total_frames": rows}

    @staticmethod
    def feature(values: np.ndarray) -> dict[str, Any]:
        dtype = "string" if values.dtype.kind == "U" else str(values.dtype)
        return {"dtype": dtype, "shape": list(values.shape[1:]) or [1], "names": None}

    def add(self, column: str, values: np.ndarray) -> None:
        self.columns[column], self.features[column] = values, self.feature(values)

    def leave_out(self, *columns: str) -> "Folder":
        for column in columns:
            del self.columns[column], self.features[column]
        return self

    def write(self) -> Path:
        meta = self.path / "meta"
        meta.mkdir(parents=True)
        info = {"codebase_version": self.version, "robot_type": "arm", "fps": 30, "features": self.features} | self.counts
        (meta / "info.json").write_text(json.dumps(info))
        tasks = [{"task_index": 1, "task": "Push it."}, {"task_index": 0, "task": "Lift it."}]
        if self.version == "v3.0":
            index = pa.table({"task_index": [1, 0], "__index_level_0__": ["Push it.", "Lift it."]})
            pq.write_table(index, meta / "tasks.parquet")
        else:
            (meta / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
        whole = pa.table({name: pa.array(list(values)) for name, values in self.columns.items()})
        for place, rows in enumerate(self.files()):
            file = self.path / (
                "data/chunk-000/" + ("file-" if self.version == "v3.0" else "episode_") + f"{place:03d}.parquet"
            )
            file.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(whole.take(rows), file, row_group_size=4)
        return self.path

    def files(self) -> Iterator[np.ndarray]:
        """The rows of each file: v3.0 has many episodes in one, v2.1 one in each."""
        episode = self.columns["episode_index"]
        numbers = np.unique(episode)
        for group in [numbers[:3], numbers[3:]] if self.version == "v3.0" else [[number] for number in numbers]:
            yield np.flatnonzero(np.isin(episode, group))

    def load(self, **changes: Any) -> tuple[Episodes, dict[str, Any]]:
        params = fetch(source="lerobot", path=self.path, **changes)
        return read_recording(self.path, lookup("arm", params), params)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "arm")


@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
@pytest.mark.parametrize("rows", [1 << 20, 6])
def test_frames_are_read_as_they_were_recorded(
    tmp_path: Path, version: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "ROWS", rows)
    folder = Folder(tmp_path / "arm", version)
    folder.write()
    episodes, report = folder.load()
    np.testing.assert_array_equal(episodes.observations, folder.columns["observation.state"])
    np.testing.assert_array_equal(episodes.actions, folder.columns["action"])
    np.testing.assert_array_equal(episodes.rewards, folder.columns["next.reward"])
    assert episodes.lengths.tolist() == LENGTHS and not episodes.terminals.any()
    assert (report["fps"], report["tasks"]) == (30, ["Lift it.", "Push it."])
    assert (report["observation_names"], report["action_names"]) == (NAMES, ["action[0]", "action[1]", "action[2]"])
    assert (report["source"], report["origin"]) == ("lerobot", "arm")
    assert "pictures are not used (observation.images.top): policies observe numbers alone" in report["warnings"]
    assert "has_rewards" not in report
    assert (report["action_bounds"], report["actions_out_of_range"]) == ("none", 0)


def test_chosen_columns_are_joined_in_their_order(folder: Folder) -> None:
    folder.write()
    episodes, report = folder.load(observations=["observation.load", "observation.state"])
    load, state = folder.columns["observation.load"][:, None], folder.columns["observation.state"]
    np.testing.assert_array_equal(episodes.observations, np.hstack([load, state]).astype(np.float32))
    assert report["observation_names"] == ["observation.load", *NAMES]


def test_a_flag_of_success_is_a_reward_at_the_end(folder: Folder) -> None:
    folder.write()
    episodes, report = folder.load(reward="next.success")
    assert np.flatnonzero(episodes.rewards).tolist() == [4, 16] and set(episodes.rewards) == {0, 1}
    assert np.flatnonzero(episodes.terminals).tolist() == [4, 16]
    assert (report["boundaries"]["terminals"], report["truncated_episodes"]) == (2, 2)


def test_without_rewards_all_are_zero_and_the_report_says_so(folder: Folder) -> None:
    folder.leave_out("next.reward").write()
    episodes, report = folder.load()
    assert not episodes.rewards.any() and report["has_rewards"] is False
    assert "it has no rewards: its behaviour is imitated, good or bad, and all rewards are stored as 0" in report["warnings"]


def test_rewards_that_mean_nothing_are_not_read(folder: Folder) -> None:
    folder.write()
    episodes, report = folder.load(reward="none")
    assert not episodes.rewards.any() and report["has_rewards"] is False


def test_the_digest_is_of_what_is_read(folder: Folder) -> None:
    path = folder.write()
    (path / "videos").mkdir()
    before = folder.load()[1]
    (path / "videos/top.mp4").write_bytes(b"pictures")
    assert folder.load()[1] == before
    file = path / "data/chunk-000/file-001.parquet"
    pq.write_table(pq.read_table(file), file, compression="gzip")
    after = folder.load()[1]
    assert after["digest"] != before["digest"] and after["return"] == before["return"]


def test_a_column_of_lists_of_lists_is_flattened(folder: Folder) -> None:
    nested = np.arange(34, dtype=np.float32).reshape(17, 2, 1)
    folder.columns["observation.state"] = [each.tolist() for each in nested]  # type: ignore[assignment]
    folder.features["observation.state"] = {"dtype": "float32", "shape": [2, 1]}
    folder.write()
    np.testing.assert_array_equal(folder.load()[0].observations, nested.reshape(17, 2))


def test_memory_is_that_of_a_row_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrow's memory for 10 times as many row groups."""
    monkeypatch.setattr(chunks, "ROWS", 8)
    peaks = []
    for lengths in ([8] * 10, [8] * 100):
        folder = Folder(tmp_path / str(len(lengths)), lengths=lengths)
        folder.write()
        before, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
        pa.set_memory_pool(pool)
        try:
            folder.load()
        finally:
            pa.set_memory_pool(before)
        peaks.append(pool.max_memory())
    assert 0 < peaks[1] < 2 * peaks[0]


def mistake_of(folder: Folder, **changes: Any) -> str:
    with pytest.raises(ValueError) as error:
        folder.load(**changes)
    assert "\n" not in str(error.value) and len(str(error.value)) < 500
    return str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"observations": ["observation.stat"]},
            "observation.stat, which datasets.arm.fetch.observations needs, is missing: its",
        ),
        (
            {"observations": ["observation.images.top"]},
            "observation.images.top, .* is of type video: its columns of numbers are",
        ),
        ({"reward": "action"}, "action has 3 dimensions: set datasets.arm.fetch.reward to a column of one"),
    ],
)
def test_a_column_that_cannot_be_used_is_named(folder: Folder, changes: dict[str, Any], message: str) -> None:
    folder.write()
    with pytest.raises(ValueError, match=message):
        folder.load(**changes)


def test_a_value_that_is_not_finite_is_located_in_its_file(folder: Folder) -> None:
    folder.columns["action"][[14, 16], 1] = np.nan
    folder.write()
    message = mistake_of(folder)
    assert (
        "actions has 2 values that are not a finite float32, the first in row 1 of data/chunk-000/file-001.parquet" in message
    )


def test_a_file_that_is_missing_is_noticed(folder: Folder) -> None:
    (folder.write() / "data/chunk-000/file-001.parquet").unlink()
    assert "13 frames in 3 episodes, but meta/info.json counts 17 in 4: get the files that are missing" in mistake_of(folder)
    (folder.path / "data/chunk-000/file-000.parquet").unlink()
    assert "data has no Parquet files: get the whole dataset" in mistake_of(folder)


def test_frames_that_are_missing_are_located(folder: Folder) -> None:
    folder.columns["frame_index"][9:13] += 1
    folder.write()
    assert "file-000.parquet: row 9 is frame 4 of episode 2, but frame 3 comes next" in mistake_of(folder)


def test_values_that_are_missing_are_named(folder: Folder) -> None:
    folder.write()
    file = folder.path / "data/chunk-000/file-001.parquet"
    rows = pq.read_table(file)
    for actions, problem in (
        ([[1.0, 2.0, 3.0]] * 3 + [None], "action has values that are missing, but its metadata say 3 in each row"),
        ([[1.0, 2.0, 3.0]] * 3 + [[1.0, 2.0]], "action has lists of different lengths: rewrite it with 3 values in each row"),
        ([[1.0, 2.0]] * 4, "action has 8 values in 4 rows, but its metadata say 3 in each row"),
    ):
        pq.write_table(rows.set_column(rows.column_names.index("action"), "action", pa.array(actions)), file)
        assert problem in mistake_of(folder)
    pq.write_table(rows.drop_columns("action"), file)
    assert "file-001.parquet lacks action: replace the file" in mistake_of(folder)


def test_a_damaged_file_is_named(folder: Folder) -> None:
    file = folder.write() / "data/chunk-000/file-001.parquet"
    file.write_bytes(file.read_bytes()[:-20])
    assert "file-001.parquet cannot be read (" in mistake_of(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "info.json is not as expected (Invalid JSON"),
        ('{"codebase_version": "v3.0"}', "info.json is not as expected (fps: Field required)"),
        (None, "info.json does not exist: get the whole dataset, or correct its path in params.yaml"),
    ],
)
def test_a_description_that_is_wrong_is_named(folder: Folder, content: str | None, message: str) -> None:
    info = folder.write() / "meta/info.json"
    info.unlink() if content is None else info.write_text(content)
    assert message in mistake_of(folder)


def test_another_format_is_named(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "arm", version="v1.6")
    folder.write()
    assert "has LeRobot's format v1.6, but TAP reads v2.1 and v3.0: convert it" in mistake_of(folder)


@pytest.fixture(params=["g1-arms", "so101-record"])
def recorded(request: pytest.FixtureRequest) -> Path:
    """A dataset recorded from a robot; skipped where it is absent."""
    path = Path(os.environ.get("TAP_EXTRA_DATA", ROOT.parent / "shared/data")) / "lerobot" / request.param
    if not path.exists():
        pytest.skip("TAP_EXTRA_DATA names no folder with lerobot/")
    return path


def timestamps(path: Path) -> np.ndarray | None:
    params = fetch(source="lerobot", path=path)
    with open_recording(path, lookup("arm", params), params) as recording:
        return recording.timestamps()


@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
def test_times_of_frames_are_read_from_all_files(tmp_path: Path, version: str) -> None:
    folder = Folder(tmp_path / "arm", version)
    times = (folder.columns["frame_index"] / 30).astype(np.float32)
    times[8:] += 0.5
    folder.add("timestamp", times)
    found = timestamps(folder.write())
    assert found is not None
    np.testing.assert_array_equal(found, times)


def test_times_are_not_read_where_there_are_none(folder: Folder) -> None:
    assert timestamps(folder.write()) is None


@pytest.mark.parametrize("times", [np.zeros((17, 2)), np.array(["noon"] * 17), np.full(17, np.nan)])
def test_what_is_no_time_of_a_frame_is_not_read(folder: Folder, times: np.ndarray) -> None:
    folder.add("timestamp", times)
    assert timestamps(folder.write()) is None


def test_datasets_of_real_robots_agree_with_their_own_statistics(recorded: Path) -> None:
    params = fetch(source="lerobot", path=recorded)
    episodes, report = read_recording(recorded, lookup("arm", params), params)
    totals = {"g1-arms": (100, 35_965, 26), "so101-record": (4, 1492, 6)}
    assert (report["episodes"], report["transitions"], report["action_dim"]) == totals[recorded.name]
    if recorded.name == "g1-arms":
        statistics = [json.loads(line)["stats"] for line in (recorded / "meta/episodes_stats.jsonl").read_text().splitlines()]
    else:
        rows = pq.read_table(recorded / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
        statistics = [
            {
                key: {name: row[f"stats/{key}/{name}"] for name in ("min", "max", "mean")}
                for key in ("observation.state", "action")
            }
            for row in rows
        ]
    for index, expected in enumerate(statistics):
        own = episodes.select([index])
        for key, values in (("observation.state", own.observations), ("action", own.actions)):
            np.testing.assert_allclose(values.min(axis=0), expected[key]["min"], rtol=1e-6, atol=1e-7)
            np.testing.assert_allclose(values.max(axis=0), expected[key]["max"], rtol=1e-6, atol=1e-7)
            np.testing.assert_allclose(values.mean(axis=0, dtype=float), expected[key]["mean"], rtol=1e-4, atol=1e-5)
    assert len(statistics) == episodes.num_episodes
