"""Episodes exported to Minari, read by the package minari and by `tap`."""

from pathlib import Path
from typing import Any

import minari
import numpy as np
import pytest
from recordings import Data, antmaze, fetch, read_recording, table

from tap.data import chunks
from tap.data.catalog import lookup
from tap.data.episodes import ARRAYS
from tap.data.minari_export import export_to_minari
from tap.data.recording import open_recording


def columns() -> dict[str, Any]:
    recorded = table([5, 1, 7, 4], terminal=[True, True, False, False], timeout=[False, False, True, True])
    recorded["actions"][2] = [1.5, -3.0]
    return recorded


@pytest.mark.parametrize(
    ("dataset", "recorded", "changes"),
    [
        ("mine", columns(), {}),
        ("mine", columns(), {"clip_actions": True}),
        ("antmaze-umaze-v2", antmaze([30, 20], timeout=[True, True]) | {"rewards": np.eye(50, dtype=np.float32)[25]}, {}),
    ],
    ids=["kept", "clipped", "antmaze"],
)
@pytest.mark.parametrize("rows", [1 << 20, 6])
def test_a_round_trip_gives_the_same_episodes_to_the_bit(
    data: Data, dataset: str, recorded: dict[str, Any], changes: dict[str, Any], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = data.load(recorded, dataset, **changes)
    monkeypatch.setattr(chunks, "ROWS", rows)
    cache, params = data.path.with_name("cache"), data.params(dataset, **changes)
    with open_recording(data.path, lookup(dataset, params), params) as recording:
        name = export_to_minari(recording, cache)
    assert name == ("tap/mine-v0" if dataset == "mine" else "tap/antmaze-umaze-v2")
    params = fetch(source="minari", path=cache / name)
    read, report = read_recording(cache / name, lookup("again", params), params)
    for array in ARRAYS:
        assert getattr(read, array).tobytes() == getattr(expected, array).tobytes(), array
    assert "has_rewards" not in report

    monkeypatch.setenv("MINARI_DATASETS_PATH", str(cache))
    loaded = minari.load_dataset(name)
    assert list(minari.list_local_datasets()) == [name]
    assert (loaded.total_episodes, loaded.total_steps) == (expected.num_episodes, len(expected.rewards))
    for index, episode in enumerate(loaded.iterate_episodes()):
        own = expected.select([index])
        np.testing.assert_array_equal(episode.observations, np.concatenate([own.observations, own.observations[-1:]]))
        np.testing.assert_array_equal(episode.actions, own.actions)
        np.testing.assert_array_equal(episode.rewards, own.rewards)
        np.testing.assert_array_equal(episode.terminations, own.terminals)
        assert episode.truncations[-1] == own.truncated[0] and not episode.truncations[:-1].any()


def test_a_dataset_without_rewards_stays_one(tmp_path: Path) -> None:
    arrays = {"observations": np.zeros((4, 2)), "actions": np.zeros((4, 1)), "terminals": np.array([0, 1, 0, 1])}
    np.savez(tmp_path / "maze.npz", **arrays)
    params = fetch(source="ogbench", path=tmp_path / "maze.npz")
    with open_recording(tmp_path / "maze.npz", lookup("maze", params), params) as recording:
        name = export_to_minari(recording, tmp_path)
    params = fetch(source="minari", path=tmp_path / name)
    assert read_recording(tmp_path / name, lookup("again", params), params)[1]["has_rewards"] is False


def test_an_export_replaces_nothing_and_is_complete_or_absent(data: Data, tmp_path: Path) -> None:
    recorded = columns()
    recorded["rewards"][9] = np.nan
    data.write(recorded)
    params = data.params("mine")
    with open_recording(data.path, lookup("mine", params), params) as recording:
        with pytest.raises(ValueError, match="rewards has a value that is not a finite float32, the first in row 9"):
            export_to_minari(recording, tmp_path)
        assert not [path for path in (tmp_path / "tap").rglob("*") if path.is_file()]
    data.write(columns())
    with open_recording(data.path, lookup("mine", params), params) as recording:
        export_to_minari(recording, tmp_path)
        with pytest.raises(ValueError, match="tap/mine-v0 exists: remove it to export the dataset again"):
            export_to_minari(recording, tmp_path)
