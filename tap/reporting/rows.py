"""Rows of the results table: evaluations, ablations and other methods, grouped so that their seeds may be averaged.

- A mean comes with its standard error: over seeds, or over episodes if there is a single seed.
- Runs that differ in data, params, scale, simulator or evaluation seeds never share a row.
- A row has the paper's number only if its data can be the paper's.
"""

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tap.estimates import Estimate
from tap.methods.catalog import CATALOG
from tap.reporting.paper import paper_scores
from tap.results import AnyEvaluation, Diagnosis, Evaluation, Latency, read_evaluation
from tap.settings import METHODS, Method

SOURCES = {
    "d4rl": "original D4RL",
    "file": "your own file",
    "recollected": "recollected, not D4RL's data",
    "bundled": "bundled, not D4RL's data",
    "lerobot": "your own, in LeRobot's layout",
    "minari": "in Minari's layout",
    "ogbench": "in OGBench's layout",
}


def load_evaluations(data: Path) -> list[AnyEvaluation]:
    """All evaluations, ablations and other methods under `data`/metrics, by dataset, method, ablation and seed.

    Raises ValueError if there is no evaluation, or with the name of a file that is not valid.
    """
    metrics = data / "metrics"
    found = [
        read_evaluation(path) for stage in ("evaluate", "ablations", "methods") for path in metrics.glob(f"{stage}/*.json")
    ]
    if not any(map(_is_base, found)):
        raise ValueError(f"{metrics / 'evaluate'} contains no results: run `dvc repro evaluate` first")
    order = ("tap", *METHODS)
    return sorted(found, key=lambda each: (each.dataset, order.index(each.method), each.ablation or "", each.seed))


def load_diagnoses(data: Path) -> list[Diagnosis]:
    """All under `data`/metrics/diagnose, by dataset and seed. Raises ValueError with the name of a file that is not valid."""
    diagnoses = [Diagnosis.read(path) for path in data.glob("metrics/diagnose/*.json")]
    return sorted(diagnoses, key=lambda each: (each.dataset, each.seed))


@dataclass(frozen=True)
class Row:
    """A line of a results table: all seeds of one experiment with one planner or other method."""

    evaluations: tuple[Evaluation, ...]
    ablations: "tuple[Row, ...]" = ()
    methods: "tuple[Row, ...]" = ()  # others than TAP, on the same data
    paper: Estimate | None = None

    @property
    def first(self) -> Evaluation:
        """The first seed's evaluation, for what all seeds share."""
        return self.evaluations[0]

    @property
    def normalized(self) -> bool:
        """Whether scores are normalised; without reference scores they are plain returns."""
        return all(each.normalized_score is not None for each in self.evaluations)

    @property
    def seed_scores(self) -> dict[int, float]:
        """The score, or the mean return without reference scores, of each seed."""
        return {
            each.seed: statistics.fmean(each.returns) if each.normalized_score is None else each.normalized_score
            for each in self.evaluations
        }

    @property
    def score(self) -> Estimate:
        """Mean over seeds, or over the episodes of a single seed."""
        if len(self.evaluations) > 1:
            return Estimate.of(list(self.seed_scores.values()))
        if self.first.normalized_score is None:
            return Estimate.of(self.first.returns)
        return Estimate(self.first.normalized_score, self.first.normalized_score_standard_error)

    @property
    def over(self) -> str:
        """What the standard error of `score` is over."""
        return "seeds" if len(self.evaluations) > 1 else "episodes"

    @property
    def extent(self) -> str:
        """How much was evaluated."""
        seeds = len(self.evaluations)
        return f"{seeds} seed{'s' * (seeds > 1)} \N{MULTIPLICATION SIGN} {self.first.episodes} episodes"

    @property
    def latency(self) -> Latency:
        """Medians over seeds of the medians, and the slowest seed's 95th percentile."""
        latencies = [each.latency_ms for each in self.evaluations]
        return Latency(
            median=statistics.median(each.median for each in latencies),
            p95=max(each.p95 for each in latencies),
            batch_median=statistics.median(each.batch_median for each in latencies),
        )

    @property
    def search_value(self) -> float | None:
        """Mean over seeds of the best predicted return at the first state; None for a method without plans."""
        return _mean_of_known(each.search_value_mean for each in self.evaluations)

    @property
    def state_prediction_error(self) -> float | None:
        """Mean over seeds of the squared error of plans' states against the simulator; None for a method without plans."""
        return _mean_of_known(each.state_prediction_error for each in self.evaluations)

    def minus(self, other: "Row") -> Estimate | None:
        """Mean and standard error of the differences to `other`, seed by seed; None without a common seed."""
        mine, theirs = self.seed_scores, other.seed_scores
        differences = [mine[seed] - theirs[seed] for seed in mine if seed in theirs]
        return Estimate.of(differences) if differences else None

    def ablation(self, name: str) -> "Row | None":
        """The row of the ablation called `name`, if it was run."""
        return next((row for row in self.ablations if row.first.ablation == name), None)

    def method(self, name: Method) -> "Row | None":
        """The row of the method called `name` on the same data, if it was run."""
        return next((row for row in self.methods if row.first.method == name), None)


