"""The paper's ablation tables: which rows are in which column, with the paper's numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tap.estimates import Estimate, mean_of
from tap.reporting.paper import paper_dataset, read_paper
from tap.reporting.rows import Row
from tap.reporting.tables import NOTHING, Line, Table, describe, may_be_averaged, score_cell


@dataclass(frozen=True)
class Column:
    """A setting in one of the paper's tables.

    Its row is the base's (None) or that of an ablation in `rows`, with the planner and model of `settings`. A `context` column
    is shown for comparison only: alone it makes no table.
    """

    label: str
    paper: str | None  # the column in paper_ablations.csv
    rows: tuple[str | None, ...]
    settings: dict[str, Any]
    context: bool = False

    def find(self, base: Row) -> Row | None:
        """The column's row among the base and its ablations."""
        for row in (base, *base.ablations):
            stated = (row.first.planner or {}) | {"latent_step": row.first.latent_step}
            if row.first.ablation in self.rows and self.settings.items() <= stated.items():
                return row
        return None


BASES = (None, "beam")  # a beam search with all params as in params.yaml: the base, or an ablation if the base is none


@dataclass(frozen=True)
class Study:
    """One of the paper's ablation tables."""

    name: str  # in paper_ablations.csv
    title: str
    caption: str
    columns: tuple[Column, ...]


def _horizon(steps: int) -> Column:
    paper = str(steps) if steps in (3, 9, 15, 21) else None
    return Column(f"H = {steps}", paper, (*BASES, f"horizon-{steps}"), {"search": "beam", "horizon": steps})


def _beta(label: str, paper: str, ablation: str) -> Column:
    settings = {"search": "beam", "likelihood_threshold": float(paper)}
    return Column(f"β = {label}", paper, (*BASES, ablation), settings)


# 12 is the longest horizon that every latent step divides and that fits into the windows of both scales.
LATENT_STEPS = (
    Column("L = 1", "1", ("latent-step-1",), {"horizon": 12}),
    Column("L = 2", "2", ("latent-step-2",), {"horizon": 12}),
    Column("L = 3", "3", (*BASES, "horizon-12"), {"search": "beam", "horizon": 12, "latent_step": 3}, context=True),
    Column("L = 4", "4", ("latent-step-4",), {"horizon": 12}),
)
BEAM = Column("beam search", "beam", BASES, {"search": "beam"}, context=True)
PRIOR = Column("sample prior", "prior", ("prior-sampling",), {"search": "prior_sampling"})
STUDIES = (
    Study(
        "latent_step",
        "Steps in a latent code L",
        "Each L trains its own models. All plan 12 steps ahead, which every L divides; the paper plans 15.",
        LATENT_STEPS,
    ),
    Study(
        "horizon", "Planning horizon H", "Steps planned ahead, on the same models.", tuple(map(_horizon, (3, 6, 9, 12, 15, 21)))
    ),
    Study(
        "beta",
        "Likelihood threshold β",
        "Plans less likely than β per code are penalised; the same models.",
        (
            _beta("10⁻⁵", "1e-5", "beta-1e-5"),
            _beta("0.002", "0.002", "beta-2e-3"),
            _beta("0.01", "0.01", "beta-1e-2"),
            _beta("0.05", "0.05", "beta-5e-2"),
            _beta("0.1", "0.1", "beta-1e-1"),
            _beta("0.5", "0.5", "beta-5e-1"),
        ),
    ),
    Study(
        "sampling",
        "Beam search against sampling",
        "Whole plans sampled from the prior, or uniformly over the codes, instead of the beam; the same models.",
        (BEAM, PRIOR, Column("sample uniform", "uniform", ("uniform-sampling",), {"search": "uniform_sampling"})),
    ),
    Study(
        "unconditional",
        "Unconditional decoder",
        "The decoder does not get the first state. Plans are 12 steps long for L = 1 and 2, as long as the base's for L = 3.",
        (
            Column("L = 1", "1", ("unconditional-latent-step-1",), {"horizon": 12}),
            Column("L = 2", "2", ("unconditional-latent-step-2",), {"horizon": 12}),
            Column("L = 3", "3", ("unconditional",), {}),
        ),
    ),
    Study(
        "attention",
        "Attention bottleneck",
        "Attention instead of pooling and tiling between steps and codes. It has no partial plans, so its plans are sampled.",
        (
            BEAM,
            Column("pooling, sample prior", "prior", ("prior-sampling",), {"search": "prior_sampling"}, context=True),
            Column("attention, sample prior", "attention", ("attention-bottleneck",), {"search": "prior_sampling"}),
        ),
    ),
)


