"""A profile of recorded episodes: statistics of each dimension, which show what is constant, saturated, jumping or drifting.

It is computed in one pass over chunks of episodes.

Shapes: N rows, E episodes, D dimensions, K parts of the file, S sampled rows.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

import numpy as np
from scipy.stats import f as f_distribution

from tap.data.episodes import Episodes

PARTS = 10  # of equally many rows, in the file's order
SAMPLED = 20_000  # rows, of which histograms and usual steps are made
BLOCK = 1 << 16  # rows whose statistics are computed at once, so that temporary arrays are small

FEW_VALUES = 10  # a dimension with at most so many different values is discrete, and neither saturated nor jumping
SATURATED = 0.05  # share of rows at the least or the greatest value
JUMP = 10.0  # times as far as 99 % of the steps go; in the bundled Hopper data and D4RL's door demonstrations, none exceeds 5
DRIFT = 1.0  # std of a dimension, between the means of two parts
CHANCE = 1e-6  # the largest probability that chance alone, in the order of episodes, makes their means differ so much by part
GAP = 1.5  # usual times between rows; a lost row makes it 2
JUDGED_EPISODES = 2 * PARTS  # with fewer episodes, drift is not judged


@dataclass(frozen=True)
class DimensionStatistics:
    """Statistics of D dimensions over all rows, each (D,) float64 unless another shape is given."""

    min: np.ndarray
    max: np.ndarray
    mean: np.ndarray
    std: np.ndarray
    at_min: np.ndarray  # share of rows
    at_max: np.ndarray
    part_mean: np.ndarray  # (K, D): of each part of the file
    part_std: np.ndarray  # (K, D)
    chance: np.ndarray  # the probability of means of episodes that differ so much between parts, if only chance orders them
    usual_step: np.ndarray  # 99 % of the sampled steps within episodes change the value by at most this
    largest_step: np.ndarray  # of all rows
    largest_at: np.ndarray  # (2, D) int64: the episode of the largest step, and the step of the episode after which it is
    sample: np.ndarray  # (S, D) float32

    @property
    def constant(self) -> np.ndarray:
        """Which dimensions (D,) have one value."""
        return np.asarray(self.min == self.max)

    @cached_property
    def discrete(self) -> np.ndarray:
        """Which dimensions (D,) have few values, as flags and switches have."""
        return np.array([len(np.unique(values)) <= FEW_VALUES for values in self.sample.T])

    @property
    def saturated(self) -> np.ndarray:
        """Which dimensions (D,) are often at the end of their range."""
        return np.asarray((np.maximum(self.at_min, self.at_max) >= SATURATED) & ~self.discrete)

    @property
    def jumping(self) -> np.ndarray:
        """Which dimensions (D,) change in one step much more than usual."""
        return np.asarray((self.largest_step > JUMP * self.usual_step) & (self.usual_step > 0) & ~self.discrete)

    @property
    def drifting(self) -> np.ndarray:
        """Which dimensions (D,) have different means in different parts of the file."""
        return np.asarray((np.ptp(self.part_mean, axis=0) > DRIFT * self.std) & (self.chance < CHANCE) & ~self.constant)


@dataclass(frozen=True)
class Clock:
    """Time between a row and the next of the same episode, in the unit of the file's timestamps."""

    usual: float  # the median; 0 if no episode has two rows
    largest: float
    largest_at: tuple[int, int]  # episode, and the step after which it is
    gaps: int  # times longer than GAP usual ones
    backwards: int  # times that are not above 0


@dataclass(frozen=True)
class Profile:
    """Statistics of a recording's episodes."""

    observations: DimensionStatistics
    actions: DimensionStatistics
    rewards: DimensionStatistics  # D = 1
    returns: np.ndarray  # (E,) float64, undiscounted
    lengths: np.ndarray  # (E,) int64
    terminated: np.ndarray  # (E,) bool
    copies: list[tuple[int, int]]  # episodes that equal an earlier one, each with that one
    repeated_rows: int  # rows of other episodes that equal another row of them
    clock: Clock | None  # None if the file has no timestamps


