"""Action errors on held-out episodes, of datasets without a simulator: rows of policies, and their tables.

Shapes: H steps ahead, A action.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tap.estimates import Estimate
from tap.methods.catalog import CATALOG
from tap.reporting.rows import SOURCES
from tap.reporting.tables import NOTHING, Line, Table
from tap.results import IMITATION, AnyEvaluation, HeldOutEvaluation, ValidationReport

HOLD = "hold the last action"
SHOWN_STEPS = 4  # columns of steps ahead, if plans are longer: a decision's own, the last, and some between


@dataclass(frozen=True)
class HeldOutRow:
    """All seeds of one policy on one dataset."""

    evaluations: tuple[HeldOutEvaluation, ...]

    @property
    def first(self) -> HeldOutEvaluation:
        """The first seed's evaluation, for what all seeds share."""
        return self.evaluations[0]

    @property
    def title(self) -> str:
        """The policy in a few words."""
        if self.first.method != "tap":
            return CATALOG[self.first.method].title
        return f"TAP: {self.first.ablation}" if self.first.ablation else "TAP"

    @property
    def error(self) -> Estimate:
        """Of the action at a decision; over seeds, or over the episodes of a single one."""
        if len(self.evaluations) > 1:
            return Estimate.of([each.action_error for each in self.evaluations])
        return Estimate.of(self.first.scores)

    def mean(self, field: str) -> np.ndarray:
        """The mean over seeds of a list in their evaluations, of the steps ahead that all have."""
        values = [np.asarray(getattr(each, field)) for each in self.evaluations]
        shortest = min(map(len, values))
        return np.asarray(np.mean([each[:shortest] for each in values], axis=0))

    @property
    def decision_ms(self) -> float:
        """The median over seeds of the median."""
        return float(np.median([each.latency_ms.median for each in self.evaluations]))


def held_out_rows(every: Sequence[AnyEvaluation]) -> dict[str, list[HeldOutRow]]:
    """The policies of each dataset that has no simulator, TAP's first, in the order of `every`."""
    groups: dict[tuple[object, ...], list[HeldOutEvaluation]] = {}
    for each in every:
        if isinstance(each, HeldOutEvaluation):
            key = (each.dataset, each.digest, each.scale, each.method, each.ablation, each.recipe)
            groups.setdefault(key, []).append(each)
    rows: dict[str, list[HeldOutRow]] = {}
    for group in groups.values():
        rows.setdefault(group[0].dataset, []).append(HeldOutRow(tuple(group)))
    return rows


def held_out_table(rows: Mapping[str, list[HeldOutRow]]) -> Table | None:
    """The error of each policy by steps ahead, beside holding the last action; None without rows."""
    every = [row for of_dataset in rows.values() for row in of_dataset]
    if not every:
        return None
    steps = _shown(max(len(row.mean("error_ahead")) for row in every))
    lines = []
    for dataset, of_dataset in rows.items():
        for row in of_dataset:
            cells = (in_thousandths(row.error), *_cells(row.mean("error_ahead"), steps[1:]), f"{row.decision_ms:.3g} ms")
            lines.append(Line(f"{dataset}: {row.title}", _extent(row.first, len(row.evaluations)), cells))
        longest = max(of_dataset, key=lambda row: len(row.mean("hold_error_ahead")))
        lines.append(Line(f"{dataset}: {HOLD}", "", (*_cells(longest.mean("hold_error_ahead"), steps), NOTHING), ours=False))
    caption = (
        "These datasets have no simulator. At recorded states of held-out episodes, a policy's actions are compared with those "
        "that were recorded from there on: squared error as a share of the variance of the recorded actions, in the mean over "
        "dimensions. 0 is the recorded action, 1 the mean of all. Less is better, but a small error does not prove that a "
        "policy does its task: in a running episode, errors add up. ± is the standard error over training seeds, or over "
        "episodes if there is a single seed."
    )
    head = ("at the decision", *(f"{step} step{'s' * (step > 1)} later" for step in steps[1:]), "decision time")
    return Table("Action error on held-out episodes", caption, head, tuple(lines))


