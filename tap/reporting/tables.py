"""Tables of results, for the page and for Markdown.

The paper's numbers are of D4RL's own data. They are shown with our dataset of the same task, whose label states where it comes
from. Unless that is D4RL, the paper's number is a rough reference, always labelled "the paper, on D4RL's ...".
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tap.estimates import Estimate, mean_of
from tap.reporting.paper import paper_dataset, paper_score, read_paper, task_of
from tap.reporting.rows import SOURCES, Row, methods_run
from tap.results import Diagnosis, SampledPlans
from tap.settings import Method, suite_of

NOTHING = "\N{EN DASH}"
ON_D4RL = "the paper, on D4RL's data"
SUITES = {"locomotion": "Locomotion", "adroit": "Adroit hands", "antmaze": "AntMaze", "custom": "Other datasets"}


# ---------------------------------------------------------------- what a table is


@dataclass(frozen=True)
class Line:
    """One line: its label, a note below the label, and a text for each column. `ours` is False for the paper's numbers."""

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
    """The table in GitHub's Markdown, under a heading; headings over groups of columns are repeated in each column's."""
    over = [group for group, count in table.groups for _ in range(count)] or [""] * len(table.head)
    head = ["", *(f"{head} ({group})" if group else head for group, head in zip(over, table.head, strict=True))]
    lines = [[f"{line.label}<br>{line.note}" if line.note else line.label, *line.cells] for line in table.lines]
    rule = [":--", *(["--:"] * len(table.head))]
    texts = [f"### {table.title}", "", *([table.caption, ""] if table.caption else [])]
    return "\n".join([*texts, *(f"| {' | '.join(_escape(cell) for cell in cells)} |" for cells in (head, rule, *lines)), ""])


def _escape(cell: str) -> str:
    text = cell.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")
    return text.replace("&lt;br>", "<br>")


def describe(row: Row) -> str:
    """Where the data comes from, and how much was evaluated at which scale."""
    kind = "" if row.normalized else "returns, no reference scores; "
    return f"{_origin(row.first.source, row.first.scale)}; {kind}{row.extent}"


def _origin(source: str, scale: str) -> str:
    return f"{SOURCES.get(source, source)}; {scale} scale"


def score_cell(row: Row | None, base: Row) -> str:
    """The score of a row, with its numbers of seeds and of episodes where they differ from its base's."""
    if row is None:
        return NOTHING
    seeds, episodes = len(row.evaluations), row.first.episodes
    notes = []
    if seeds != len(base.evaluations):
        notes.append(f"{seeds} seeds" if seeds > 1 else "1 seed, ± over episodes")
    if episodes != base.first.episodes:
        notes.append(f"{episodes} episodes")
    return f"{row.score} ({', '.join(notes)})" if notes else str(row.score)


def may_be_averaged(rows: Sequence[Row]) -> bool:
    """Whether a mean over these rows is meaningful: normalised scores, one source and scale, and no task twice."""
    kinds = {(row.first.source, row.first.scale) for row in rows}
    tasks = {task_of(row.first.dataset) for row in rows}
    return all(row.normalized for row in rows) and len(kinds) == 1 and len(tasks) == len(rows)


# ---------------------------------------------------------------- main results


def main_tables(rows: Sequence[Row]) -> list[Table]:
    """TAP's scores, those of the other methods and the data's, by suite, with all methods of the paper's table of it."""
    tables = []
    for suite, title in SUITES.items():
        of_suite = [row for row in rows if suite_of(row.first.dataset) == suite]
        if of_suite:
            tables.append(_main_table(f"{title}: results", of_suite, suite))
    return tables


def _main_table(title: str, rows: Sequence[Row], suite: str) -> Table:
    published = {
        (line["dataset"], line["method"]): paper_score(line) for line in read_paper("scores") if line["table"] == suite
    }
    papers = [paper_dataset(row.first.dataset) for row in rows]
    methods = [
        method
        for method in dict.fromkeys(method for _, method in published)
        if any((paper, method) in published for paper in papers)
    ]
    methods.sort(key=lambda method: method != "TAP")  # next to our TAP
    others = methods_run(rows)
    columns = [
        *zip(*(_scores(row, others) for row in rows), strict=True),
        *([published.get((paper or "", method)) for paper in papers] for method in methods),
    ]
    shown = [[*map(_text, column)] for column in columns]
    shown[1 : 1 + len(others)] = [[score_cell(row.method(name), row) for row in rows] for name in others]
    cells = zip(*shown, strict=True)
    lines = [
        Line(row.first.dataset, describe(row) + (f"; the paper's: D4RL's {paper}" if paper else ""), texts)
        for row, paper, texts in zip(rows, papers, cells, strict=True)
    ]
    if len(rows) > 1 and may_be_averaged(rows) and (all(papers) or not methods):
        lines.append(Line("mean", f"of these {len(rows)} datasets", tuple(map(_mean_text, columns))))
    head = ("TAP", *others.values(), "data: mean", "data: best tenth")
    groups = (("this run", len(head)), (ON_D4RL, len(methods))) if methods else ()
    return Table(title, _main_caption(papers, methods), (*head, *methods), tuple(lines), groups)