def methods_run(rows: Sequence[Row]) -> dict[Method, str]:
    """The methods other than TAP that were run for any of the rows, each with its title."""
    return {name: info.title for name, info in CATALOG.items() if any(row.method(name) for row in rows)}


def _mean_of_known(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _is_base(each: AnyEvaluation) -> bool:
    return each.method == "tap" and not each.ablation


def table_rows(every: Sequence[AnyEvaluation]) -> list[Row]:
    """The results table: one row of TAP an experiment and planner, in the order of `every`, of those in simulation.

    Each has its ablations, and the other methods on the same data. A method may have been evaluated in another number of
    episodes, since some decide far more slowly; of several rows of one, that with as many as TAP counts.
    """
    evaluations = [each for each in every if isinstance(each, Evaluation)]
    ablations = _grouped([each for each in evaluations if each.ablation])
    methods = _grouped([each for each in evaluations if each.method != "tap"])
    rows = []
    for group in _grouped([each for each in evaluations if _is_base(each)]):
        count = group[0].episodes
        ablated = tuple(row for row in _beside(group, ablations) if row.first.episodes == count)
        others: dict[str, Row] = {}
        for row in sorted(_beside(group, methods), key=lambda row: row.first.episodes != count):
            others.setdefault(row.first.method, row)
        paper = paper_scores(group[0].dataset, group[0].source).get("TAP")
        rows.append(Row(group, ablated, tuple(others.values()), paper))
    return rows


def _beside(base: Sequence[Evaluation], groups: Sequence[tuple[Evaluation, ...]]) -> list[Row]:
    return [Row(group) for group in groups if _experiment(group[0]) == _experiment(base[0])]


def _grouped(evaluations: Sequence[Evaluation]) -> list[tuple[Evaluation, ...]]:
    """Evaluations that differ in the training seed alone, together."""
    groups: dict[tuple[object, ...], list[Evaluation]] = {}
    for each in evaluations:
        planner = json.dumps(each.planner, sort_keys=True)
        policy = (each.ablation, each.method, planner, each.latent_step, each.recipe)
        groups.setdefault((*_experiment(each), each.episodes, each.protocol, *policy), []).append(each)
    return [tuple(group) for group in groups.values()]


def _experiment(each: Evaluation) -> tuple[object, ...]:
    """What an evaluation has in common with its ablations and the other methods, whose episodes also start alike."""
    return (each.dataset, each.source, each.digest, each.scale, each.environment, each.simulator, each.environment_seed)


def summary(rows: Sequence[Row]) -> dict[str, dict[str, dict[str, Any]]]:
    """All results in one mapping: {dataset (with its source): {policy: {mean, standard_error, seeds, ...}}}.

    Policies are tap, the ablations, the other methods, and the data itself: `data`, the mean of its episodes, and
    `data-best-tenth`. Of several rows of a dataset and source, the first counts.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        policies = {"tap": row} | {each.first.ablation or each.first.method: each for each in (*row.ablations, *row.methods)}
        behaviour = row.first.behaviour
        data = {"data": behaviour.mean_score, "data-best-tenth": behaviour.best_tenth_normalized_score}
        found.setdefault(
            f"{row.first.dataset} ({SOURCES.get(row.first.source, row.first.source)})",
            {name: _summary(each) for name, each in policies.items()}
            | {name: {"mean": mean, "episodes": behaviour.episodes} for name, mean in data.items() if mean is not None},
        )
    return found


def _summary(row: Row) -> dict[str, Any]:
    minutes = [each.training_minutes for each in row.evaluations if each.training_minutes is not None]
    first = row.first
    return {
        "mean": row.score.mean,
        "standard_error": row.score.standard_error,
        "standard_error_over": row.over,
        "seeds": [each.seed for each in row.evaluations],
        "episodes": first.episodes,
        "environment_seed": first.environment_seed,
        "environment": first.environment,
        "simulator": first.simulator,
        "training_minutes": statistics.median(minutes) if minutes else None,
        "decision_ms": row.latency.median,
    }


def headline(rows: Sequence[Row]) -> dict[str, dict[str, float | None]]:
    """A few numbers of each dataset, for `dvc metrics show` and `dvc exp show`; of its first row, if it has several."""
    numbers: dict[str, dict[str, float | None]] = {}
    for row in rows:
        error = row.score.standard_error
        numbers.setdefault(
            row.first.dataset,
            {
                "score": round(row.score.mean, 2),
                "standard_error": None if error is None else round(error, 2),
                "decision_ms": round(row.latency.median, 1),
                **({} if (mean := row.first.behaviour.mean_score) is None else {"data_score": round(mean, 2)}),
                **{f"{each.first.method}_score": round(each.score.mean, 2) for each in row.methods},
            },
        )
    return numbers
