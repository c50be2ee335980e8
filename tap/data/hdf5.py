"""Datasets: the registry of known ones, and HDF5 files in D4RL's layout -> validated Episodes.

A file is a flat table, one row a step; `terminals` and `timeouts` mark an episode's last row, and a *jump* is a row that the
next one does not continue:

    row           0   1   2 | 3   4 | 5   6   7 | 8   9
    observation   s0  s1  s2| s0  s1| s0  s1  s2| s0  s1
    terminals     .   .   T | .   . | .   .   . | .   .      the task ended: no future
    timeouts      .   .   . | .   U | .   .   . | .   .      stopped by a limit, or by a collector
    jump          .   .   j | .   j | .   .   j | .   .      found by comparing neighbouring rows

Where an episode ends:

- At a terminal, a timeout, a jump, and the end of the file, whichever comes first.
- Jumps are found by `next_observations`, where the file has them, and by `fetch.max_jump`, where it is set. Where it is not:
  in AntMaze, ant or goal moves more than 1 m in a step (v0's timeouts are out of step with its resets); in Adroit, most
  dimensions move further than 99 % of ordinary steps move them.
- Adroit's human demonstrations outlast the limit at which their files set a timeout, so there a timeout ends an episode only
  where the observation jumps.
- AntMaze's collectors went on at the goal, where the task pays 1 and ends: rows that pay, or are flagged, come in runs, and
  ants that loiter there leave and reach it again within steps. The first such row ends the episode; the rows after it, up to
  the last such row before the reset, are dropped and counted; what follows is an episode of its own.
- A terminal is a true one only before the limit `max_episode_steps`: at or past it, old releases of gym and recorders of
  demonstrations flag a terminal merely because they stop. A goal that AntMaze pays for is a true end at any time. Every other
  episode is truncated.
- An episode longer than the limit misses a boundary, and is an error. Where jumps are looked for, only one five times as long
  is: collectors had limits of their own.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from tap.data.catalog import ANT_OBSERVATION_DIM, DatasetInfo
from tap.data.episodes import Episodes
from tap.files import sha256
from tap.settings import FetchParams, Suite

ANTMAZE_MAX_JUMP = 1.0  # metres; measured: at most 0.35 m within an episode
LONGEST = 5  # times max_episode_steps, where jumps are looked for; Adroit's longest demonstration, hammer's 624 steps, is 3.1

FLAGS = ("terminals", "timeouts")

Columns = dict[str, np.ndarray]


def load_episodes(path: Path, info: DatasetInfo, fetch: FetchParams) -> tuple[Episodes, dict[str, Any]]:
    """Read an HDF5 file in D4RL's layout, cut it into episodes by the rules above, and describe it.

    Returns the episodes and a report that JSON can hold. Raises ValueError on a file that cannot be read, lacks a key, has keys
    of different lengths or numbers that are not finite, or whose episode boundaries are not found.
    """
    columns = _read(path, info)
    cut = _cut(columns, info, fetch)
    _check_lengths(path, info, fetch, columns, cut)
    observations, actions, rewards = (columns[key][cut.rows] for key in ("observations", "actions", "rewards"))
    terminals, last = np.zeros(len(cut.rows), bool), cut.offsets[1:] - 1
    at_goal = rewards[last] > 0 if info.suite == "antmaze" else False
    terminals[last] = (cut.reasons == "terminals") & ((cut.lengths < info.max_episode_steps) | at_goal)
    clipped = actions.clip(-1, 1) if fetch.clip_actions else actions
    episodes = Episodes(observations, clipped, rewards, terminals, cut.offsets)

    returns, lengths = episodes.returns, cut.lengths
    low, high = info.reference_min_score, info.reference_max_score
    span = returns.min(), max(returns.max(), returns.min() + 1e-6 * (1 + abs(returns.min())))  # wide enough for 20 bins
    counts, edges = np.histogram(returns, 20, span)
    report = {
        "dataset": info.id,
        "suite": info.suite,
        "source": _source(path, info),
        "origin": _origin(info),
        "digest": sha256(path),
        "bytes": path.stat().st_size,
        "transitions": len(rewards),
        "episodes": episodes.num_episodes,
        "observation_dim": episodes.observation_dim,
        "action_dim": episodes.action_dim,
        "length": {"min": int(lengths.min()), "median": float(np.median(lengths)), "max": int(lengths.max())},
        "return": {"mean": float(returns.mean()), "min": float(returns.min()), "max": float(returns.max())},
        "normalized_score_mean": None if low is None or high is None else float(100 * (returns.mean() - low) / (high - low)),
        "boundaries": cut.describe(),
        "truncated_episodes": int(episodes.truncated.sum()),
        "unfinished_last_episode": bool(cut.reasons[-1] == "end_of_file"),
        "constant_observation_dims": np.flatnonzero(np.ptp(observations, axis=0) == 0).tolist(),
        "constant_action_dims": np.flatnonzero(np.ptp(actions, axis=0) == 0).tolist(),
        "actions_out_of_range": int((np.abs(actions) > 1).any(axis=1).sum()),
        "action_max_abs": float(np.abs(actions).max()),
        "non_finite": dict.fromkeys(columns, 0),
        "return_histogram": {"counts": counts.tolist(), "edges": edges.tolist()},
    }
    return episodes, report | {"warnings": _warnings(report, columns, lengths, info, fetch)}


def _warnings(
    report: dict[str, Any], columns: Columns, lengths: np.ndarray, info: DatasetInfo, fetch: FetchParams
) -> list[str]:
    single, long = (lengths == 1).sum(), (lengths > info.max_episode_steps + 1).sum()  # AntMaze's have one row more
    clip = "were clipped" if fetch.clip_actions else "are kept: fetch.clip_actions would clip them"
    candidates = {
        "it has no environment: it trains a policy, but none can be evaluated": info.environment is None,
        "the file has no `timeouts`": "timeouts" not in columns,
        "the last episode has no end in the file": report["unfinished_last_episode"],
        f"{single} of {len(lengths)} episodes have a single step": single,
        f"{long} of {len(lengths)} episodes are longer than the limit of {info.max_episode_steps} steps, and kept whole": long,
        "{actions_out_of_range} of {transitions} actions reach outside [-1, 1], to {action_max_abs:.6g}, and ".format(**report)
        + clip: report["actions_out_of_range"],
    }
    return [warning for warning, holds in candidates.items() if holds]


def _source(path: Path, info: DatasetInfo) -> str:
    """The way a file came here, or "recollected" where it says so of itself: such a file must never pass for D4RL's."""
    with h5py.File(path) as file:
        return "recollected" if file.attrs.get("source") == "recollected" else info.source


