"""Evaluation without a simulator: how far a policy's actions are from those recorded in held-out episodes.

At a decision, a step t of an episode after its first, the policy plans from the recorded observation. Its H actions, clipped to
the bounds, are compared with the recorded actions of steps t, t + 1, ..., as far as the episode goes. Beside it stands the
simplest guess: hold the last action, that of step t - 1.

Shapes: E episodes, T steps of one, D decisions in it, H plan steps, O observation, A action.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tap.data.action_bounds import ActionBounds
from tap.data.episodes import Episodes, Selection
from tap.data.history import History
from tap.data.windows import moments
from tap.evaluation.rollout import BatchPlanner, episode_generator, measure_latencies
from tap.planning.plan import Planned, Remembering

MOST_DECISIONS = 2000  # evenly spaced in each episode, of which each has at least one


@dataclass(frozen=True)
class HeldOutErrors:
    """Mean squared errors over the decisions of each episode, in raw units; NaN where an episode has no step so far ahead."""

    errors: np.ndarray  # (E, H, A)
    hold_errors: np.ndarray  # (E, H, A), of the last action, held
    variance: np.ndarray  # (A,) of all recorded actions
    decisions: int
    latencies: np.ndarray  # seconds to plan for one state
    batch_latencies: np.ndarray  # and for all decisions of an episode

    def shares(self, errors: np.ndarray) -> np.ndarray:
        """Errors (E, H, A) as shares of the variance (E, H), in the mean over the dimensions that vary."""
        varies = self.variance > 0
        return np.asarray((errors[..., varies] / self.variance[varies]).mean(axis=-1))

    def summarize(self) -> dict[str, Any]:
        """The metrics of a `HeldOutEvaluation` that come from here, ready for JSON."""
        shares, held = self.shares(self.errors), self.shares(self.hold_errors)
        median, p95 = np.percentile(1000 * self.latencies, [50, 95])
        return {
            "episodes": len(self.errors),
            "decisions": self.decisions,
            "action_error": float(shares[:, 0].mean()),
            "hold_error": float(held[:, 0].mean()),
            "error_ahead": np.nanmean(shares, axis=0).tolist(),
            "hold_error_ahead": np.nanmean(held, axis=0).tolist(),
            "std": np.sqrt(self.variance).tolist(),
            "rmse": np.sqrt(np.nanmean(self.errors, axis=0)).tolist(),
            "hold_rmse": np.sqrt(np.nanmean(self.hold_errors, axis=0)).tolist(),
            "scores": shares[:, 0].tolist(),
            "latency_ms": {
                "median": float(median),
                "p95": float(p95),
                "batch_median": float(np.median(1000 * self.batch_latencies)),
            },
        }


def held_out_errors(policy: BatchPlanner, chosen: Selection, bounds: ActionBounds, planner_seed: int) -> HeldOutErrors:
    """Compare the policy's actions with those of the `chosen` episodes.

    Raises ValueError if no chosen episode has two steps, or if all actions of the dataset are the same.
    """
    _, std, _, _ = moments(part.actions for part in chosen.episodes.chunks())
    if not std.any():
        raise ValueError("all recorded actions are the same, so there is nothing to imitate: check how they are recorded")
    spacing = -(-int(chosen.lengths.sum()) // MOST_DECISIONS)
    errors, hold_errors, seconds, decisions, latencies = [], [], [], 0, None
    for part in chosen.chunks():
        for first, end in zip(part.offsets[:-1], part.offsets[1:], strict=True):
            steps_D = np.arange(1, end - first, spacing)
            if not len(steps_D):
                continue
            observations_TO, actions_TA = part.observations[first:end], part.actions[first:end]
            if latencies is None:
                latencies = measure_latencies(policy, observations_TO[steps_D], planner_seed)
            generators = [episode_generator(planner_seed, decisions + row) for row in range(len(steps_D))]
            start = time.perf_counter()
            plan = _plan(policy, part, int(first), steps_D, generators)
            seconds.append(time.perf_counter() - start)
            errors.append(_squared_errors(plan.actions.clip(*bounds), actions_TA, steps_D))
            held_DHA = np.broadcast_to(actions_TA[steps_D - 1][:, None], plan.actions.shape)
            hold_errors.append(_squared_errors(held_DHA, actions_TA, steps_D))
            decisions += len(steps_D)
    if latencies is None:
        raise ValueError("every held-out episode has a single step, so no action follows another: record longer episodes")
    # Steps that no episode has ahead are left out.
    most = max(int(np.isfinite(each[:, 0]).sum()) for each in errors)
    return HeldOutErrors(
        np.stack(errors)[:, :most], np.stack(hold_errors)[:, :most], std**2, decisions, latencies, np.array(seconds)
    )


def _plan(
    policy: BatchPlanner, episodes: Episodes, first: int, steps_D: np.ndarray, generators: Sequence[torch.Generator]
) -> Planned:
    """Plans at some steps of the episode that begins at row `first`."""
    observations_DO = episodes.observations[first + steps_D]
    if not isinstance(policy, Remembering):
        return policy.plan(observations_DO, generators)
    histories = []
    for step in steps_D.tolist():
        remembered, all_steps = slice(first + max(0, step - policy.remembered_steps), first + step), slice(first, first + step)
        histories.append(History(episodes.observations[remembered], episodes.actions[remembered], episodes.rewards[all_steps]))
    return policy.plan(observations_DO, generators, histories)


def _squared_errors(actions_DHA: np.ndarray, recorded_TA: np.ndarray, steps_D: np.ndarray) -> np.ndarray:
    """The mean over decisions of the squared errors (H, A), NaN where none of them has a recorded step so far ahead."""
    rows_DH = steps_D[:, None] + np.arange(actions_DHA.shape[1])
    inside_DH = rows_DH < len(recorded_TA)
    recorded_DHA = recorded_TA[rows_DH.clip(max=len(recorded_TA) - 1)]
    squares_DHA = np.square(np.subtract(actions_DHA, recorded_DHA, dtype=np.float64)) * inside_DH[..., None]
    with np.errstate(invalid="ignore"):
        return np.asarray(squares_DHA.sum(axis=0) / inside_DH.sum(axis=0)[:, None])
