"""Tables of the paper beside our results: main results by suite, the appendix's ablations, departures from the base.

The paper's numbers are of D4RL's own data. Beside them stands our dataset of the same task: its line says where it comes from.
Where that is not D4RL, the paper's number is a landmark, and nothing here calls it more than "the paper, on D4RL's ...".
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tap.reporting.results import SOURCES, Diagnosis, Drawn, Estimate, Row, estimate, mean_of, read_paper
from tap.settings import suite_of

NOTHING = "\N{EN DASH}"
ON_D4RL = "the paper, on D4RL's data"
SUITES = {"locomotion": "Locomotion", "adroit": "Adroit hands", "antmaze": "AntMaze", "custom": "Other datasets"}


# ---------------------------------------------------------------- what a table is


@dataclass(frozen=True)
class Line:
    """One line: what it is of, and a text for each column. `ours` is False for the paper's numbers."""

    label: str
    note: str
    cells: tuple[str, ...]
    ours: bool = True


@dataclass(frozen=True)
class Table:
    """A table as page and Markdown show it; `groups` are (heading over some columns, how many)."""

    title: str
    caption: str
    head: tuple[str, ...]
    lines: tuple[Line, ...]
    groups: tuple[tuple[str, int], ...] = ()


def markdown(table: Table) -> str:
    """The table in GitHub's Markdown, under a heading; what stands over groups of columns moves into their heads."""
    over = [group for group, count in table.groups for _ in range(count)] or [""] * len(table.head)
    head = ["", *(f"{head} ({group})" if group else head for group, head in zip(over, table.head, strict=True))]
    lines = [[f"{line.label}<br>{line.note}" if line.note else line.label, *line.cells] for line in table.lines]
    rule = [":--", *(["--:"] * len(table.head))]
    texts = [f"### {table.title}", "", *([table.caption, ""] if table.caption else [])]
    return "\n".join([*texts, *(f"| {' | '.join(_escape(cell) for cell in cells)} |" for cells in (head, rule, *lines)), ""])


def _escape(cell: str) -> str:
    text = cell.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")
    return text.replace("&lt;br>", "<br>")


# ---------------------------------------------------------------- main results


def papers_dataset(dataset: str) -> str | None:
    """The id of D4RL's dataset of the same task in the paper's tables: another version, or none, is the same task."""
    task = _task(dataset)
    return next((line["dataset"] for line in read_paper("scores") if _task(line["dataset"]) == task), None)


def _task(dataset: str) -> str:
    return re.sub(r"-v\d+$", "", dataset)


def main_tables(rows: Sequence[Row]) -> list[Table]:
    """Our scores and the data's own, by suite, beside all methods of the paper's table of that suite."""
    tables = []
    for suite, title in SUITES.items():
        own = [row for row in rows if suite_of(row.first.dataset) == suite]
        if own:
            published = [line for line in read_paper("scores") if line["table"] == suite]
            tables.append(_main_table(f"{title}: results", own, published))
    return tables