def _origin(info: DatasetInfo) -> str:
    """The URL or path that the data came from, without the folders of one machine."""
    if info.path is not None:
        return info.path.name if info.path.is_absolute() else info.path.as_posix()
    assert info.url is not None
    return info.url if info.source == "d4rl" else info.url.rpartition("/")[2]


def _read(path: Path, info: DatasetInfo) -> Columns:
    """The columns that count, of one length: finite float32, flags as bool; of the optional ones those that the file has."""
    try:
        with h5py.File(path) as file:
            columns = _columns(file, path, info)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist: run the fetch stage of {info.id}") from None
    except OSError as error:
        raise ValueError(f"{path} is no whole HDF5 file ({error}): delete it and fetch it again") from error
    for key, values in columns.items():
        wrong = ~np.isfinite(values)
        if wrong.any():
            first = np.argwhere(wrong)[0, 0]
            raise ValueError(
                f"{path}: {key} has {wrong.sum()} values that are no finite float32, the first in row {first}: mend it"
            )
        if key in FLAGS:
            columns[key] = values.astype(bool)
    if info.suite == "antmaze":
        columns["observations"] = np.concatenate([columns["observations"], columns["infos/goal"]], axis=1)
    return columns


def _columns(file: Any, path: Path, info: DatasetInfo) -> Columns:
    required = ["observations", "actions", "rewards", "terminals"] + ["infos/goal"] * (info.suite == "antmaze")
    items = {key: file.get(key) for key in (*required, "timeouts", "next_observations")}
    items = {key: item for key, item in items.items() if isinstance(item, h5py.Dataset)}
    missing = [key for key in required if key not in items]
    if missing:
        present: list[str] = []
        file.visititems(lambda name, item: present.append(name) if isinstance(item, h5py.Dataset) else None)
        raise ValueError(
            f"{path} has no {' and no '.join(missing)}, only {', '.join(present) or 'nothing'}: add what is missing"
        )
    shapes = ", ".join(f"{key} {item.shape}" for key, item in items.items())
    for key, item in items.items():
        wide = key in (*FLAGS, "rewards") and item.shape[1:] not in ((), (1,))
        if not item.size or not 1 <= item.ndim <= 2 or item.dtype.kind not in "fiub" or wide:
            raise ValueError(
                f"{path}: {key} is no table of numbers with one row a step, but {item.shape} {item.dtype} ({shapes})"
            )
    if len({len(item) for item in items.values()}) > 1:
        raise ValueError(f"{path}: keys have different numbers of rows ({shapes}): one row of each is one step")
    dims = {key: item.size // len(item) for key, item in items.items()}
    if dims.get("next_observations", dims["observations"]) != dims["observations"]:
        raise ValueError(f"{path}: next_observations and observations differ in size ({shapes})")
    if info.suite == "antmaze" and (dims["observations"], dims["infos/goal"]) != (29, 2):
        raise ValueError(f"{path}: AntMaze has observations (N, 29) and infos/goal (N, 2), but this file {shapes}")
    columns = {key: item.astype(np.float32)[...].reshape(len(item), -1) for key, item in items.items()}
    ant = info.environment == "Ant-v4" or (info.environment == "d4rl" and info.id.startswith("ant-"))
    if ant and dims["observations"] == 111:
        columns |= {key: columns[key][:, :ANT_OBSERVATION_DIM].copy() for key in columns if key.endswith("observations")}
    return {key: values[:, 0] if key in (*FLAGS, "rewards") else values for key, values in columns.items()}


@dataclass(frozen=True)
class _Cut:
    """Where the file's rows belong."""

    rows: np.ndarray  # (N,): the file's rows that are kept
    offsets: np.ndarray  # (E + 1,): where episodes begin among these
    reasons: np.ndarray  # (E,): what ends each, a key of `describe`
    ignored_timeouts: int
    dropped_goal_rows: int

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    def describe(self) -> dict[str, Any]:
        counts = {
            name: int((self.reasons == name).sum()) for name in ("terminals", "timeouts", "discontinuities", "end_of_file")
        }
        counts |= {"ignored_timeouts": self.ignored_timeouts, "dropped_goal_rows": self.dropped_goal_rows}
        how = (
            "episodes end at {terminals} terminals, {timeouts} timeouts, {discontinuities} discontinuities, and {end_of_file} "
            "at the end of the file; timeouts ignored as the observation goes on: {ignored_timeouts}; "
            "rows dropped at the goal: {dropped_goal_rows}"
        )
        return counts | {"how": how.format(**counts)}


def _cut(columns: Columns, info: DatasetInfo, fetch: FetchParams) -> _Cut:
    terminals = columns["terminals"] | (columns["rewards"] > 0) if info.suite == "antmaze" else columns["terminals"]
    timeouts = columns.get("timeouts", np.zeros_like(terminals))
    jumps = _jumps(columns, info, fetch)
    ends = terminals | jumps if info.suite == "adroit" else terminals | timeouts | jumps
    ends[-1] = True
    loitering = _between_terminals(terminals, timeouts | jumps) if info.suite == "antmaze" else np.zeros_like(terminals)
    rows = np.flatnonzero(~loitering)
    offsets = np.concatenate([[0], np.flatnonzero(ends[rows]) + 1])
    last = rows[offsets[1:] - 1]
    over = np.diff(offsets) >= info.max_episode_steps
    reasons = np.select(
        [terminals[last] & ~(timeouts[last] & over), timeouts[last], jumps[last]],
        ["terminals", "timeouts", "discontinuities"],
        "end_of_file",
    )
    return _Cut(rows, offsets, reasons, int((timeouts & ~ends).sum()), int(loitering.sum()))


def _between_terminals(terminals: np.ndarray, resets: np.ndarray) -> np.ndarray:
    """Which rows (N,) come after the first and up to the last terminal since the last reset; `resets` (N,) precede one."""
    trajectory = np.cumsum(resets) - resets
    total = np.bincount(trajectory, terminals)
    before = np.cumsum(terminals) - terminals - (np.cumsum(total) - total)[trajectory]
    return np.asarray((before > 0) & (before < total[trajectory]))


def _jumps(columns: Columns, info: DatasetInfo, fetch: FetchParams) -> np.ndarray:
    """After which rows (N,) the next row does not continue the trajectory."""
    observations = columns["observations"]
    jumps = np.zeros(len(observations), bool)
    max_jump = ANTMAZE_MAX_JUMP if fetch.max_jump is None and info.suite == "antmaze" else fetch.max_jump
    if max_jump is not None:
        jumps[:-1] = _distances(observations, info.suite) > max_jump
    elif info.suite == "adroit":
        jumps[:-1] = _resets(observations, columns["terminals"] | columns.get("timeouts", False))
    if "next_observations" in columns:
        following = columns["next_observations"]
        jumps[:-1] |= ~np.isclose(following[:-1], observations[1:, : following.shape[1]], rtol=1e-4, atol=1e-4).all(axis=1)
    return jumps


def _distances(observations: np.ndarray, suite: Suite) -> np.ndarray:
    """Distance from each row to the next (N - 1,): of all dimensions, in AntMaze of the positions (m) of ant and goal."""
    if suite == "antmaze":
        observations = observations[:, [0, 1, -2, -1]]
    return np.asarray(np.linalg.norm(np.diff(observations, axis=0), axis=1))


def _resets(observations: np.ndarray, flagged: np.ndarray) -> np.ndarray:
    """After which rows (N - 1,) most dimensions move further than 99 % of the steps from unflagged rows move them.

    Distances do not tell a reset, as Adroit observations have dimensions that flip from -1 to 1. Measured in human and expert
    data of the four tasks, resets move at least 62 % of the dimensions that far, other steps at most 42 %.
    """
    steps = np.abs(np.diff(observations, axis=0))
    ordinary = steps[~flagged[:-1]]
    if not len(ordinary):
        return flagged[:-1]
    usual = np.quantile(ordinary[:: 1 + len(ordinary) // 100_000], 0.99, axis=0)
    moving = usual > 0
    return np.asarray((steps > usual)[:, moving].sum(axis=1) > moving.sum() / 2)


def _check_lengths(path: Path, info: DatasetInfo, fetch: FetchParams, columns: Columns, cut: _Cut) -> None:
    """Raise ValueError where an episode is so long that it must miss a boundary."""
    limit = info.max_episode_steps
    jumps = info.suite in ("adroit", "antmaze") or fetch.max_jump is not None or "next_observations" in columns
    too_long = np.flatnonzero(cut.lengths > (LONGEST * limit if jumps else limit))
    if not len(too_long):
        return
    first, last = cut.rows[cut.offsets[:-1]][too_long[0]], cut.rows[cut.offsets[1:] - 1][too_long[0]]
    distances = _distances(columns["observations"], info.suite)
    largest = ", ".join(f"{distances[row]:.3g} after row {row}" for row in np.argsort(-distances)[:3])
    flags = "its flags miss some ends" if "timeouts" in columns else "the file has no `timeouts`, and terminals miss some ends"
    key = f"datasets.{info.id}.fetch"
    raise ValueError(
        f"{path}: rows {first} to {last} would be one episode of {last - first + 1} steps, but the limit is {limit}: "
        f"{flags} ({len(too_long)} of {len(cut.lengths)} episodes are too long). Either add the right `timeouts` to the file; "
        f"or set {key}.max_jump in params.yaml to a distance between neighbouring observations that only a reset exceeds "
        f"(largest: {largest}); or, if episodes are that long, raise {key}.max_episode_steps"
    )
