"""What an exported policy needs to know of its dataset: states to check it at, names of dimensions, bounds of actions.

Shapes: N states, O observation, A action.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tap.data.action_bounds import ActionBounds, no_bounds, unit_bounds
from tap.data.episodes import Episodes
from tap.data.history import History
from tap.data.windows import Layout, Normalizer
from tap.results import ValidationReport

STATES = 256
RAW = Path("data/raw")


@dataclass(frozen=True)
class DataFacts:
    """Of a dataset's episodes where they are here, else of what the policy keeps of them."""

    states_NO: np.ndarray  # raw float32
    histories: Sequence[History]  # of the episode of each
    drawn_from: str  # in words
    bounds: ActionBounds  # infinite where they are not known
    observation_names: list[str] | None = None
    action_names: list[str] | None = None
    fps: float | None = None


def data_facts(dataset: str, digest: str, normalizer: Normalizer, layout: Layout, rng: np.random.Generator) -> DataFacts:
    """The facts of `dataset` from `data/raw`, if what is there has this digest; else states within the range of the data."""
    folder = RAW / dataset
    if (folder / "validation.json").exists():
        validation = ValidationReport.read(folder / "validation.json")
        if validation.digest == digest:
            episodes = Episodes.load(folder / "episodes")
            steps = len(episodes.observations)
            rows = np.sort(rng.choice(steps, min(STATES, steps), replace=False))
            rows[0] = 0  # the start of an episode, for the sample
            firsts = episodes.offsets[np.searchsorted(episodes.offsets, rows, side="right") - 1]
            return DataFacts(
                episodes.observations[rows].astype(np.float32),
                [_history(episodes, first, row) for first, row in zip(firsts, rows, strict=True)],
                f"{folder}/episodes",
                _bounds(validation),
                validation.observation_names,
                validation.action_names,
                validation.fps,
            )
    assert normalizer.min is not None and normalizer.max is not None
    states, actions = (
        rng.uniform(normalizer.min[columns], normalizer.max[columns], (STATES, columns.stop - columns.start)).astype(np.float32)
        for columns in (layout.observation, layout.action)
    )
    histories = [History(states[:row], actions[:row], np.zeros(row)) for row in range(STATES)]
    words = f"the range of each dimension of the data, because {folder} does not hold the episodes that it was trained on"
    return DataFacts(states, histories, words, no_bounds(layout.action_dim))


def _history(episodes: Episodes, first: int, row: int) -> History:
    """The steps of an episode, which begins with the row `first`, before `row`."""
    steps = slice(first, row)
    return History(episodes.observations[steps], episodes.actions[steps], episodes.rewards[steps])


def _bounds(validation: ValidationReport) -> ActionBounds:
    if validation.action_low is None or validation.action_high is None:
        known = validation.action_bounds is not None  # not in reports of early versions
        return unit_bounds(validation.action_dim) if known else no_bounds(validation.action_dim)
    low, high = (
        np.array([infinity if each is None else each for each in bound], np.float32)
        for bound, infinity in ((validation.action_low, -np.inf), (validation.action_high, np.inf))
    )
    return low, high
