"""The least and greatest action: what is out of range, and what `fetch.clip_actions` clips to.

The bounds are those of the dataset's environment; without one those that the dataset states; D4RL's [-1, 1] for a file in its
layout; or none. Where `fetch.action_low` and `fetch.action_high` are set, they are these, for all dimensions or for each.
"""

import numpy as np

from tap.settings import FetchParams

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
