"""Results: the metrics files of evaluations and ablations, grouped into rows whose seeds may be averaged.

- A mean comes with its standard error, and with what the error is over: seeds, or episodes where there is one seed only.
- Runs that differ in data, params, scale, simulator or evaluation seeds never share a row.
- The paper's number is a row's own only where its dataset can be the paper's.
"""

import csv
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from tap.files import read_json

PAPER_SOURCES = ("d4rl", "file")  # under the paper's own dataset id, these can hold the paper's own data
SOURCES = {
    "d4rl": "original D4RL",
    "file": "your own file",
    "recollected": "recollected, not D4RL's data",
    "bundled": "bundled, not D4RL's data",
}


class _Read(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Latency(_Read):
    """Milliseconds a decision, one state at a time."""

    median: float
    p95: float


class Behaviour(_Read):
    """What the dataset's own episodes are worth."""

    mean_return: float
    mean_normalized_score: float | None
    best_tenth_normalized_score: float | None
    last_tenth_normalized_score: float | None


class Result(_Read):
    """One evaluated seed of one dataset, or of one of its ablations: a metrics file of `evaluate` or `ablations`."""

    dataset: str
    source: str
    digest: str
    scale: str
    environment: str
    simulator: str = ""  # the releases that the physics depends on; this and `recipe` are empty in files of early versions
    recipe: str = ""  # a digest of all that decides a score but seed and code
    versions: dict[str, str]
    seed: int
    environment_seed: int
    episodes: int
    protocol: str
    normalized_score: float | None
    normalized_score_standard_error: float | None
    returns: list[float]
    search_value_mean: float
    state_prediction_error: float | None
    latency_ms: Latency
    behaviour: Behaviour
    planner: dict[str, Any]
    latent_step: int | None = None
    runs: dict[str, str | None]
    git_commit: str | None
    ablation: str | None = None

    @property
    def experiment(self) -> tuple[object, ...]:
        """What two results must share for their seeds to be averaged, the planner aside."""
        data = (self.dataset, self.source, self.digest, self.scale)
        return (*data, self.environment, self.simulator, self.environment_seed, self.episodes)


class Drawn(_Read):
    """Plans drawn in one way: what they promise, and how far they are off; see `tap.evaluation.diagnostics.Distribution`."""

    predicted_return_deviation: float
    state_prediction_error_median: float
    rank_correlation: float


class Diagnosis(_Read):
    """Plans drawn for one seed of one dataset: a metrics file of `diagnose`."""

    dataset: str
    source: str
    scale: str
    seed: int
    protocol: str
    prior: Drawn
    uniform: Drawn


Model = TypeVar("Model", bound=_Read)


def load_diagnoses(folder: Path) -> list[Diagnosis]:
    """All under `folder`/diagnose, by dataset and seed. Raises ValueError with the name of a file that is none."""
    diagnoses = [_parse(path, Diagnosis) for path in folder.glob("diagnose/*.json")]
    return sorted(diagnoses, key=lambda each: (each.dataset, each.seed))


def load_results(folder: Path) -> list[Result]:
    """All results under `folder`/evaluate and `folder`/ablations, by dataset, ablation and seed.

    Raises ValueError where there is no evaluation, and names the file that is no result.
    """
    results = [_parse(path, Result) for path in [*folder.glob("evaluate/*.json"), *folder.glob("ablations/*.json")]]
    if all(result.ablation for result in results):
        raise ValueError(f"{folder / 'evaluate'} holds no results: run `dvc repro evaluate` first")
    return sorted(results, key=lambda result: (result.dataset, result.ablation or "", result.seed))


def _parse(path: Path, model: type[Model]) -> Model:
    try:
        return model.model_validate(read_json(path))
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise ValueError(f"{path} is no result ({problems}): run its stage again with `dvc repro --force`") from None


@dataclass(frozen=True)
class Estimate:
    """A mean and its standard error, which one value alone does not have."""

    mean: float
    standard_error: float | None

    def __str__(self) -> str:
        return f"{self.mean:.1f}" if self.standard_error is None else f"{self.mean:.1f} ± {self.standard_error:.1f}"


def mean_and_standard_error(values: Sequence[float]) -> Estimate:
    """Mean of `values` and its standard error s / sqrt(n), where s divides by n - 1."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Estimate(statistics.fmean(values), error)


def mean_of(estimates: Sequence[Estimate]) -> Estimate:
    """Mean of independent estimates; its standard error, sqrt(sum of squares) / n, where all have one."""
    errors = [each.standard_error for each in estimates if each.standard_error is not None]
    known = len(errors) == len(estimates)
    return Estimate(statistics.fmean(each.mean for each in estimates), math.hypot(*errors) / len(errors) if known else None)


@dataclass(frozen=True)
class Row:
    """A line of a results table: all seeds of one experiment with one planner."""

    results: tuple[Result, ...]
    ablations: "tuple[Row, ...]" = ()
    paper: Estimate | None = None

    @property
    def first(self) -> Result:
        """The first seed's result, for what all seeds share."""
        return self.results[0]

    @property
    def normalized(self) -> bool:
        """Whether scores are normalised; without reference scores they are plain returns."""
        return all(result.normalized_score is not None for result in self.results)

    @property
    def seed_scores(self) -> dict[int, float]:
        """The score, or the mean return without reference scores, of each seed."""
        return {
            each.seed: statistics.fmean(each.returns) if each.normalized_score is None else each.normalized_score
            for each in self.results
        }

    @property
    def score(self) -> Estimate:
        """Mean over seeds; over the episodes of the only seed where there is one."""
        if len(self.results) > 1:
            return mean_and_standard_error(list(self.seed_scores.values()))
        if self.first.normalized_score is None:
            return mean_and_standard_error(self.first.returns)
        return Estimate(self.first.normalized_score, self.first.normalized_score_standard_error)

    @property
    def over(self) -> str:
        """What the standard error of `score` is over."""
        return "seeds" if len(self.results) > 1 else "episodes"

    @property
    def extent(self) -> str:
        """How much was evaluated."""
        seeds = len(self.results)
        return f"{seeds} seed{'s' * (seeds > 1)} \N{MULTIPLICATION SIGN} {self.first.episodes} episodes"

    @property
    def latency(self) -> Latency:
        """Median over seeds of the medians, and the worst seed's 95th percentile."""
        latencies = [result.latency_ms for result in self.results]
        return Latency(median=statistics.median(each.median for each in latencies), p95=max(each.p95 for each in latencies))

    @property
    def search_value(self) -> float:
        """Mean over seeds of the discounted return that plans promise in the first state."""
        return statistics.fmean(result.search_value_mean for result in self.results)

    @property
    def state_prediction_error(self) -> float | None:
        """Mean over seeds of the plans' squared error against the simulator."""
        errors = [result.state_prediction_error for result in self.results if result.state_prediction_error is not None]
        return statistics.fmean(errors) if errors else None

    def minus(self, other: "Row") -> Estimate | None:
        """Mean and standard error of the differences to `other`, seed by seed; None without a common seed."""
        mine, theirs = self.seed_scores, other.seed_scores
        differences = [mine[seed] - theirs[seed] for seed in mine if seed in theirs]
        return mean_and_standard_error(differences) if differences else None

    def ablation(self, name: str) -> "Row | None":
        """The row of the ablation called `name`, if it was run."""
        return next((row for row in self.ablations if row.first.ablation == name), None)


def table_rows(results: Sequence[Result]) -> list[Row]:
    """The results table: one row an experiment and planner, in the order of `results`, each with its ablations."""

    def grouped(some: Sequence[Result]) -> list[tuple[Result, ...]]:
        groups: dict[tuple[object, ...], list[Result]] = {}
        for result in some:
            planner = json.dumps(result.planner, sort_keys=True)
            key = (*result.experiment, result.protocol, result.ablation, planner, result.latent_step, result.recipe)
            groups.setdefault(key, []).append(result)
        return [tuple(group) for group in groups.values()]

    ablations = grouped([result for result in results if result.ablation])
    rows = []
    for group in grouped([result for result in results if not result.ablation]):
        own = tuple(Row(each) for each in ablations if each[0].experiment == group[0].experiment)
        rows.append(Row(group, own, paper_scores(group[0].dataset, group[0].source).get("TAP")))
    return rows


def paper_scores(dataset: str, source: str) -> dict[str, Estimate]:
    """The paper's normalised scores on `dataset` by method; empty unless the data can be the paper's own."""
    if source not in PAPER_SOURCES:
        return {}
    return {line["method"]: estimate(line) for line in read_paper("scores") if line["dataset"] == dataset}


def estimate(line: Mapping[str, str]) -> Estimate:
    """The score in a line of paper_scores.csv."""
    return Estimate(float(line["score"]), float(line["standard_error"]) if line["standard_error"] else None)


@cache
def read_paper(what: str) -> list[dict[str, str]]:
    """The lines of tap/paper_`what`.csv, numbers as the paper (Jiang et al., ICLR 2023) prints them.

    scores: its main tables. Its appendix "Baselines" says where those come from: their own papers, but BC's from D4RL's, CQL's
    in locomotion and DT's in AntMaze from IQL's, MOPO's in Adroit from Optimized MOPO's, TT's in Adroit from arXiv:2206.08569
    and on Ant from TT's repository; the paper's authors ran the others on Ant, and all on AntMaze-Ultra.
    ablations: the appendix's tables, which print no standard errors.
    latency: what the section "Decision Latency" and the appendix on the planning horizon say, in seconds on an i5 12900K and
    one RTX 3090.
    """
    with Path(__file__).with_name(f"paper_{what}.csv").open(newline="") as file:
        return list(csv.DictReader(file))
