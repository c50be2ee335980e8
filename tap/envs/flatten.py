"""Observations of an environment as vectors of floats, flattened as the stage fetch flattens recorded ones.

- Of a Dict: its values, flattened in turn and joined, by their keys in alphabetical order, or those of `fetch.observations`, in
  that order. A key in an inner Dict is "outer/inner".
- Of a Box of another shape: its numbers, row by row; of another type: as float32.
"""

from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Space

from tap.data.catalog import DatasetInfo


def is_flat(space: Space[Any]) -> bool:
    """Whether a space is a flat Box of floats."""
    return isinstance(space, Box) and len(space.shape) == 1 and bool(np.issubdtype(space.dtype, np.floating))


class FlatObservations(gymnasium.ObservationWrapper[np.ndarray, np.ndarray, Any]):
    """An environment whose observations are flattened, (O,) float32. Raises ValueError if some are not numbers in a Box."""

    def __init__(self, env: gymnasium.Env[Any, np.ndarray], info: DatasetInfo) -> None:
        super().__init__(env)
        boxes = dict(_leaves(env.observation_space))
        self.keys = info.observations or tuple(boxes)
        for key in self.keys:
            if not isinstance(boxes.get(key), Box):
                what = f"in {boxes[key]}" if key in boxes else "missing"
                usable = ", ".join(name for name, space in boxes.items() if isinstance(space, Box) and name)
                chosen = f"set datasets.{info.id}.fetch.observations to some of {usable}"
                remedy = chosen if usable and info.source == "minari" else "register a wrapped environment"
                named = f"observation {key!r}" if key else "the observation"
                raise ValueError(f"{info.id}: {named} of {info.environment} is {what}, but TAP needs a Box: {remedy}")
        low, high = (
            np.concatenate([np.ravel(getattr(boxes[key], end)).astype(np.float32) for key in self.keys])
            for end in ("low", "high")
        )
        self.observation_space = Box(low, high)

    def observation(self, observation: Any) -> np.ndarray:
        """A vector (O,) float32."""
        return np.concatenate([np.ravel(_at(observation, key)).astype(np.float32) for key in self.keys])


def _leaves(space: Space[Any], name: str = "") -> Iterator[tuple[str, Space[Any]]]:
    """The spaces in a Dict of spaces, at any depth, by their joined keys in alphabetical order; "" names this space."""
    if isinstance(space, Dict):
        for key, inner in sorted(space.spaces.items()):
            yield from _leaves(inner, f"{name}/{key}" if name else key)
    else:
        yield name, space


def _at(observation: Any, key: str) -> Any:
    """The value under joined keys; the observation itself under ""."""
    for part in key.split("/") if key else ():
        observation = observation[part]
    return observation