def _main_table(title: str, rows: Sequence[Row], published: Sequence[dict[str, str]]) -> Table:
    papers = [papers_dataset(row.first.dataset) for row in rows]
    scores = {(line["dataset"], line["method"]): estimate(line) for line in published}
    methods = [
        method for method in dict.fromkeys(line["method"] for line in published) if any((p, method) in scores for p in papers)
    ]
    methods.sort(key=lambda method: method != "TAP")  # ours stands beside the paper's TAP
    lines = []
    for row, paper in zip(rows, papers, strict=True):
        cells = [str(row.score), *(NOTHING if score is None else f"{score:.1f}" for score in _data_scores(row))]
        if methods:
            cells += [str(scores.get((paper or "", method), NOTHING)) for method in methods]
        note = describe(row) + (f"; the paper's: D4RL's {paper}" if paper else "")
        lines.append(Line(row.first.dataset, note, tuple(cells)))
    if len(rows) > 1 and _may_be_averaged(rows) and (all(papers) or not methods):
        columns: list[list[Estimate | None]] = [[row.score for row in rows]]
        columns += [
            [None if score is None else Estimate(score, None) for score in data]
            for data in zip(*map(_data_scores, rows), strict=True)
        ]
        columns += [[scores.get((paper or "", method)) for paper in papers] for method in methods]
        lines.append(Line("mean", f"of these {len(rows)} datasets", tuple(map(_mean_cell, columns))))
    caption = "± is the standard error over training seeds, or over episodes where there is one seed."
    if methods:
        caption += (
            " The paper's numbers are of D4RL's own files at the paper's scale (TAP: 5 seeds of 20 episodes, AntMaze 100), in "
            "the original simulators: for other data a landmark, not a comparison."
        )
    if "antmaze-ultra" in " ".join(filter(None, papers)):
        caption += (
            " The paper's AntMaze-Ultra scores of TAP are of sampling; with beam search it says 21.0 (play) and 22.0 (diverse)."
        )
    head = ("TAP", "data: mean", "data: best tenth")
    if not methods:
        return Table(title, caption, head, tuple(lines))
    groups = (("this run", len(head)), (ON_D4RL, len(methods)))
    return Table(title, caption, (*head, *methods), tuple(lines), groups)


def _data_scores(row: Row) -> tuple[float | None, float | None]:
    """The data's mean and best tenth, in the unit of the row's score."""
    behaviour = row.first.behaviour
    if row.normalized:
        return behaviour.mean_normalized_score, behaviour.best_tenth_normalized_score
    return behaviour.mean_return, None


def _mean_cell(estimates: Sequence[Estimate | None]) -> str:
    known = [each for each in estimates if each is not None]
    return str(mean_of(known)) if len(known) == len(estimates) else NOTHING


def _may_be_averaged(rows: Sequence[Row]) -> bool:
    """Whether a mean over these rows means something: normalised, one source, one scale, no task twice."""
    kinds = {(row.first.source, row.first.scale) for row in rows}
    tasks = {_task(row.first.dataset) for row in rows}
    return all(row.normalized for row in rows) and len(kinds) == 1 and len(tasks) == len(rows)


def describe(row: Row) -> str:
    """Where the data comes from, and how much was evaluated at which scale."""
    kind = "" if row.normalized else "returns, no reference scores; "
    return f"{_origin(row.first.source, row.first.scale)}; {kind}{row.extent}"


def _origin(source: str, scale: str) -> str:
    return f"{SOURCES.get(source, source)}; {scale} scale"


# ---------------------------------------------------------------- ablations of the paper


@dataclass(frozen=True)
class Column:
    """A setting that one of the paper's tables tries.

    It takes the row of the base (None) or of the ablation in `rows` whose metrics state `settings`. A column that is
    `context` only stands beside the others: alone it makes no table.
    """

    label: str
    paper: str | None  # the column in paper_ablations.csv
    rows: tuple[str | None, ...]
    settings: dict[str, Any]
    context: bool = False

    def find(self, base: Row) -> Row | None:
        for row in (base, *base.ablations):
            stated = row.first.planner | {"latent_step": row.first.latent_step}
            if row.first.ablation in self.rows and self.settings.items() <= stated.items():
                return row
        return None


@dataclass(frozen=True)
class Study:
    """One of the paper's ablation tables."""

    name: str  # in paper_ablations.csv
    title: str
    caption: str
    columns: tuple[Column, ...]


def _horizon(steps: int) -> Column:
    paper = str(steps) if steps in (3, 9, 15, 21) else None
    return Column(f"H = {steps}", paper, (None, f"horizon-{steps}"), {"search": "beam", "horizon": steps})


def _beta(label: str, paper: str, ablation: str) -> Column:
    settings = {"search": "beam", "likelihood_threshold": float(paper)}
    return Column(f"β = {label}", paper, (None, ablation), settings)


