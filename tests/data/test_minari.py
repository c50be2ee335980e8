"""Datasets that the package minari writes."""

import json
from pathlib import Path
from typing import Any

import gymnasium
import gymnasium_robotics
import h5py
import minari
import numpy as np
import pytest
from gymnasium import spaces
from minari.data_collector import EpisodeBuffer
from recordings import fetch, read_recording

from tap.data import chunks
from tap.data.catalog import lookup
from tap.data.download import obtain
from tap.data.episodes import Episodes

LENGTHS, TERMINATED = [5, 1, 7, 4], [True, False, False, True]
BOX = spaces.Box(-np.inf, np.inf, (3,), np.float64)
DICT = spaces.Dict(
    {
        "observation": BOX,
        "goal": spaces.Dict(
            {"desired": spaces.Box(-1, 1, (2, 1), np.float32), "achieved": spaces.Box(-1, 1, (2,), np.float32)}
        ),
    }
)


def sample(space: gymnasium.Space[Any], rows: int, rng: np.random.Generator) -> Any:
    """Random values of a space, as Minari takes them: rows of arrays, in a dict for each Dict."""
    if isinstance(space, spaces.Dict):
        return {key: sample(part, rows, rng) for key, part in space.spaces.items()}
    return rng.uniform(-1, 1, (rows, *space.shape)).astype(space.dtype)


class Folder:
    """A small dataset in Minari's cache, and what was recorded."""

    def __init__(
        self,
        cache: Path,
        monkeypatch: pytest.MonkeyPatch,
        data_format: str = "hdf5",
        observations: gymnasium.Space[Any] = BOX,
        actions: gymnasium.Space[Any] | None = None,
    ) -> None:
        monkeypatch.setenv("MINARI_DATASETS_PATH", str(cache))
        self.cache, self.path, rng = cache, cache / "arm/push-v0", np.random.default_rng(0)
        actions = actions or spaces.Box(-2, 2, (2,), np.float32)
        self.episodes = []
        for length, ended in zip(LENGTHS, TERMINATED, strict=True):
            last = np.arange(length) == length - 1
            buffer = EpisodeBuffer(
                observations=sample(observations, length + 1, rng),
                actions=sample(actions, length, rng),
                rewards=rng.normal(size=length),
                terminations=last & ended,
                truncations=last & (not ended),
            )
            self.episodes.append(buffer)
        minari.create_dataset_from_buffers(
            "arm/push-v0", self.episodes, observation_space=observations, action_space=actions, data_format=data_format
        )

    def joined(self, read: Any) -> np.ndarray:
        return np.concatenate([np.asarray(read(each)) for each in self.episodes]).astype(np.float32)

    def load(self, **changes: Any) -> tuple[Episodes, dict[str, Any]]:
        params = fetch(source="minari", path=self.path, **changes)
        return read_recording(self.path, lookup("arm", params), params)


@pytest.mark.parametrize("data_format", ["hdf5", "arrow", "parquet"])
@pytest.mark.parametrize("rows", [1 << 20, 6])
def test_steps_are_read_as_they_were_recorded(
    tmp_path: Path, data_format: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "ROWS", rows)
    folder = Folder(tmp_path, monkeypatch, data_format)
    episodes, report = folder.load()
    np.testing.assert_array_equal(episodes.observations, folder.joined(lambda each: each.observations[:-1]))
    np.testing.assert_array_equal(episodes.actions, folder.joined(lambda each: each.actions))
    np.testing.assert_array_equal(episodes.rewards, folder.joined(lambda each: each.rewards))
    assert episodes.lengths.tolist() == LENGTHS
    assert np.flatnonzero(episodes.terminals).tolist() == [4, 16]
    assert (report["action_bounds"], report["action_low"], report["action_high"]) == ("[-2, 2]", [-2, -2], [2, 2])
    assert report["truncated_episodes"] == 2 and report["source"] == "minari" and "has_rewards" not in report


