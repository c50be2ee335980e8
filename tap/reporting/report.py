"""The report: one page of all results, curves and validations that needs no network, and its figures and tables as files.

It reads what the stages wrote under data/ (metrics/, plots/, raw/*/validation.json), and writes index.html with all figures
inside, the figures as PNG files for slides, and the tables with the paper's numbers as Markdown. Equal inputs give equal bytes.
"""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tap.files import write_atomically, write_json
from tap.methods.catalog import CATALOG
from tap.reporting.checks import offline_checks_table
from tap.reporting.experiments import experiment_pictures
from tap.reporting.held_out import (
    HeldOutRow,
    dimensions_table,
    held_out_rows,
    held_out_summary,
    held_out_table,
    in_thousandths,
)
from tap.reporting.held_out_picture import held_out_picture
from tap.reporting.page import template
from tap.reporting.pictures import Picture, dataset_pictures, returns_picture
from tap.reporting.rows import SOURCES, Row, load_diagnoses, load_evaluations, methods_run, summary, table_rows
from tap.reporting.studies import STUDIES, study_table
from tap.reporting.style import figure_png
from tap.reporting.tables import (
    Table,
    departures_table,
    main_tables,
    markdown,
    protocol_table,
    sampled_plans_table,
    score_cell,
)
from tap.results import IMITATION, AnyEvaluation, Diagnosis, TrainingMetrics, ValidationReport
from tap.settings import METHODS


def write_report(data: Path, out: Path) -> Path:
    """Read what the stages wrote under `data`, and write the report into the folder `out`; returns the path of index.html.

    Beside it are results.md, summary.json with all scores, and the figures as PNG files.
    Raises ValueError if nothing has been evaluated yet, or a file is not valid.
    """
    evaluations = load_evaluations(data)
    rows, held_out = table_rows(evaluations), held_out_rows(evaluations)
    validations = {path.parent.name: ValidationReport.read(path) for path in sorted(data.glob("raw/*/validation.json"))}
    tables, held_out_tables = experiment_tables(rows, load_diagnoses(data)), _held_out_tables(held_out, validations)
    experiments = experiment_pictures(rows, validations)
    datasets = dict.fromkeys(each.dataset for each in evaluations)
    sections = {dataset: _section(dataset, rows, validations, data) for dataset in datasets}
    for dataset, of_dataset in held_out.items():
        sections[dataset].insert(0, held_out_picture(of_dataset, validations.get(dataset)))
    histograms = {
        dataset: returns_picture(dataset, validation) for dataset, validation in validations.items() if validation.has_rewards
    }
    page = template("report.html").render(
        rows=rows,
        evaluations=evaluations,
        held_out=held_out,
        held_out_tables=held_out_tables,
        in_thousandths=in_thousandths,
        imitation=IMITATION,
        tables=tables,
        experiments=experiments,
        sections=sections,
        validations=validations,
        histograms=histograms,
        training=_training_metrics(data / "metrics"),
        sources=SOURCES,
        score_cell=score_cell,
        methods=methods_run(rows),
        titles={name: info.title for name, info in CATALOG.items()},
    )
    for picture in [*experiments, *itertools.chain(*sections.values()), *histograms.values()]:
        write_atomically(out / f"{picture.name}.png", figure_png(picture.figure))
    write_atomically(out / "results.md", results_markdown(evaluations, rows, [*held_out_tables, *tables], experiments))
    write_json(out / "summary.json", summary(rows) | held_out_summary(held_out))
    write_atomically(out / "index.html", page)
    return out / "index.html"


def experiment_tables(rows: Sequence[Row], diagnoses: Sequence[Diagnosis]) -> list[Table]:
    """All tables for which there are results, in the paper's order."""
    studies = (study_table(study, rows) for study in STUDIES)
    tables = [
        *main_tables(rows),
        offline_checks_table(diagnoses),
        *studies,
        sampled_plans_table(diagnoses),
        departures_table(rows),
    ]
    return [table for table in tables if table]


def _held_out_tables(held_out: Mapping[str, list[HeldOutRow]], validations: Mapping[str, ValidationReport]) -> list[Table]:
    """Action errors of the datasets without a simulator: of all together, and of each by dimension."""
    errors = held_out_table(held_out)
    by_dimension = (dimensions_table(rows, validations.get(dataset)) for dataset, rows in held_out.items())
    return [errors, *by_dimension] if errors else []


def results_markdown(
    evaluations: Sequence[AnyEvaluation], rows: Sequence[Row], tables: Sequence[Table], experiments: Sequence[Picture]
) -> str:
    """The tables and figures with the paper's numbers, as a text to commit; the figures are files next to it."""
    commits = sorted({each.git_commit[:10] for each in evaluations})
    header = (
        "Written by the stage `report` (`python -m pipelines.stages.report`) from the files under `data/metrics`, not by hand. "
        f"The evaluations ran at commit {', '.join(commits)}. Scores are D4RL's normalised scores of undiscounted returns, 0 "
        "for a random policy and 100 for an expert. Each line states where its data comes from. The paper is Jiang et al., "
        "*Efficient Planning in a Compact Latent Action Space*, ICLR 2023; its numbers are of D4RL's own data."
    )
    figures = [f"### {each.title}\n\n![{each.alt}]({each.name}.png)\n\n{each.caption}\n" for each in experiments]
    protocols = [protocol_table(rows)] if rows else []
    parts = ["# Results\n", header + "\n", *map(markdown, [*protocols, *tables]), *figures]
    return "\n".join(parts)


def _section(dataset: str, rows: Sequence[Row], validations: Mapping[str, ValidationReport], data: Path) -> list[Picture]:
    evaluations = [each for row in rows for each in row.evaluations if each.dataset == dataset]
    return dataset_pictures(dataset, evaluations, validations.get(dataset), data / "plots")


def _training_metrics(metrics: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """By training stage and instance, the last metrics."""
    stages = {
        stage: {path.stem: TrainingMetrics.read(path).as_json() for path in sorted((metrics / stage).glob("*.json"))}
        for stage in ("train_vqvae", "train_prior", "train_critic", "train_actor", *(f"train_{method}" for method in METHODS))
    }
    return {stage: instances for stage, instances in stages.items() if instances}