def profile(
    chunks: Iterable[Episodes], lengths: np.ndarray, timestamps: np.ndarray | None, rng: np.random.Generator
) -> Profile:
    """The profile of episodes that come in `chunks`, in order. `rng` draws the sampled rows.

    `lengths` (E,) are those of all episodes, `timestamps` (N,) are in any unit.
    """
    num_rows = int(lengths.sum())
    sampled = np.sort(rng.choice(num_rows, min(SAMPLED, num_rows), replace=False))
    summaries: dict[str, _Summary] = {}
    returns, terminated, hashes = [], [], []
    multipliers = np.zeros(0, np.uint64)
    for part in chunks:
        columns = {"observations": part.observations, "actions": part.actions, "rewards": part.rewards[:, None]}
        if not summaries:
            summaries = {name: _Summary.begin(values[0], lengths, sampled) for name, values in columns.items()}
            dim = sum(values.shape[1] for values in columns.values())
            multipliers = rng.integers(1 << 63, size=dim, dtype=np.uint64) * 2 + 1
        for name, values in columns.items():
            summaries[name].add(values, part.offsets)
        returns.append(part.returns)
        terminated.append(~part.truncated)
        hashes.append(_hashes(list(columns.values()), multipliers))
    copies, repeated_rows = _duplicates(np.concatenate(hashes), lengths)
    return Profile(
        observations=summaries["observations"].finish(),
        actions=summaries["actions"].finish(),
        rewards=summaries["rewards"].finish(),
        returns=np.concatenate(returns),
        lengths=lengths,
        terminated=np.concatenate(terminated),
        copies=copies,
        repeated_rows=repeated_rows,
        clock=None if timestamps is None else _clock(timestamps, lengths),
    )