@dataclass(frozen=True)
class Comparison:
    """One dataset in a study: its base, and by column of the study its row and the paper's mean score."""

    base: Row
    rows: tuple[Row | None, ...]
    paper: tuple[float | None, ...]


def compare(study: Study, bases: Sequence[Row]) -> tuple[tuple[Column, ...], list[Comparison]]:
    """The columns with results, and the datasets that have an ablation of this study."""
    compared = [base for base in bases if any(_is_ablated(column, base) for column in study.columns)]
    columns = tuple(column for column in study.columns if any(column.find(base) for base in compared))
    published = [line for line in read_paper("ablations") if line["table"] == study.name]
    scores = {(line["column"], line["dataset"]): float(line["score"]) for line in published}

    def paper(column: Column, base: Row) -> float | None:
        return scores.get((column.paper or "", paper_dataset(base.first.dataset) or ""))

    return columns, [
        Comparison(base, tuple(column.find(base) for column in columns), tuple(paper(column, base) for column in columns))
        for base in compared
    ]


def _is_ablated(column: Column, base: Row) -> bool:
    row = column.find(base)
    return row is not None and row.first.ablation not in BASES and not column.context


def complete(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """The largest set of datasets of one source and scale that have every column and may be averaged."""
    kinds: dict[tuple[str, str], list[Comparison]] = {}
    for each in comparisons:
        if all(each.rows):
            kinds.setdefault((each.base.first.source, each.base.first.scale), []).append(each)
    groups = [group for group in kinds.values() if may_be_averaged([each.base for each in group])]
    return max(groups, key=len, default=[])


def column_means(comparisons: Sequence[Comparison]) -> tuple[list[Estimate], list[float | None]]:
    """Mean over `complete` datasets of each column: ours, and the paper's if it has all of them."""
    ours = [mean_of([row.score for row in rows if row]) for rows in zip(*(each.rows for each in comparisons), strict=True)]
    paper: list[float | None] = []
    for scores in zip(*(each.paper for each in comparisons), strict=True):
        known = [score for score in scores if score is not None]
        paper.append(sum(known) / len(known) if len(known) == len(scores) else None)
    return ours, paper


def study_table(study: Study, bases: Sequence[Row]) -> Table | None:
    """The study's table, with the paper's line below each dataset's; None if no dataset has an ablation of it."""
    columns, comparisons = compare(study, bases)
    if not comparisons:
        return None
    lines = [line for each in comparisons for line in _lines(each)]
    averaged = complete(comparisons)
    if len(averaged) > 1:
        lines += _mean_lines(averaged)
    return Table(study.title, study.caption, tuple(column.label for column in columns), tuple(lines))


def _lines(each: Comparison) -> list[Line]:
    dataset = each.base.first.dataset
    lines = [Line(dataset, describe(each.base), tuple(score_cell(row, each.base) for row in each.rows))]
    if any(score is not None for score in each.paper):
        texts = [NOTHING if score is None else f"{score:.2f}".removesuffix("0") for score in each.paper]
        lines.append(Line(f"the paper, on D4RL's {paper_dataset(dataset)}", "", tuple(texts), ours=False))
    return lines


def _mean_lines(averaged: Sequence[Comparison]) -> list[Line]:
    ours, paper = column_means(averaged)
    lines = [Line("mean", f"of the {len(averaged)} datasets with all columns", tuple(map(str, ours)))]
    if any(mean is not None for mean in paper):
        texts = [NOTHING if mean is None else f"{mean:.1f}" for mean in paper]
        lines.append(Line(f"mean of the paper, on D4RL's {len(averaged)} datasets", "", tuple(texts), ours=False))
    return lines
