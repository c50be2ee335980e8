"""The validation report of a recording: the contents of a dataset, and what looks wrong."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tap.data.action_bounds import ActionBounds, unit_bounds
from tap.data.catalog import DatasetInfo
from tap.data.chunks import row_chunks
from tap.data.episodes import Episodes
from tap.data.recording import Recording
from tap.data.table import Table
from tap.files import files_sha256
from tap.results import ValidationReport

LEAST_STEPS = 1000  # float32 values in the range of a dimension: with fewer, rounding is more than a thousandth of the range
COMPARED = 10_000  # rows whose simulator state is compared with the observation
LISTED = 10  # dimensions


def validate(recording: Recording) -> ValidationReport:
    """The report. Reads all of the file; raises ValueError as `Table.read` does."""
    table, info, lengths = recording.table, recording.info, recording.boundaries.lengths
    facts = table.facts
    summary = _Summary(recording.action_bounds)
    for part in recording.chunks():
        summary.add(part)
    returns = np.concatenate(summary.returns)
    low, high = info.reference_min_score, info.reference_max_score
    span = returns.min(), max(returns.max(), returns.min() + 1e-6 * (1 + abs(returns.min())))  # wide enough for 20 bins
    counts, edges = np.histogram(returns, 20, span)
    report = {
        "dataset": info.id,
        "suite": info.suite,
        "source": "recollected" if facts.recollected else info.source,
        "origin": _origin(info),
        "digest": files_sha256(table.path, facts.files),
        "bytes": sum(file.stat().st_size for file in facts.files),
        "transitions": int(lengths.sum()),
        "episodes": len(lengths),
        "observation_dim": table.observation_dim,
        "action_dim": table.action_dim,
        "has_rewards": facts.has_rewards,
        "fps": facts.fps,
        "tasks": list(facts.tasks) or None,
        "observation_names": list(facts.observation_names) or None,
        "action_names": list(facts.action_names) or None,
        "own_environment": facts.environment,
        "length": {"min": int(lengths.min()), "median": float(np.median(lengths)), "max": int(lengths.max())},
        "return": {"mean": float(returns.mean()), "min": float(returns.min()), "max": float(returns.max())},
        "normalized_score_mean": None if low is None or high is None else float(100 * (returns.mean() - low) / (high - low)),
        "boundaries": recording.boundaries.describe(),
        "truncated_episodes": summary.truncated,
        "unfinished_last_episode": bool(recording.boundaries.reasons[-1] == "end_of_file"),
        "constant_observation_dims": summary.constant("observations"),
        "constant_action_dims": summary.constant("actions"),
        "rounded_observation_dims": _rounded(table, *summary.bounds["observations"]),
        "actions_out_of_range": summary.out_of_range,
        "action_bounds": _in_words(recording.action_bounds),
        **_in_numbers(recording.action_bounds),
        "action_max_abs": float(max(np.abs(bound).max() for bound in summary.bounds["actions"])),
        "non_finite": dict.fromkeys(table.columns, 0),
        "return_histogram": {"counts": counts.tolist(), "edges": edges.tolist()},
    }
    return ValidationReport.model_validate(report | {"warnings": _warnings(report, recording)})


@dataclass
class _Summary:
    """What is accumulated over the chunks of a recording."""

    action_bounds: ActionBounds
    returns: list[np.ndarray] = field(default_factory=list)
    truncated: int = 0
    out_of_range: int = 0  # rows with an action beyond its bounds
    bounds: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)  # min and max of each dimension

    def add(self, part: Episodes) -> None:
        self.returns.append(part.returns)
        self.truncated += int(part.truncated.sum())
        low, high = self.action_bounds
        self.out_of_range += int(((part.actions < low) | (part.actions > high)).any(axis=1).sum())
        for name, values in (("observations", part.observations), ("actions", part.actions)):
            low, high = values.min(axis=0), values.max(axis=0)
            if name in self.bounds:
                low, high = np.minimum(low, self.bounds[name][0]), np.maximum(high, self.bounds[name][1])
            self.bounds[name] = low, high

    def constant(self, name: str) -> list[int]:
        low, high = self.bounds[name]
        return [int(dim) for dim in np.flatnonzero(low == high)]


def _warnings(report: dict[str, Any], recording: Recording) -> list[str]:
    info, lengths = recording.info, recording.boundaries.lengths
    single, limit = (lengths == 1).sum(), info.max_episode_steps
    long = 0 if limit is None else (lengths > limit + 1).sum()  # AntMaze's episodes have one more row
    clip = "were clipped" if recording.fetch.clip_actions else "are kept"
    known = info.environment is not None or recording.fetch.action_low is not None or recording.fetch.action_high is not None
    if not recording.fetch.clip_actions and known:
        clip += ": fetch.clip_actions would clip them"
    rounded, contradicted = report["rounded_observation_dims"], _contradicted(recording.table)
    candidates = {
        "it has no environment: policies are evaluated on held-out episodes, not in a simulator": info.environment is None,
        "it has no rewards: its behaviour is imitated, good or bad, and all rewards are stored as 0": (
            not recording.table.facts.has_rewards
        ),
        **dict.fromkeys(recording.table.facts.notes, True),
        "the last episode has no end in the file": report["unfinished_last_episode"],
        "it has one episode: none can be held out from training": len(lengths) == 1,
        f"{single} of {len(lengths)} episodes have a single step": single,
        f"{long} of {len(lengths)} episodes are longer than the limit of {limit} steps, and kept whole": long,
        "{actions_out_of_range} of {transitions} actions reach outside {action_bounds}, to {action_max_abs:.6g}, and ".format(
            **report
        )
        + clip: report["actions_out_of_range"],
        f"float32 distinguishes fewer than {LEAST_STEPS} values of observation dimensions {_listed(rounded)}: subtract a "
        "constant from them, in the file and in the environment": rounded,
        f"infos/qpos and infos/qvel contradict observations in {contradicted:.1%} of the rows compared: the observations are "
        "normalised, or another version's, or of other rows": contradicted,
    }
    return [warning for warning, holds in candidates.items() if holds]


def _rounded(table: Table, low: np.ndarray, high: np.ndarray) -> list[int]:
    """The dimensions of which float32 distinguishes fewer than LEAST_STEPS values between `low` and `high` (O,), if they vary.

    A dimension that is constant in float32 may vary in the file's own type.
    """
    coarse = (high - low) / np.spacing(np.maximum(np.abs(low), np.abs(high))) < LEAST_STEPS
    varies, column = high > low, table.columns["observations"]
    if column.dtype.itemsize > 4 and (coarse & ~varies).any():
        own = slice(0, table.dims["observations"])  # without AntMaze's goal
        width = math.prod(column.shape[1:])
        first = column[:1].reshape(-1)[own]
        for rows in row_chunks(table.num_rows):
            varies[own] |= (column[rows].reshape(-1, width)[:, own] != first).any(axis=0)
    return [int(dim) for dim in np.flatnonzero(coarse & varies)]


def _contradicted(table: Table) -> float:
    """The share of the first COMPARED rows in which infos/qpos and infos/qvel are not what the observation consists of.

    MuJoCo's walkers observe positions, except the first or the first two, and velocities, which some clip to [-10, 10]. 0 if
    the file has no such keys, or if they do not fit these observations' dimensions.
    """
    rows, dim = slice(0, min(COMPARED, table.num_rows)), table.dims["observations"]
    positions, velocities = (table.read_other(key, rows, most=dim + 2) for key in ("infos/qpos", "infos/qvel"))
    if positions is None or velocities is None:
        return 0.0
    hidden = positions.shape[1] + velocities.shape[1] - dim
    if not 0 <= hidden <= 2:
        return 0.0
    observed = np.asarray(table.columns["observations"][rows], np.float64)
    state = np.concatenate([positions[:, hidden:], velocities], axis=1)
    clipped = np.concatenate([positions[:, hidden:], velocities.clip(-10, 10)], axis=1)
    observed = observed[:, : state.shape[1]]
    same = [np.isclose(observed, each, rtol=1e-3, atol=1e-3).all(axis=1) for each in (state, clipped)]
    return float(1 - np.maximum(*same).mean())


def _in_words(bounds: ActionBounds) -> str:
    """The bounds of the actions: the same for all dimensions, or else the widest."""
    low, high = bounds
    if np.isinf(bounds).all():
        return "none"
    same = (low == low[0]).all() and (high == high[0]).all()
    return f"[{low.min():g}, {high.max():g}]" if same else f"their bounds within [{low.min():g}, {high.max():g}]"


def _in_numbers(bounds: ActionBounds) -> dict[str, list[float | None]]:
    """The bounds of each dimension, None for none; nothing if they are D4RL's."""
    if np.array_equal(bounds, unit_bounds(len(bounds[0]))):
        return {}
    low, high = ([float(each) if np.isfinite(each) else None for each in bound] for bound in bounds)
    return {"action_low": low, "action_high": high}


def _listed(dims: list[int]) -> str:
    return ", ".join(map(str, dims[:LISTED])) + (f" and {len(dims) - LISTED} more" if len(dims) > LISTED else "")


def _origin(info: DatasetInfo) -> str:
    """The URL or path that the data came from, without the folders of one machine."""
    if info.path is not None:
        return info.path.name if info.path.is_absolute() else info.path.as_posix()
    assert info.url is not None
    return info.url if info.source == "d4rl" else info.url.rpartition("/")[2]