# 12 is the longest horizon that every latent step divides and that windows hold at both scales.
LATENT_STEPS = (
    Column("L = 1", "1", ("latent-step-1",), {"horizon": 12}),
    Column("L = 2", "2", ("latent-step-2",), {"horizon": 12}),
    Column("L = 3", "3", (None, "horizon-12"), {"horizon": 12, "latent_step": 3}, context=True),
    Column("L = 4", "4", ("latent-step-4",), {"horizon": 12}),
)
BEAM = Column("beam search", "beam", (None,), {"search": "beam"}, context=True)
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
        "A plan less likely than β a code is penalised; the same models.",
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
        "The decoder does not see the first state. Plans are 12 steps long for L = 1 and 2, as long as the base's for L = 3.",
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
    """One dataset in a study: its row, and the paper's mean score, for each column of the study that any dataset has."""

    base: Row
    rows: tuple[Row | None, ...]
    paper: tuple[float | None, ...]
    papers_dataset: str | None


def compare(study: Study, bases: Sequence[Row]) -> tuple[tuple[Column, ...], list[Comparison]]:
    """The columns with results, and the datasets that have an ablation of this study."""
    found = []
    for base in bases:
        rows = [column.find(base) for column in study.columns]
        if any(row and row.first.ablation and not column.context for column, row in zip(study.columns, rows, strict=True)):
            found.append((base, rows))
    shown = [place for place in range(len(study.columns)) if any(rows[place] for _, rows in found)]
    published = [line for line in read_paper("ablations") if line["table"] == study.name]
    scores = {(line["column"], line["dataset"]): float(line["score"]) for line in published}
    comparisons = []
    for base, rows in found:
        dataset = papers_dataset(base.first.dataset)
        paper = tuple(scores.get((study.columns[place].paper or "", dataset or "")) for place in shown)
        known = dataset if any(score is not None for score in paper) else None
        comparisons.append(Comparison(base, tuple(rows[place] for place in shown), paper, known))
    return tuple(study.columns[place] for place in shown), comparisons


