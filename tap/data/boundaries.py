"""Where episodes end in a file that is a flat table with one row per step.

`terminals` and `timeouts` mark an episode's last row, and a *jump* is a row whose successor belongs to another trajectory:

    row           0   1   2 | 3   4 | 5   6   7 | 8   9
    observation   s0  s1  s2| s0  s1| s0  s1  s2| s0  s1
    terminals     .   .   T | .   . | .   .   . | .   .      the task ended
    timeouts      .   .   . | .   U | .   .   . | .   .      stopped by a limit, or by a collector
    jump          .   .   j | .   j | .   .   j | .   .      found by comparing neighbouring rows

- An episode ends at a terminal, a timeout, a jump, or the end of the file, whichever comes first.
- Jumps are found by `next_observations`, if the file has them, and by `fetch.max_jump`, if it is set. If it is not: in AntMaze,
  ant or goal moves more than 1 m in a step (v0's timeouts do not coincide with its resets); in Adroit, most dimensions move
  further than in 99 % of ordinary steps.
- Adroit's human demonstrations are longer than the limit at which their files set a timeout, so in Adroit a timeout ends an
  episode only if the observation jumps.
- In AntMaze the task ends at the goal with a reward of 1, but the recording continues: rows with a reward or a terminal come in
  runs, and an ant near the goal leaves and reaches it again within a few steps. The first such row ends the episode; the rows
  after it, up to the last such row before the reset, are dropped and counted; the next row begins another episode.
- A terminal is a true one only before the limit `max_episode_steps`: at or past it, old releases of gym and recorders of
  demonstrations flag a terminal merely because they stop. A rewarded goal in AntMaze is a true end at any time. Every other
  episode is truncated.
- An episode longer than the limit has a missing boundary, and is an error. If jumps are searched for, only an episode five
  times as long is an error, because recordings may have had other limits.
"""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from tap.data.catalog import DatasetInfo
from tap.data.chunks import row_chunks
from tap.data.table import Table
from tap.settings import FetchParams, Suite

ANTMAZE_MAX_JUMP = 1.0  # metres; measured: at most 0.35 m within an episode
LONGEST = 5  # times max_episode_steps, if jumps are searched for; Adroit's longest demonstration, hammer's 624 steps, is 3.1
QUANTILE_ROWS = 100_000  # at most this many ordinary steps are sampled for Adroit's quantile


@dataclass(frozen=True)
class Boundaries:
    """The rows of each episode: those of `starts[e]` to `ends[e]`, in the file's order. N rows, E episodes."""

    starts: np.ndarray  # (E,) int64: the first row
    ends: np.ndarray  # (E,) int64: the last row + 1
    reasons: np.ndarray  # (E,) str: what ends it, a key of `describe`
    terminated: np.ndarray  # (E,) bool: a true end, rather than a truncation
    kept: np.ndarray  # (N,) bool: rows that belong to an episode
    ignored_timeouts: int

    @classmethod
    def of_episodes(cls, lengths: np.ndarray, terminated: np.ndarray) -> Self:
        """The boundaries of a file that states its episodes: their lengths (E,), and which of them (E,) truly ended."""
        ends = np.cumsum(lengths)
        reasons = np.where(terminated, "terminals", "timeouts")
        return cls(ends - lengths, ends, reasons, terminated, np.ones(int(ends[-1]), bool), ignored_timeouts=0)

    @property
    def lengths(self) -> np.ndarray:
        """Steps of each episode (E,) int64."""
        return np.asarray(self.ends - self.starts)

    def describe(self) -> dict[str, Any]:
        """How many episodes end for each reason, and what was ignored or dropped; also as a sentence, under "how"."""
        counts = {
            name: int((self.reasons == name).sum()) for name in ("terminals", "timeouts", "discontinuities", "end_of_file")
        }
        counts |= {"ignored_timeouts": self.ignored_timeouts, "dropped_goal_rows": int((~self.kept).sum())}
        how = (
            "episodes end at {terminals} terminals, {timeouts} timeouts, {discontinuities} discontinuities, and {end_of_file} "
            "at the end of the file; timeouts ignored because the observation continues: {ignored_timeouts}; "
            "rows dropped at the goal: {dropped_goal_rows}"
        )
        return counts | {"how": how.format(**counts)}


def find_boundaries(table: Table, info: DatasetInfo, fetch: FetchParams) -> Boundaries:
    """Where each episode begins and ends, by the rules above. Raises ValueError if a boundary is missing."""
    terminals, timeouts = table.read_flags("terminals"), table.read_flags("timeouts")
    jumps = _jumps(table, info, fetch, terminals | timeouts)
    at_goal = np.zeros_like(terminals)
    if info.suite == "antmaze":
        for rows in row_chunks(table.num_rows):
            at_goal[rows] = table.read("rewards", rows) > 0
        terminals |= at_goal
    ends = terminals | jumps if info.suite == "adroit" else terminals | timeouts | jumps
    ends[-1] = True
    kept = ~_between_terminals(terminals, timeouts | jumps) if info.suite == "antmaze" else np.ones_like(ends)
    last = np.flatnonzero(ends & kept)
    starts = np.flatnonzero(kept & np.concatenate([[True], (ends | ~kept)[:-1]]))
    assert info.max_episode_steps is not None
    at_limit = last + 1 - starts >= info.max_episode_steps
    reasons = np.select(
        [terminals[last] & ~(timeouts[last] & at_limit), timeouts[last], jumps[last]],
        ["terminals", "timeouts", "discontinuities"],
        "end_of_file",
    )
    terminated = (reasons == "terminals") & (~at_limit | at_goal[last])
    boundaries = Boundaries(starts, last + 1, reasons, terminated, kept, int((timeouts & ~ends).sum()))
    _check_lengths(boundaries, table, info, fetch)
    return boundaries


