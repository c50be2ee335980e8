"""Files as OGBench's scripts write them: np.savez_compressed of whole trajectories, their last states flagged."""

import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recordings import fetch, read_recording

from tap.data import chunks
from tap.data.catalog import lookup
from tap.data.episodes import Episodes
from tap.data.recording import open_recording

STATES = [6, 2, 8]  # of each trajectory, one more than its steps


def trajectories(states: list[int] = STATES, dim: int = 3) -> dict[str, Any]:
    rng, rows = np.random.default_rng(0), sum(states)
    terminals = np.zeros(rows, np.float32)
    terminals[np.cumsum(states) - 1] = 1
    return {
        "observations": rng.normal(size=(rows, dim)).astype(np.float32),
        "actions": rng.uniform(-1, 1, (rows, 2)).astype(np.float32),
        "terminals": terminals,
        "qpos": rng.normal(size=(rows, 4)),
    }


def load(path: Path) -> tuple[Episodes, dict[str, Any]]:
    params = fetch(source="ogbench", path=path)
    return read_recording(path, lookup("maze", params), params)


def as_ogbench_loads(arrays: dict[str, Any]) -> dict[str, np.ndarray]:
    """What `ogbench.utils.load_dataset` makes of the arrays, for (s, a, s')."""
    mask = (1.0 - arrays["terminals"]).astype(bool)
    ends = np.concatenate([arrays["terminals"][1:], [1.0]])[mask]
    return {"observations": arrays["observations"][mask], "actions": arrays["actions"][mask], "ends": ends}


@pytest.mark.parametrize("save", [np.savez_compressed, np.savez])
@pytest.mark.parametrize("rows", [1 << 20, 4])
def test_steps_are_those_that_ogbench_loads(tmp_path: Path, save: Any, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "ROWS", rows)
    arrays = trajectories()
    save(tmp_path / "maze.npz", **arrays)
    episodes, report = load(tmp_path / "maze.npz")
    expected = as_ogbench_loads(arrays)
    np.testing.assert_array_equal(episodes.observations, expected["observations"])
    np.testing.assert_array_equal(episodes.actions, expected["actions"])
    np.testing.assert_array_equal(episodes.offsets[1:] - 1, np.flatnonzero(expected["ends"]))
    assert episodes.lengths.tolist() == [5, 1, 7] and not episodes.terminals.any() and not episodes.rewards.any()
    assert report["has_rewards"] is False and report["truncated_episodes"] == 3


def test_a_trajectory_without_a_flag_at_the_end_of_the_file_is_one(tmp_path: Path) -> None:
    arrays = trajectories()
    arrays["terminals"][-1] = 0
    np.savez(tmp_path / "maze.npz", **arrays)
    assert load(tmp_path / "maze.npz")[0].lengths.tolist() == [5, 1, 7]


def test_memory_is_that_of_a_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of the arrays that are read has 412 bytes."""
    monkeypatch.setattr(chunks, "ROWS", 1000)
    peaks = []
    for count in (20, 220):
        path = tmp_path / f"{count}.npz"
        np.savez_compressed(path, **trajectories([101] * count, dim=100))
        params = fetch(source="ogbench", path=path)
        tracemalloc.start()
        with open_recording(path, lookup("maze", params), params) as recording:
            for part in recording.chunks():
                assert part.num_episodes == 10
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert (peaks[1] - peaks[0]) / 20_000 < 12


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"terminals": None}, "maze.npz lacks terminals; it has actions, observations, qpos: name a file of OGBench"),
        ({"actions": np.zeros((15, 2))}, r"different numbers of rows \(observations \(16, 3\), actions \(15, 2\)"),
        ({"observations": np.zeros((16, 8, 8, 3), np.uint8)}, "use a dataset of states, not of pictures"),
        ({"actions": np.zeros(16, np.int32)}, "with continuous actions"),
        ({"observations": np.asfortranarray(np.zeros((16, 3)))}, "observations is not a table of numbers"),
        ({"terminals": np.ones(16)}, "row 0 is a trajectory of one state, without a step: leave it out of the file"),
        ({"actions": np.full((16, 2), np.nan)}, "actions has 26 values that are not a finite float32, the first in row 0"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    arrays = {name: values for name, values in (trajectories() | changes).items() if values is not None}
    np.savez(tmp_path / "maze.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "maze.npz")


def test_no_pickle_is_opened(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (tmp_path / "opened").touch, ()

    arrays = trajectories() | {"observations": np.array([[Trap()]] * 16, object)}
    np.savez(tmp_path / "maze.npz", **arrays)
    with pytest.raises(ValueError, match=r"observations is not a table of numbers .* object: replace the file"):
        load(tmp_path / "maze.npz")
    assert not (tmp_path / "opened").exists()


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "maze.npz"
    np.savez_compressed(path, **trajectories())
    with zipfile.ZipFile(path) as file:
        place = file.getinfo("actions.npy").header_offset
    content = bytearray(path.read_bytes())
    content[place + 150 : place + 170] = bytes(20)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"maze\.npz: actions cannot be read \(.*: replace the file with a complete copy"):
        load(path)
    path.write_bytes(content[:300])
    with pytest.raises(ValueError, match=r"maze\.npz cannot be read \(File is not a zip file\)"):
        load(path)
