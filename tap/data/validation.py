"""The validation report of a recording: the contents of a dataset, and what looks wrong."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tap.data.catalog import DatasetInfo
from tap.data.episodes import Episodes
from tap.data.recording import Recording
from tap.files import sha256
from tap.results import ValidationReport


def validate(recording: Recording) -> ValidationReport:
    """The report. Reads all of the file; raises ValueError as `Table.read` does."""
    table, info, lengths, path = recording.table, recording.info, recording.boundaries.lengths, recording.table.path
    summary = _Summary()
    for part in recording.chunks():
        summary.add(part)
    returns = np.concatenate(summary.returns)
    low, high = info.reference_min_score, info.reference_max_score
    span = returns.min(), max(returns.max(), returns.min() + 1e-6 * (1 + abs(returns.min())))  # wide enough for 20 bins
    counts, edges = np.histogram(returns, 20, span)
    report = {
        "dataset": info.id,
        "suite": info.suite,
        "source": "recollected" if table.recollected else info.source,
        "origin": _origin(info),
        "digest": sha256(path),
        "bytes": path.stat().st_size,
        "transitions": int(lengths.sum()),
        "episodes": len(lengths),
        "observation_dim": table.observation_dim,
        "action_dim": table.action_dim,
        "length": {"min": int(lengths.min()), "median": float(np.median(lengths)), "max": int(lengths.max())},
        "return": {"mean": float(returns.mean()), "min": float(returns.min()), "max": float(returns.max())},
        "normalized_score_mean": None if low is None or high is None else float(100 * (returns.mean() - low) / (high - low)),
        "boundaries": recording.boundaries.describe(),
        "truncated_episodes": summary.truncated,
        "unfinished_last_episode": bool(recording.boundaries.reasons[-1] == "end_of_file"),
        "constant_observation_dims": summary.constant("observations"),
        "constant_action_dims": summary.constant("actions"),
        "actions_out_of_range": summary.out_of_range,
        "action_max_abs": float(max(np.abs(bound).max() for bound in summary.bounds["actions"])),
        "non_finite": dict.fromkeys(table.columns, 0),
        "return_histogram": {"counts": counts.tolist(), "edges": edges.tolist()},
    }
    return ValidationReport.model_validate(report | {"warnings": _warnings(report, recording)})


@dataclass
class _Summary:
    """What is accumulated over the chunks of a recording."""

    returns: list[np.ndarray] = field(default_factory=list)
    truncated: int = 0
    out_of_range: int = 0  # rows with an action beyond [-1, 1]
    bounds: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)  # min and max of each dimension

    def add(self, part: Episodes) -> None:
        self.returns.append(part.returns)
        self.truncated += int(part.truncated.sum())
        self.out_of_range += int((np.abs(part.actions) > 1).any(axis=1).sum())
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
    single, long = (lengths == 1).sum(), (lengths > info.max_episode_steps + 1).sum()  # AntMaze's episodes have one more row
    clip = "were clipped" if recording.fetch.clip_actions else "are kept: fetch.clip_actions would clip them"
    candidates = {
        "it has no environment: its policy can be trained, but not evaluated": info.environment is None,
        "the file has no `timeouts`": "timeouts" not in recording.table.columns,
        "the last episode has no end in the file": report["unfinished_last_episode"],
        f"{single} of {len(lengths)} episodes have a single step": single,
        f"{long} of {len(lengths)} episodes are longer than the limit of {info.max_episode_steps} steps, and kept whole": long,
        "{actions_out_of_range} of {transitions} actions reach outside [-1, 1], to {action_max_abs:.6g}, and ".format(**report)
        + clip: report["actions_out_of_range"],
    }
    return [warning for warning, holds in candidates.items() if holds]


def _origin(info: DatasetInfo) -> str:
    """The URL or path that the data came from, without the folders of one machine."""
    if info.path is not None:
        return info.path.name if info.path.is_absolute() else info.path.as_posix()
    assert info.url is not None
    return info.url if info.source == "d4rl" else info.url.rpartition("/")[2]