def _between_terminals(terminals: np.ndarray, resets: np.ndarray) -> np.ndarray:
    """Which rows (N,) come after the first and up to the last terminal since the last reset; `resets` (N,) precede one."""
    rows = np.flatnonzero(terminals)
    trajectory = np.searchsorted(np.flatnonzero(resets), rows)
    _, begins, counts = np.unique(trajectory, return_index=True, return_counts=True)
    first, last = rows[begins], rows[begins + counts - 1]
    steps = np.zeros(len(terminals) + 1, np.int8)
    steps[first + 1] += 1
    steps[last + 1] -= 1
    return np.cumsum(steps[:-1], dtype=np.int8).astype(bool)


def _jumps(table: Table, info: DatasetInfo, fetch: FetchParams, flagged: np.ndarray) -> np.ndarray:
    """After which rows (N,) the next row does not continue the trajectory."""
    jumps = np.zeros(table.num_rows, bool)
    max_jump = ANTMAZE_MAX_JUMP if fetch.max_jump is None and info.suite == "antmaze" else fetch.max_jump
    by_quantile = info.suite == "adroit" and max_jump is None
    if max_jump is None and not by_quantile and "next_observations" not in table.columns:
        return jumps
    usual = _usual_steps(table, flagged) if by_quantile else None
    for rows in row_chunks(table.num_rows - 1):
        observations = _with_next(table, rows)
        if max_jump is not None:
            jumps[rows] = _distances(observations, info.suite) > max_jump
        elif by_quantile:
            jumps[rows] = flagged[rows] if usual is None else _resets(observations, usual)
        if "next_observations" in table.columns:
            following = table.read("next_observations", rows)
            observed = observations[1:, : following.shape[1]]
            jumps[rows] |= ~np.isclose(following, observed, rtol=1e-4, atol=1e-4).all(axis=1)
    return jumps


def _with_next(table: Table, rows: slice) -> np.ndarray:
    """The observations of `rows` and of the row after them."""
    return table.read("observations", slice(rows.start, rows.stop + 1))


def _distances(observations: np.ndarray, suite: Suite) -> np.ndarray:
    """Distance from each row to the next (N - 1,): of all dimensions, in AntMaze of the positions (m) of ant and goal."""
    if suite == "antmaze":
        observations = observations[:, [0, 1, -2, -1]]
    with np.errstate(over="ignore"):  # beyond 1e19, squares are infinite in float32
        return np.asarray(np.linalg.norm(np.diff(observations, axis=0), axis=1))


def _usual_steps(table: Table, flagged: np.ndarray) -> np.ndarray | None:
    """How far each dimension (O,) moves at most in 99 % of the steps from unflagged rows; None if all are flagged."""
    ordinary = table.num_rows - 1 - int(flagged[:-1].sum())
    if not ordinary:
        return None
    stride, seen, sample = 1 + ordinary // QUANTILE_ROWS, 0, []
    for rows in row_chunks(table.num_rows - 1):
        unflagged = np.flatnonzero(~flagged[rows])
        observations = _with_next(table, rows)
        chosen = unflagged[-seen % stride :: stride]
        sample.append(np.abs(observations[chosen + 1] - observations[chosen]))
        seen += len(unflagged)
    return np.asarray(np.quantile(np.concatenate(sample), 0.99, axis=0))


def _resets(observations: np.ndarray, usual: np.ndarray) -> np.ndarray:
    """After which rows (N - 1,) most dimensions move further than `usual` (O,).

    Distances do not reveal a reset, because Adroit observations have dimensions that flip from -1 to 1. In human and expert
    data of the four tasks, resets move at least 62 % of the dimensions that far, other steps at most 42 %.
    """
    moving = usual > 0
    return np.asarray((np.abs(np.diff(observations, axis=0)) > usual)[:, moving].sum(axis=1) > moving.sum() / 2)


def _check_lengths(boundaries: Boundaries, table: Table, info: DatasetInfo, fetch: FetchParams) -> None:
    """Raise ValueError if an episode is so long that a boundary must be missing."""
    limit, lengths = info.max_episode_steps, boundaries.lengths
    assert limit is not None
    jumps = info.suite in ("adroit", "antmaze") or fetch.max_jump is not None or "next_observations" in table.columns
    too_long = np.flatnonzero(lengths > (LONGEST * limit if jumps else limit))
    if not len(too_long):
        return
    first, end = boundaries.starts[too_long[0]], boundaries.ends[too_long[0]]
    largest = ", ".join(f"{distance:.3g} after row {row}" for distance, row in _largest_distances(table, info.suite))
    flags = (
        "its flags miss some ends"
        if "timeouts" in table.columns
        else "the file has no `timeouts`, and terminals miss some ends"
    )
    key = f"datasets.{info.id}.fetch"
    raise ValueError(
        f"{table.path}: rows {first} to {end - 1} would be one episode of {end - first} steps, but the limit is {limit}: "
        f"{flags} ({len(too_long)} of {len(lengths)} episodes are too long). Either add the right `timeouts` to the file; "
        f"or set {key}.max_jump in params.yaml to a distance between neighbouring observations that only a reset exceeds "
        f"(largest: {largest}); or, if episodes are that long, raise {key}.max_episode_steps"
    )


def _largest_distances(table: Table, suite: Suite) -> list[tuple[float, int]]:
    """The three largest distances from a row to the next, each with its row."""
    largest: list[tuple[float, int]] = []
    for rows in row_chunks(table.num_rows - 1):
        distances = _distances(_with_next(table, rows), suite)
        largest += [(float(distances[row]), rows.start + int(row)) for row in np.argsort(-distances)[:3]]
    return sorted(largest, key=lambda pair: -pair[0])[:3]