def in_thousandths(error: Estimate) -> str:
    """A share to three digits, with its standard error if that is known."""
    return f"{error.mean:.3f}" + (f" ± {error.standard_error:.3f}" if error.standard_error is not None else "")


def dimensions_table(rows: Sequence[HeldOutRow], validation: ValidationReport | None) -> Table:
    """The error of each policy's action at a decision, by action dimension, in its unit."""
    std = rows[0].mean("std")
    held = _at_decision(rows[0], "hold_rmse")
    columns = [*(_at_decision(row, "rmse") for row in rows), held]

    def cell(value: float, deviation: float) -> str:
        return f"{value:.3g} ({(value / deviation) ** 2:.2f})" if deviation else f"{value:.3g}"

    lines = [
        Line(name, "", (f"{std[dim]:.3g}", *(cell(float(column[dim]), float(std[dim])) for column in columns)))
        for dim, name in enumerate(dimension_names(rows[0].first, validation))
    ]
    caption = (
        "Root mean squared error of the action at a decision, in the data's units, and in brackets its square as a share of "
        "the variance."
    )
    head = ("std of the actions", *(row.title for row in rows), HOLD)
    return Table(f"{rows[0].first.dataset}: action error by dimension", caption, head, tuple(lines))


def dimension_names(evaluation: HeldOutEvaluation, validation: ValidationReport | None) -> list[str]:
    """The names of the action's dimensions, or their numbers."""
    names = validation.action_names if validation else None
    return names or [str(dim) for dim in range(len(evaluation.std))]


def held_out_summary(rows: Mapping[str, list[HeldOutRow]]) -> dict[str, dict[str, dict[str, Any]]]:
    """As `tap.reporting.rows.summary`, of the datasets without a simulator."""
    return {
        f"{dataset} ({SOURCES.get(of_dataset[0].first.source, of_dataset[0].first.source)})": {
            **{row.first.ablation or row.first.method: _summary(row) for row in of_dataset},
            "hold": {"action_error": float(np.mean([each.hold_error for each in of_dataset[0].evaluations]))},
        }
        for dataset, of_dataset in rows.items()
    }


def held_out_headline(rows: Mapping[str, list[HeldOutRow]]) -> dict[str, dict[str, float | None]]:
    """As `tap.reporting.rows.headline`, of the datasets without a simulator."""
    numbers: dict[str, dict[str, float | None]] = {}
    for dataset, (tap, *others) in rows.items():
        error = tap.error.standard_error
        numbers[dataset] = {
            "action_error": round(tap.error.mean, 4),
            "standard_error": None if error is None else round(error, 4),
            "decision_ms": round(tap.decision_ms, 1),
            "hold_action_error": round(float(tap.mean("hold_error_ahead")[0]), 4),
            **{f"{row.first.method}_action_error": round(row.error.mean, 4) for row in others if not row.first.ablation},
        }
    return numbers


def _summary(row: HeldOutRow) -> dict[str, Any]:
    return {
        "action_error": row.error.mean,
        "standard_error": row.error.standard_error,
        "seeds": [each.seed for each in row.evaluations],
        "episodes": row.first.episodes,
        "decision_ms": row.decision_ms,
    }


def _at_decision(row: HeldOutRow, field: str) -> np.ndarray:
    """RMSE (A,) over seeds, from the mean of their squares."""
    return np.asarray(np.sqrt(np.mean([np.square(getattr(each, field)[0]) for each in row.evaluations], axis=0)))


def _extent(first: HeldOutEvaluation, seeds: int) -> str:
    source, kind = SOURCES.get(first.source, first.source), "" if first.has_rewards else f"; {IMITATION}"
    return f"{source}{kind}; {first.scale} scale; {seeds} seed{'s' * (seeds > 1)}, each with {first.protocol}"


def _shown(most: int) -> list[int]:
    """Steps ahead that a table has columns for."""
    return sorted({round(step) for step in np.linspace(0, most - 1, min(most, SHOWN_STEPS)).tolist()})


def _cells(errors: np.ndarray, steps: Sequence[int]) -> tuple[str, ...]:
    return tuple(f"{errors[step]:.3f}" if step < len(errors) else NOTHING for step in steps)