def _scores(row: Row, others: Iterable[Method]) -> tuple[Estimate | None, ...]:
    """TAP's score, those of the other methods, and of the data's episodes the mean and the mean of the best tenth."""
    mean, best_tenth = row.first.behaviour.mean_score, row.first.behaviour.best_tenth_normalized_score
    return (
        row.score,
        *(found.score if (found := row.method(name)) else None for name in others),
        None if mean is None else Estimate(mean, None),
        None if best_tenth is None else Estimate(best_tenth, None),
    )


def _text(estimate: Estimate | None) -> str:
    return NOTHING if estimate is None else str(estimate)


def _mean_text(estimates: Sequence[Estimate | None]) -> str:
    known = [each for each in estimates if each is not None]
    return str(mean_of(known)) if len(known) == len(estimates) else NOTHING


def _main_caption(papers: Sequence[str | None], methods: Sequence[str]) -> str:
    caption = "± is the standard error over training seeds, or over episodes if there is a single seed."
    if methods:
        caption += (
            " The paper's numbers are of D4RL's own files at the paper's scale (TAP: 5 seeds of 20 episodes, AntMaze 100), in "
            "the original simulators: for other data a rough reference, not a comparison."
        )
    if any("antmaze-ultra" in paper for paper in papers if paper):
        caption += (
            " The paper's AntMaze-Ultra scores of TAP are of sampling; with beam search it has 21.0 (play) and 22.0 (diverse)."
        )
    return caption


# ---------------------------------------------------------------- departures, sampled plans, protocol

DEPARTURES = {
    "beam": "the paper's beam search",
    "no-search": "one plan sampled from the prior",
    "prior-mean": "the mean over first codes under the prior alone",
    "critic-weighted": "the mean over first codes, weighted by the critic",
    "plan-every-3": "three actions of a plan are executed before the next",
    "all-episodes-alike": "episodes with high returns are not drawn more often in training",
    "no-bootstrap": "returns-to-go of truncated episodes are not bootstrapped",
    "no-dead-code-replacement": "dead codes are not replaced, as published: here the base departs",
}
BEAM_DEPARTURES = {
    "without-replacement": "a plan is expanded by different codes, sampled without replacement",
    "partial-threshold": "a partial plan of m codes is penalised below βᵐ",
    "stop-at-end": "rewards after a predicted end are left out",
}


def departures_table(bases: Sequence[Row]) -> Table | None:
    """Each departure against its base, with the paired difference; None if none was run."""
    beams = [base.ablation("beam") or base for base in bases]
    lines = [
        _departure(f"{name}: {words}", row, reference)
        for departures, references in ((DEPARTURES, bases), (BEAM_DEPARTURES, beams))
        for name, words in departures.items()
        for base, reference in zip(bases, references, strict=True)
        if (row := base.ablation(name))
    ]
    caption = (
        "Each changes one thing of the base, or, where it concerns the beam search, of that. The difference is the mean over "
        "seeds of departure minus base, seed by seed, ± its standard error."
    )
    head = ("score", "base's score", "difference", "decision time", "base's decision time")
    return Table("One thing changed", caption, head, tuple(lines)) if lines else None


def _departure(label: str, row: Row, base: Row) -> Line:
    difference = row.minus(base)
    signed = f"{'+' * (difference.mean > 0)}{difference}" if difference else NOTHING
    times = [f"{each.latency.median:.3g} ms" for each in (row, base)]
    return Line(label, f"{base.first.dataset}; {describe(base)}", (score_cell(row, base), str(base.score), signed, *times))


def sampled_plans_table(diagnoses: Sequence[Diagnosis]) -> Table | None:
    """Errors of plans sampled from the prior and uniformly, and their correlation with predicted returns (paper, appendix)."""

    def cells(plans: SampledPlans) -> tuple[str, ...]:
        error, std = plans.state_prediction_error_median, plans.predicted_return_deviation
        return f"{error:.3g}", f"{std:.3g}", f"{plans.rank_correlation:+.2f}"

    lines = [
        Line(
            each.dataset,
            f"{_origin(each.source, each.scale)}; seed {each.seed}; {each.protocol}",
            (*cells(each.prior), *cells(each.uniform)),
        )
        for each in diagnoses
        if each.prior and each.uniform
    ]
    caption = (
        "Plans sampled from the prior, and plans of uniformly sampled codes. State error: mean squared error of a plan's "
        "states against the simulator executing its actions, median over plans. Std of returns: of the predicted returns. Rank "
        "correlation: Spearman's, of the two. If it is positive, plans with higher predicted returns have larger errors, "
        "and a search for the highest return favours errors."
    )
    head, groups = ("state error", "std of returns", "rank correlation"), (("from the prior", 3), ("uniform", 3))
    return Table("Sampled plans", caption, head * 2, tuple(lines), groups) if lines else None


def protocol_table(rows: Sequence[Row]) -> Table:
    """What was evaluated on which data, for a text that is read without the page."""
    lines = [
        Line(
            row.first.dataset,
            describe(row),
            (
                row.first.environment,
                row.first.simulator or ", ".join(f"{name} {version}" for name, version in row.first.versions.items()),
                ", ".join(str(each.seed) for each in row.evaluations),
                row.first.protocol,
                row.first.digest[:12],
            ),
        )
        for row in rows
    ]
    return Table(
        "What was evaluated", "", ("environment", "simulator", "training seeds", "protocol", "data's SHA-256"), tuple(lines)
    )