def complete(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """The datasets that have every column and may be averaged: the most of one source and scale."""
    kinds: dict[tuple[str, str], list[Comparison]] = {}
    for each in comparisons:
        if all(each.rows):
            kinds.setdefault((each.base.first.source, each.base.first.scale), []).append(each)
    groups = [group for group in kinds.values() if _may_be_averaged([each.base for each in group])]
    return max(groups, key=len, default=[])


def column_means(comparisons: Sequence[Comparison]) -> tuple[list[Estimate], list[float | None]]:
    """Mean over `complete` datasets of each column: ours, and the paper's where it has all of them."""
    ours = [mean_of([row.score for row in rows if row]) for rows in zip(*(each.rows for each in comparisons), strict=True)]
    paper: list[float | None] = []
    for scores in zip(*(each.paper for each in comparisons), strict=True):
        known = [score for score in scores if score is not None]
        paper.append(sum(known) / len(known) if len(known) == len(scores) else None)
    return ours, paper


def study_table(study: Study, bases: Sequence[Row]) -> Table | None:
    """The study's table: our line of each dataset over the paper's; None where no dataset has an ablation of it."""
    columns, comparisons = compare(study, bases)
    if not comparisons:
        return None
    lines = []
    for each in comparisons:
        lines.append(Line(each.base.first.dataset, describe(each.base), tuple(_cell(row, each.base) for row in each.rows)))
        if each.papers_dataset:
            texts = [NOTHING if score is None else f"{score:.2f}".removesuffix("0") for score in each.paper]
            lines.append(Line(f"the paper, on D4RL's {each.papers_dataset}", "", tuple(texts), ours=False))
    whole = complete(comparisons)
    if len(whole) > 1:
        ours, paper = column_means(whole)
        datasets = f"of the {len(whole)} datasets with all columns"
        lines.append(Line("mean", datasets, tuple(str(mean) for mean in ours)))
        if any(mean is not None for mean in paper):
            texts = [NOTHING if mean is None else f"{mean:.1f}" for mean in paper]
            lines.append(Line(f"mean of the paper, on D4RL's {len(whole)} datasets", "", tuple(texts), ours=False))
    return Table(study.title, study.caption, tuple(column.label for column in columns), tuple(lines))


def _cell(row: Row | None, base: Row) -> str:
    if row is None:
        return NOTHING
    seeds = len(row.results)
    if seeds == len(base.results):
        return str(row.score)
    return f"{row.score} ({seeds} seeds)" if seeds > 1 else f"{row.score} (1 seed, ± over episodes)"


DEPARTURES = {
    "no-search": "one plan drawn from the prior",
    "without-replacement": "a plan is expanded by different codes, drawn without replacement",
    "partial-threshold": "a partial plan of m codes is held to βᵐ",
    "stop-at-end": "rewards after a predicted end are left out",
    "plan-every-3": "three actions of a plan are executed before the next",
    "bootstrap-truncated": "returns-to-go of truncated episodes are bootstrapped",
    "no-dead-code-replacement": "dead codes are not replaced, as published: here the base departs",
}


def departures_table(bases: Sequence[Row]) -> Table | None:
    """Each departure against the base it departs from, with the paired difference; None where none was run."""
    lines = []
    for name, words in DEPARTURES.items():
        for base in bases:
            if row := base.ablation(name):
                difference = row.minus(base)
                signed = f"{'+' * (difference.mean > 0)}{difference}" if difference else NOTHING
                times = [f"{each.latency.median:.3g} ms" for each in (row, base)]
                cells = (_cell(row, base), str(base.score), signed, *times)
                lines.append(Line(f"{name}: {words}", f"{base.first.dataset}; {describe(base)}", cells))
    caption = (
        "Each changes one thing of the base. The difference is the mean over seeds of departure minus base, seed by seed, "
        "± its standard error."
    )
    head = ("score", "base's score", "difference", "decision", "base's decision")
    return Table("Departures from the published behaviour", caption, head, tuple(lines)) if lines else None


def drawn_plans_table(diagnoses: Sequence[Diagnosis]) -> Table | None:
    """How far plans from the prior and uniform ones are off, and whether those that promise more are further off (appendix)."""

    def cells(drawn: Drawn) -> tuple[str, ...]:
        error, spread = drawn.state_prediction_error_median, drawn.predicted_return_deviation
        return f"{error:.3g}", f"{spread:.3g}", f"{drawn.rank_correlation:+.2f}"

    lines = [
        Line(
            each.dataset,
            f"{_origin(each.source, each.scale)}; seed {each.seed}; {each.protocol}",
            (*cells(each.prior), *cells(each.uniform)),
        )
        for each in diagnoses
    ]
    caption = (
        "Plans from the prior, and plans of uniform codes: median of their mean squared state errors against the simulator, "
        "which follows their actions; standard deviation of their predicted returns; Spearman's rank correlation of both. "
        "Where it is positive, plans that promise more are further off, and a search for the highest return is drawn to errors."
    )
    head, groups = ("state error", "spread of returns", "rank correlation"), (("from the prior", 3), ("uniform", 3))
    return Table("Drawn plans", caption, head * 2, tuple(lines), groups) if lines else None


def experiment_tables(rows: Sequence[Row], diagnoses: Sequence[Diagnosis]) -> list[Table]:
    """All tables that there are results for, in the paper's order."""
    studies = (study_table(study, rows) for study in STUDIES)
    tables = [*main_tables(rows), *studies, drawn_plans_table(diagnoses), departures_table(rows)]
    return [table for table in tables if table]


def protocol_table(rows: Sequence[Row]) -> Table:
    """What was evaluated on what, for a text that stands without the page."""
    lines = [
        Line(
            row.first.dataset,
            describe(row),
            (
                row.first.environment,
                row.first.simulator or ", ".join(f"{name} {version}" for name, version in row.first.versions.items()),
                ", ".join(str(result.seed) for result in row.results),
                row.first.protocol,
                row.first.digest[:12],
            ),
        )
        for row in rows
    ]
    return Table(
        "What was evaluated", "", ("environment", "simulator", "training seeds", "protocol", "data's SHA-256"), tuple(lines)
    )
