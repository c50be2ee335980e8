"""The least and greatest action: what is out of range, and what `fetch.clip_actions` clips to.

The bounds are those of the dataset's environment; without one those that the dataset states; D4RL's [-1, 1] for a file in its
layout; or none. Where `fetch.action_low` and `fetch.action_high` are set, they are these, for all dimensions or for each.

When a policy acts, its actions are clipped to the bounds that are known: D4RL's are a guess for a file without an environment.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tap.data.catalog import WITH_EPISODES, DatasetInfo
from tap.files import read_json, write_json
from tap.results import ValidationReport
from tap.settings import FetchParams

BOUNDS_FILE = "action_bounds.json"  # in the folder of a policy
ActionBounds = tuple[np.ndarray, np.ndarray]  # least and greatest value of each dimension (A,) float32, infinite for none


def unit_bounds(action_dim: int) -> ActionBounds:
    """D4RL's."""
    ones = np.ones(action_dim, np.float32)
    return -ones, ones


def no_bounds(action_dim: int) -> ActionBounds:
    """All actions are in range."""
    infinite = np.full(action_dim, np.inf, np.float32)
    return -infinite, infinite


def with_params(bounds: ActionBounds, fetch: FetchParams, dataset: str) -> ActionBounds:
    """`bounds`, or where `fetch` sets them, those. Raises ValueError if they have other dimensions, or if low exceeds high."""
    key, dim = f"datasets.{dataset}.fetch", len(bounds[0])
    chosen = []
    for name, own, infinity in (("action_low", bounds[0], -np.inf), ("action_high", bounds[1], np.inf)):
        value = getattr(fetch, name)
        if isinstance(value, list):
            if len(value) != dim:
                raise ValueError(f"{key}.{name} has {len(value)} values, but actions have {dim} dimensions: list {dim}")
            own = np.array([infinity if each is None else each for each in value], np.float32)
        elif value is not None:
            own = np.full(dim, value, np.float32)
        chosen.append(own)
    low, high = chosen
    if (low >= high).any():
        index = int((low >= high).argmax())
        raise ValueError(
            f"{key}: the bounds of action dimension {index} are {low[index]:g} and {high[index]:g}: correct action_low and "
            "action_high"
        )
    return low, high


def known_bounds(validation: ValidationReport, info: DatasetInfo, fetch: FetchParams) -> ActionBounds:
    """The bounds that a policy's actions are clipped to: those of the stage fetch, but infinite where they are a guess."""
    unit, none = unit_bounds(validation.action_dim), no_bounds(validation.action_dim)
    reported = (validation.action_low, validation.action_high)
    bounds = unit if validation.action_low is None else _from_json(reported)
    if info.environment is not None or info.source in WITH_EPISODES:
        return bounds
    stated = (fetch.action_low, fetch.action_high)
    low, high = (own if value is not None else guess for own, value, guess in zip(bounds, stated, none, strict=True))
    return low, high


def save_bounds(folder: Path, bounds: ActionBounds) -> None:
    """Write the bounds into the folder of a policy."""
    low, high = ([float(each) if np.isfinite(each) else None for each in bound] for bound in bounds)
    write_json(folder / BOUNDS_FILE, {"low": low, "high": high})


def load_bounds(folder: Path, action_dim: int) -> ActionBounds:
    """What `save_bounds` wrote; none for a policy of an early release, which has no such file."""
    path = folder / BOUNDS_FILE
    if not path.exists():
        return no_bounds(action_dim)
    bounds = read_json(path)
    return _from_json((bounds["low"], bounds["high"]))


def _from_json(bounds: Sequence[Sequence[float | None] | None]) -> ActionBounds:
    low, high = (
        np.array([infinity if each is None else each for each in bound or ()], np.float32)
        for bound, infinity in zip(bounds, (-np.inf, np.inf), strict=True)
    )
    return low, high
