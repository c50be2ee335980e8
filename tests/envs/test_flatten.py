"""Observations of an environment are flattened as recorded ones are."""

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import h5py
import numpy as np
import pytest
from conftest import custom_dataset
from gymnasium.spaces import Box, Dict, Discrete
from recordings import fetch

from tap.data.catalog import lookup
from tap.data.recording import open_recording
from tap.envs.make import make_environment
from tap.envs.trial import check_environment
from tap.files import write_json


class Nested(gymnasium.Env[Any, np.ndarray]):
    """A Dict whose keys are not in alphabetical order, with another Dict, a matrix of integers and a number."""

    observation_space = Dict(
        {
            "wrist": Box(-1, 1, (2, 2), np.float64),
            "arm": Dict({"speed": Box(0, 9, (), np.float32), "count": Box(0, 255, (3,), np.uint8)}),
        }
    )
    action_space = Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self._observation(), {}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self._observation(), 0.0, False, False, {}

    def _observation(self) -> Any:
        return {
            "wrist": np.array([[0.5, -0.5], [0.25, 1.0]]),
            "arm": {"speed": np.float32(7), "count": np.array([1, 2, 255], np.uint8)},
        }


class Picture(Nested):
    observation_space = Box(0, 255, (2, 3), np.uint8)

    def _observation(self) -> Any:
        return np.arange(6, dtype=np.uint8).reshape(2, 3)


class Labelled(Nested):
    observation_space = Dict({"label": Discrete(3), "place": Box(-1, 1, (1,), np.float32)})

    def _observation(self) -> Any:
        return {"label": 1, "place": np.zeros(1, np.float32)}


@pytest.fixture(autouse=True)
def registered() -> Any:
    for kind in (Nested, Picture, Labelled):
        gymnasium.register(f"{kind.__name__}-v0", entry_point=kind)
    yield
    for kind in (Nested, Picture, Labelled):
        del gymnasium.registry[f"{kind.__name__}-v0"]


@pytest.mark.parametrize(
    ("environment", "keys", "expected"),
    [
        ("Nested-v0", None, [1, 2, 255, 7, 0.5, -0.5, 0.25, 1]),
        ("Nested-v0", ("wrist", "arm/speed"), [0.5, -0.5, 0.25, 1, 7]),
        ("Picture-v0", None, [0, 1, 2, 3, 4, 5]),
        ("Labelled-v0", ("place",), [0]),
    ],
)
def test_observations_are_vectors(environment: str, keys: tuple[str, ...] | None, expected: list[float]) -> None:
    info = replace(custom_dataset("mine", environment, 10), observations=keys)
    with closing(make_environment(info)) as env:
        first, _ = env.reset(seed=0)
        for observation in (first, env.step(np.zeros(2))[0]):
            assert observation.dtype == np.float32
            np.testing.assert_array_equal(observation, np.array(expected, np.float32))
        assert env.observation_space.contains(first)


def minari_dataset(folder: Path) -> Path:
    """A recorded episode of Nested, as Minari writes it."""
    shapes = {"arm": {"count": [3], "speed": []}, "wrist": [2, 2]}

    def space(shape: Any) -> dict[str, Any]:
        if isinstance(shape, dict):
            return {"type": "Dict", "subspaces": {key: space(each) for key, each in reversed(shape.items())}}
        return {"type": "Box", "dtype": "float64", "shape": shape, "low": [-1.0] * 2, "high": [1.0] * 2}

    spaces = {"observation_space": json.dumps(space(shapes)), "action_space": json.dumps(space([2]))}
    write_json(folder / "data/metadata.json", {"total_episodes": 1, "data_format": "hdf5", **spaces})
    recorded = Nested()._observation()
    with h5py.File(folder / "data/main_data.hdf5", "w") as file:
        episode = file.create_group("episode_0")
        for name, value in (("wrist", recorded["wrist"]), *((f"arm/{key}", each) for key, each in recorded["arm"].items())):
            episode[f"observations/{name}"] = np.stack([np.asarray(value)] * 4)
        episode["actions"], episode["rewards"], episode["terminations"] = np.zeros((3, 2)), np.zeros(3), np.zeros(3, bool)
    return folder


@pytest.mark.parametrize("keys", [None, ["wrist", "arm/count"]])
def test_they_are_what_fetch_makes_of_recorded_ones(keys: list[str] | None, tmp_path: Path) -> None:
    path = minari_dataset(tmp_path / "nested")
    params = fetch(source="minari", path=path, environment="Nested-v0", max_episode_steps=10, observations=keys)
    info = lookup("mine", params)
    with open_recording(path, info, params) as recording, closing(make_environment(info)) as env:
        (part,) = recording.chunks()
        np.testing.assert_array_equal(env.reset(seed=0)[0], part.observations[0])
        assert check_environment(info, part.observation_dim, part.action_dim) is not None


def test_what_is_no_box_is_explained() -> None:
    info = custom_dataset("mine", "Labelled-v0", 10)
    with pytest.raises(ValueError, match=r"observation 'label' of Labelled-v0 is in Discrete\(3\).*register a wrapped"):
        make_environment(info)
    with pytest.raises(ValueError, match=r"set datasets\.mine\.fetch\.observations to some of place"):
        make_environment(replace(info, source="minari"))
    with pytest.raises(ValueError, match=r"observation 'arm' of Labelled-v0 is missing"):
        make_environment(replace(info, source="minari", observations=("arm",)))