@pytest.mark.parametrize("data_format", ["hdf5", "arrow"])
def test_a_dict_is_flattened_as_by_gymnasium(tmp_path: Path, data_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(tmp_path, monkeypatch, data_format, DICT)
    episodes, report = folder.load()
    first = folder.episodes[0].observations
    step = {"observation": first["observation"][2], "goal": {key: first["goal"][key][2] for key in ("desired", "achieved")}}
    np.testing.assert_array_equal(episodes.observations[2], spaces.flatten(DICT, step).astype(np.float32))
    names = ["goal/achieved[0]", "goal/achieved[1]", "goal/desired[0]", "goal/desired[1]"]
    assert report["observation_names"] == [*names, *(f"observation[{i}]" for i in range(3))]


def test_chosen_keys_of_a_dict_are_joined_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(tmp_path, monkeypatch, observations=DICT)
    episodes, _ = folder.load(observations=["observation", "goal/desired"])
    expected = folder.joined(
        lambda each: np.hstack([each.observations["observation"], each.observations["goal"]["desired"][:, :, 0]])[:-1]
    )
    np.testing.assert_array_equal(episodes.observations, expected)


def test_an_id_names_a_dataset_in_minaris_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(tmp_path / "cache", monkeypatch)
    info = lookup("arm", fetch(source="minari", path="arm/push-v0"))
    assert obtain(info, folder.cache, tmp_path / "lock") == folder.path
    with pytest.raises(ValueError, match=r"arm/push-v0 does not exist and .*elsewhere/arm/push-v0 does not exist: run"):
        obtain(info, tmp_path / "elsewhere", tmp_path / "lock")


def with_spec(folder: Folder, **specs: str) -> None:
    """Metadata that name environments, as JSON of their specifications."""
    path = folder.path / "data/metadata.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | specs))


def test_facts_of_the_environment_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(tmp_path, monkeypatch)
    gymnasium.register_envs(gymnasium_robotics)
    recorded, evaluated = (gymnasium.spec(f"PointMaze_{maze}-v3") for maze in ("UMaze", "Medium"))
    with_spec(folder, env_spec=recorded.to_json())
    expected = {
        "environment": "gymnasium_robotics:PointMaze_UMaze-v3",
        "environment_kwargs": recorded.kwargs,
        "max_episode_steps": 300,
    }
    assert folder.load()[1]["own_environment"] == expected
    with_spec(folder, eval_env_spec=evaluated.to_json())
    own = folder.load()[1]["own_environment"]
    assert (own["environment"], own["max_episode_steps"]) == ("gymnasium_robotics:PointMaze_Medium-v3", 600)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"id": "antigravity:InvertedPendulum-v5"}, "it is of none of gymnasium and gymnasium_robotics"),
        ({"entry_point": "os:system"}, "it is of none of gymnasium and gymnasium_robotics"),
        ({"additional_wrappers": [{"name": "Rescale", "entry_point": "os:system", "kwargs": {}}]}, "it has wrappers"),
    ],
)
def test_no_code_that_a_dataset_names_is_imported(
    changes: dict[str, Any], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder(tmp_path, monkeypatch)
    with_spec(folder, env_spec=json.dumps(json.loads(gymnasium.spec("InvertedPendulum-v5").to_json()) | changes))
    report = folder.load()[1]
    assert "own_environment" not in report
    assert any(f"Pendulum-v5, which is not made for it, since {reason}" in each for each in report["warnings"])


def mistake_of(folder: Folder, **changes: Any) -> str:
    with pytest.raises(ValueError) as error:
        folder.load(**changes)
    assert "\n" not in str(error.value) and len(str(error.value)) < 500
    return str(error.value)


@pytest.mark.parametrize(
    ("observations", "chosen", "message"),
    [
        (
            DICT,
            ["goal"],
            "observation 'goal' is missing: set datasets.arm.fetch.observations to some of goal/achieved, goal/des",
        ),
        (
            spaces.Dict({"at": BOX, "mode": spaces.Discrete(3)}),
            None,
            "observation 'mode' is of type Discrete: set datasets.arm",
        ),
        (
            spaces.Dict({"at": BOX, "eye": spaces.Box(0, 255, (8, 8, 3), np.uint8)}),
            None,
            "'eye' is a picture: set datasets.arm",
        ),
    ],
)
def test_what_cannot_be_observed_is_named(
    tmp_path: Path,
    observations: gymnasium.Space[Any],
    chosen: list[str] | None,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = Folder(tmp_path, monkeypatch, observations=observations)
    assert message in mistake_of(folder, observations=chosen)


def test_actions_that_are_no_box_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(tmp_path, monkeypatch, actions=spaces.Discrete(4))
    assert "actions are of type Discrete, but TAP needs a Box: use another dataset" in mistake_of(folder)


def test_a_damaged_dataset_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(tmp_path, monkeypatch)
    data = folder.path / "data"
    with h5py.File(data / "main_data.hdf5", "r+") as file:
        actions = file["episode_2/actions"][:]
        actions[3, 1] = np.nan
        file["episode_2/actions"][:] = actions
    assert "actions has a value that is not a finite float32, the first in step 3 of episode_2: fix it" in mistake_of(folder)
    with h5py.File(data / "main_data.hdf5", "r+") as file:
        file["episode_2/actions"].resize(6, axis=0)
    assert "episode_2/actions has shape (6, 2), but its 7 rewards and metadata.json call for 7 rows of 2" in mistake_of(folder)
    with h5py.File(data / "main_data.hdf5", "r+") as file:
        del file["episode_2/actions"]
    assert "episode_2/actions is missing, or no table of numbers: replace the file" in mistake_of(folder)
    metadata = json.loads((data / "metadata.json").read_text())
    (data / "metadata.json").write_text(json.dumps(metadata | {"total_episodes": 5}))
    assert "episode_4/rewards is missing" in mistake_of(folder)
    (data / "metadata.json").unlink()
    assert "metadata.json does not exist: get the whole dataset, or correct its path in params.yaml" in mistake_of(folder)


def test_a_damaged_arrow_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(tmp_path, monkeypatch, "arrow")
    (file,) = (folder.path / "data/2").glob("*.arrow")
    file.write_bytes(file.read_bytes()[:-30])
    assert "data/2 cannot be read (" in mistake_of(folder)