@dataclass
class _Summary:
    """What is accumulated over the chunks of D dimensions. Sums are of distances from `origin`, to be precise far from 0."""

    origin: np.ndarray  # (D,) float64
    lengths: np.ndarray  # (E,)
    sampled: np.ndarray  # (S,): rows, sorted
    low: np.ndarray
    high: np.ndarray
    at_low: np.ndarray  # rows
    at_high: np.ndarray
    counts: np.ndarray  # (K,): rows
    sums: np.ndarray  # (K, D)
    squares: np.ndarray  # (K, D)
    episode_sums: np.ndarray  # (K, D): of the means of episodes
    episode_squares: np.ndarray  # (K, D)
    largest: np.ndarray
    largest_row: np.ndarray
    sample: list[np.ndarray] = field(default_factory=list)
    steps: list[np.ndarray] = field(default_factory=list)
    rows: int = 0  # so far
    episodes: int = 0

    @classmethod
    def begin(cls, first: np.ndarray, lengths: np.ndarray, sampled: np.ndarray) -> Self:
        dim, parts = len(first), min(PARTS, int(lengths.sum()))
        return cls(
            origin=first.astype(np.float64),
            lengths=lengths,
            sampled=sampled,
            low=np.full(dim, np.inf),
            high=np.full(dim, -np.inf),
            at_low=np.zeros(dim),
            at_high=np.zeros(dim),
            counts=np.zeros(parts, np.int64),
            sums=np.zeros((parts, dim)),
            squares=np.zeros((parts, dim)),
            episode_sums=np.zeros((parts, dim)),
            episode_squares=np.zeros((parts, dim)),
            largest=np.zeros(dim),
            largest_row=np.zeros(dim, np.int64),
        )

    def add(self, values: np.ndarray, offsets: np.ndarray) -> None:
        """Add the rows (n, D) of whole episodes, which begin at `offsets[:-1]`."""
        ends = np.zeros(len(values), bool)
        ends[offsets[1:] - 1] = True
        for part, rows in self._blocks(len(values)):
            self._add_values(part, values[rows])
            inside = slice(rows.start, min(rows.stop, len(values) - 1))
            if inside.stop > inside.start:
                steps = _distances(values[inside.start : inside.stop], values[inside.start + 1 : inside.stop + 1])
                steps[ends[inside]] = 0
                self._add_steps(steps, self.rows + inside.start)
        chosen = self.sampled[slice(*np.searchsorted(self.sampled, [self.rows, self.rows + len(values)]))] - self.rows
        self.sample.append(values[chosen])
        within = chosen[~ends[chosen]]
        self.steps.append(_distances(values[within], values[within + 1]))
        self._add_episodes(np.add.reduceat(values, offsets[:-1], axis=0, dtype=np.float64) / np.diff(offsets)[:, None])
        self.rows += len(values)

    def _blocks(self, count: int) -> Iterator[tuple[int, slice]]:
        """Ranges of the next `count` rows, each within one part of the file, and its part."""
        parts, total = len(self.counts), int(self.lengths.sum())
        bounds = -(-np.arange(parts + 1) * total // parts)  # the first row of each part
        inner = bounds[(bounds > self.rows) & (bounds < self.rows + count)] - self.rows
        edges = np.union1d(np.concatenate([inner, [count]]), np.arange(0, count, BLOCK))
        for first, end in itertools.pairwise(edges.tolist()):
            yield (self.rows + first) * parts // total, slice(first, end)

    def _add_values(self, part: int, values: np.ndarray) -> None:
        low, high = values.min(axis=0), values.max(axis=0)
        at_low, at_high = (values == low).sum(axis=0), (values == high).sum(axis=0)
        self.at_low = np.where(low > self.low, 0, at_low) + np.where(low < self.low, 0, self.at_low)
        self.at_high = np.where(high < self.high, 0, at_high) + np.where(high > self.high, 0, self.at_high)
        self.low, self.high = np.minimum(self.low, low), np.maximum(self.high, high)
        distances = values - self.origin
        self.counts[part] += len(values)
        self.sums[part] += distances.sum(axis=0)
        self.squares[part] += np.square(distances, out=distances).sum(axis=0)

    def _add_steps(self, steps: np.ndarray, first: int) -> None:
        row = steps.argmax(axis=0)
        step = np.take_along_axis(steps, row[None], axis=0)[0]
        self.largest_row = np.where(step > self.largest, first + row, self.largest_row)
        self.largest = np.maximum(self.largest, step)

    def _add_episodes(self, means: np.ndarray) -> None:
        distances = means - self.origin
        places = (self.episodes + np.arange(len(means))) * len(self.counts) // len(self.lengths)
        for part in np.unique(places):
            self.episode_sums[part] += distances[places == part].sum(axis=0)
            self.episode_squares[part] += np.square(distances[places == part]).sum(axis=0)
        self.episodes += len(means)

    def finish(self) -> DimensionStatistics:
        counts, rows = self.counts[:, None], self.rows
        mean = self.sums.sum(axis=0) / rows
        ends, sample = np.cumsum(self.lengths), np.concatenate(self.sample)
        steps = np.concatenate(self.steps)
        episode = np.searchsorted(ends, self.largest_row, side="right")
        return DimensionStatistics(
            min=self.low,
            max=self.high,
            mean=self.origin + mean,
            std=_root(self.squares.sum(axis=0) / rows - mean**2),
            at_min=self.at_low / rows,
            at_max=self.at_high / rows,
            part_mean=self.origin + self.sums / counts,
            part_std=_root(self.squares / counts - (self.sums / counts) ** 2),
            chance=self._chance(),
            usual_step=np.quantile(steps, 0.99, axis=0) if len(steps) else np.zeros(len(mean)),
            largest_step=self.largest,
            largest_at=np.stack([episode, self.largest_row - (ends - self.lengths)[episode]]),
            sample=sample,
        )

    def _chance(self) -> np.ndarray:
        """The p-value (D,) of an analysis of variance: do the means of episodes differ between parts of the file?

        1 if there are too few episodes.
        """
        total, parts = len(self.lengths), len(self.counts)
        if total < JUDGED_EPISODES:
            return np.ones(len(self.origin))
        counts = np.bincount(np.arange(total) * parts // total)[:, None]
        within = (self.episode_squares - self.episode_sums**2 / counts).sum(axis=0)
        between = (self.episode_sums**2 / counts).sum(axis=0) - self.episode_sums.sum(axis=0) ** 2 / total
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.maximum(between, 0) / (parts - 1) / (np.maximum(within, 0) / (total - parts))
        return np.asarray(np.nan_to_num(f_distribution.sf(ratio, parts - 1, total - parts), nan=1.0))


def _distances(values: np.ndarray, following: np.ndarray) -> np.ndarray:
    """Float64, in which the ends of float32's range have one."""
    return np.asarray(np.abs(np.subtract(following, values, dtype=np.float64)))


def _root(variance: np.ndarray) -> np.ndarray:
    """The square root of variances, which rounding may have made negative."""
    return np.asarray(np.sqrt(np.maximum(variance, 0)))


def _hashes(columns: list[np.ndarray], multipliers: np.ndarray) -> np.ndarray:
    """A number (n,) uint64 for each row of `columns`, the same for equal rows, different for others but by chance of 2^-63."""
    total, first = np.zeros(len(columns[0]), np.uint64), 0
    for values in columns:
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        for column, multiplier in zip(bits.T, multipliers[first:], strict=False):
            total += column * multiplier
        first += values.shape[1]
    return total


def _duplicates(hashes: np.ndarray, lengths: np.ndarray) -> tuple[list[tuple[int, int]], int]:
    """Episodes that equal an earlier one, with that one; and how many rows of the other episodes equal another of them."""
    seen: dict[bytes, int] = {}
    copies, ends = [], np.cumsum(lengths)
    original = np.ones(len(hashes), bool)
    for episode, (first, end) in enumerate(zip(ends - lengths, ends, strict=True)):
        earlier = seen.setdefault(hashes[first:end].tobytes(), episode)
        if earlier != episode:
            copies.append((episode, earlier))
            original[first:end] = False
    return copies, int(original.sum()) - len(np.unique(hashes[original]))


def _clock(timestamps: np.ndarray, lengths: np.ndarray) -> Clock:
    times = np.diff(timestamps)
    ends = np.cumsum(lengths)
    times[ends[:-1] - 1] = np.nan  # from an episode to the next
    inside = np.delete(times, ends[:-1] - 1)
    if not len(inside):
        return Clock(0.0, 0.0, (0, 0), 0, 0)
    usual, row = float(np.median(inside)), int(np.nanargmax(times))
    episode = int(np.searchsorted(ends, row, side="right"))
    place = episode, row - int(ends[episode] - lengths[episode])
    return Clock(usual, float(times[row]), place, int((inside > GAP * usual).sum()), int((inside <= 0).sum()))
