"""The report: results, curves and validations of all runs, on one page that needs no network.

What the stages wrote under data/ goes in (metrics/, plots/, raw/*/validation.json); what comes out is one HTML file with
its figures inside, the same figures as PNG files for slides, and the tables beside the paper's as Markdown. Equal inputs give
equal bytes.
"""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup
from matplotlib.figure import Figure

from tap.files import read_json, write_atomically
from tap.reporting.figures import (
    SEARCHES,
    Validation,
    ablation_figure,
    candidates_figure,
    codebook_figure,
    dimension_latency_figure,
    distribution_figure,
    figure_png,
    figure_svg,
    horizon_latency_figure,
    latent_step_figure,
    loss_figure,
    plan_figure,
    read_curves,
    relative_figure,
    returns_figure,
    score_figure,
)
from tap.reporting.results import SOURCES, Result, Row, estimate, load_diagnoses, load_results, read_paper, table_rows
from tap.reporting.tables import (
    NOTHING,
    STUDIES,
    Column,
    Comparison,
    Table,
    compare,
    complete,
    describe,
    experiment_tables,
    markdown,
    papers_dataset,
    protocol_table,
)
from tap.settings import suite_of

BASELINES = "TT", "CQL", "IQL"  # the paper's figure of scores against action dimensions compares with these
MIN_BASELINE = 5  # a ratio to a mean score of less than that is one of two numbers near zero


@dataclass(frozen=True)
class Picture:
    """A figure as the page shows it; `alt` says in words what it shows."""

    name: str
    title: str
    caption: str
    alt: str
    figure: Figure
    wide: bool = False  # takes the page's whole width


def pictures(dataset: str, results: Sequence[Result], validation: Validation | None, plots: Path) -> list[Picture]:
    """The figures of one dataset, as many as there are files for."""
    vqvae = [read_curves(path) for path in _of_dataset(dataset, plots / "train_vqvae", "csv")]
    prior = [read_curves(path) for path in _of_dataset(dataset, plots / "train_prior", "csv")]
    found = []
    if results:
        means = ", ".join(f"{statistics.fmean(result.returns):,.0f} for seed {result.seed}" for result in results)
        alt = f"Returns of {sum(len(result.returns) for result in results)} evaluated episodes; mean {means}."
        if validation:
            alt += f" Below: {_histogram_in_words(validation)}"
        caption = "Dots are TAP's episodes, bars the seeds' means. Below: the data it learned from, TAP's overall mean in blue."
        found.append(Picture(f"{dataset}-scores", "Score against the data", caption, alt, score_figure(results, validation)))
    for path in _of_dataset(dataset, plots / "evaluate", "json")[:1]:
        examples = read_json(path)["examples"]
        caption = (
            f"Seed {path.stem.rpartition('-')[2]}. The simulator starts at the plan's state and follows the plan's actions "
            "without re-planning. Shown: the observations that moved most, in the simulator's units."
        )
        alt = f"Planned and simulated observations and rewards: {'; '.join(example['title'] for example in examples)}."
        found.append(Picture(f"{dataset}-plan", "A plan against the simulator", caption, alt, plan_figure(examples)))
    for path in _of_dataset(dataset, plots / "diagnose", "json")[:1]:
        found += _diagnosis(dataset, read_json(path), path.stem.rpartition("-")[2])
    if vqvae or prior:
        caption = "One pair of lines a seed. Held-out episodes were never trained on: far above training, the model overfits."
        last = ", ".join(f"{curves['loss'][-1]:.3g}" for curves in [*vqvae, *prior])
        alt = f"Training and held-out loss of VQ-VAE and prior against updates; last training losses by model and seed: {last}."
        found.append(Picture(f"{dataset}-losses", "Losses", caption, alt, loss_figure(vqvae, prior)))
    if vqvae:
        caption = "One line a seed. A codebook that is little used has collapsed: its plans differ too little to choose from."
        last = ", ".join(f"{curves['codebook_usage'][-1]:.0%}" for curves in vqvae)
        alt = f"Share of codes in use and codebook perplexity against updates; last shares by seed: {last}."
        found.append(Picture(f"{dataset}-codebook", "Codebook", caption, alt, codebook_figure(vqvae)))
    return found


def _diagnosis(dataset: str, diagnosis: dict[str, Any], seed: str) -> list[Picture]:
    distributions, plans = diagnosis["distributions"], diagnosis["plans"]
    medians = ", ".join(
        f"{statistics.median(drawn['state_prediction_errors']):.2g} {name}" for name, drawn in distributions.items()
    )
    spread = Picture(
        f"{dataset}-distribution",
        "Drawn plans: what they promise, and how far they are off",
        f"Seed {seed}. Plans from the episodes' first states; mean squared error of their states, which the simulator tells by "
        "following their actions. Bluer: more plans.",
        f"Predicted return against state prediction error of drawn plans; median errors: {medians}.",
        distribution_figure(distributions),
    )
    shown = "; ".join(f"{each['title']} in observations {' and '.join(map(str, each['dimensions']))}" for each in plans)
    caption = f"Seed {seed}. Lines are predicted states, bluer where the objective ranks a plan higher, dots the steps."
    if any(each["frames"] for each in plans):
        caption += " Below: the simulator at the beginning, middle and end of the chosen plan."
    searches = " and ".join(SEARCHES[search].lower() for search in plans[0]["searches"])
    alt = f"All candidate plans of {searches}, with the chosen one and its simulation, from {shown}."
    return [spread, Picture(f"{dataset}-candidates", "What the search chooses from", caption, alt, candidates_figure(plans))]


def experiment_pictures(rows: Sequence[Row], validations: Mapping[str, Validation]) -> list[Picture]:
    """The paper's figures over all datasets, as many as there are results for."""
    found = []
    studies = {study.name: (study, *compare(study, rows)) for study in STUDIES}
    whole = {name: (study, columns, complete(some)) for name, (study, columns, some) in studies.items()}
    panels = [panel for panel in whole.values() if panel[2]]
    if panels:
        alt = f"Bars of the mean score by setting, ours and the paper's: {', '.join(study.title for study, *_ in panels)}."
        bases = [each.base for _, _, comparisons in panels for each in comparisons]
        ours = "; ".join(dict.fromkeys(f"{base.first.dataset} ({describe(base)})" for base in bases))
        caption = f"Mean over the datasets that have all bars of a panel, with its standard error. Ours: {ours}."
        found.append(Picture("experiments-ablations", "Ablations", caption, alt, ablation_figure(panels), wide=True))
    by_step = {name: whole[name] for name in ("latent_step", "unconditional") if whole[name][2]}
    if bases := _shared([comparisons for _, _, comparisons in by_step.values()]):
        steps: dict[str, list[tuple[int, list[Row]]]] = {
            name: [
                (int(column.paper or 0), [row for each in comparisons if each.base in bases and (row := each.rows[place])])
                for place, column in enumerate(columns)
            ]
            for name, (_, columns, comparisons) in by_step.items()
        }
        names = "; ".join(f"{base.first.dataset} ({describe(base)})" for base in bases)
        caption = (
            f"{'Mean over' if len(bases) > 1 else 'On'} {names}. Search value: the return that the first plan promises; state "
            "error: mean squared error of its states against the simulator. Where both rise and the score falls, plans are "
            "over-optimistic."
        )
        alt = f"Score, search value and state error against the latent step, by decoder, on {names}."
        figure = latent_step_figure(steps.get("latent_step", []), steps.get("unconditional", []))
        found.append(Picture("experiments-latent-steps", "Scores, search value and error", caption, alt, figure, wide=True))
    points = _relative_points(rows, validations)
    if len({dim for some in points.values() for dim, _, _ in some}) > 1:
        caption = (
            "Mean score over the mean of a baseline that the paper compares with, of the datasets of each action dimension; "
            f"without Adroit's expert data, as in the paper, and where the baseline scores {MIN_BASELINE} or more. Hollow: the "
            "paper's TAP on the same. Baselines and the paper's TAP saw D4RL's own data; ours as the tables say."
        )
        alt = "Mean score over that of baselines by action dimensions: " + "; ".join(
            f"{method} " + ", ".join(f"{dim}: {ratio:.2f}" for dim, ratio, _ in some) for method, some in points.items()
        )
        alt += "."
        found.append(Picture("experiments-dimensions", "Action dimensions", caption, alt, relative_figure(points)))
    if timed := [(_step_dim(validations[each.first.dataset]), each) for each in rows if each.first.dataset in validations]:
        caption = (
            "Median time of one decision for one state. The paper's are of one RTX 3090, at 15 steps and the D that it "
            "prints (S + A, 14 for hopper); ours of the machine that evaluated, at S + A + 2 and each dataset's horizon."
        )
        alt = (
            "Seconds a decision by dimensions: "
            + ", ".join(f"{dim}: {row.latency.median / 1000:.3g}" for dim, row in timed)
            + "."
        )
        found.append(Picture("experiments-latency", "Latency and dimensions", caption, alt, dimension_latency_figure(timed)))
    if horizons := _by_horizon(*studies["horizon"][1:]):
        caption = "Median time of one decision for one state, on the machine that evaluated; the paper's is of one RTX 3090."
        alt = "Seconds a decision by horizon: " + "; ".join(
            f"{dataset}: " + ", ".join(f"{horizon} steps {row.latency.median / 1000:.3g}" for horizon, row in some)
            for dataset, some in horizons.items()
        )
        found.append(
            Picture("experiments-horizon", "Latency and horizon", caption, alt + ".", horizon_latency_figure(horizons))
        )
    return found


def _shared(studies: Sequence[Sequence[Comparison]]) -> list[Row]:
    """The bases that stand in each of the studies."""
    bases = [[each.base for each in comparisons] for comparisons in studies]
    return [base for base in bases[0] if all(base in others for others in bases)] if bases else []


def _relative_points(rows: Sequence[Row], validations: Mapping[str, Validation]) -> dict[str, list[tuple[int, float, float]]]:
    """By baseline: (action dimensions, our mean score / its, the paper's TAP's / its), as in the paper's figure."""
    scores = {(line["dataset"], line["method"]): estimate(line).mean for line in read_paper("scores")}
    datasets: dict[tuple[str, int], list[tuple[float, float, float]]] = {}
    for row in rows:
        dataset, paper = row.first.dataset, papers_dataset(row.first.dataset)
        expert = suite_of(dataset) == "adroit" and "expert" in dataset
        if paper is None or expert or not row.normalized or dataset not in validations:
            continue
        for method in BASELINES:
            if (paper, method) in scores:
                three = row.score.mean, scores[paper, "TAP"], scores[paper, method]
                datasets.setdefault((method, validations[dataset]["action_dim"]), []).append(three)
    points: dict[str, list[tuple[int, float, float]]] = {}
    for (method, dim), of_datasets in sorted(datasets.items(), key=lambda item: (BASELINES.index(item[0][0]), item[0][1])):
        ours, papers, baseline = map(statistics.fmean, zip(*of_datasets, strict=True))
        if baseline >= MIN_BASELINE:
            points.setdefault(method, []).append((dim, ours / baseline, papers / baseline))
    return points


def _by_horizon(columns: Sequence[Column], comparisons: Sequence[Comparison]) -> dict[str, list[tuple[int, Row]]]:
    """By dataset, its rows of the horizon study with their horizons."""
    return {
        each.base.first.dataset: [
            (column.settings["horizon"], row) for column, row in zip(columns, each.rows, strict=True) if row
        ]
        for each in comparisons
    }


def _step_dim(validation: Validation) -> int:
    """The paper's D: numbers in one step, of state, action, reward and return-to-go."""
    return int(validation["observation_dim"] + validation["action_dim"] + 2)


def _histogram_in_words(validation: Validation) -> str:
    returns = validation["return"]
    return (
        f"histogram of the returns of the dataset's {validation['episodes']} episodes, "
        f"from {returns['min']:,.0f} to {returns['max']:,.0f}, mean {returns['mean']:,.0f}."
    )


def _of_dataset(dataset: str, folder: Path, extension: str) -> list[Path]:
    """The files DATASET-SEED.EXTENSION, by seed; other datasets' ids may begin with this one's."""
    seeds = {path: path.stem.removeprefix(f"{dataset}-") for path in folder.glob(f"{dataset}-*.{extension}")}
    return sorted((path for path, seed in seeds.items() if seed.isdigit()), key=lambda path: int(seeds[path]))


def write_report(data: Path, out: Path) -> Path:
    """Read what the stages wrote under `data`, write `out`/index.html, results.md and the PNG files; returns the page's path.

    Raises ValueError where nothing has been evaluated yet.
    """
    results = load_results(data / "metrics")
    rows = table_rows(results)
    validations = {path.parent.name: read_json(path) for path in sorted(data.glob("raw/*/validation.json"))}
    sections: dict[str, list[Picture]] = {}
    for dataset in dict.fromkeys(result.dataset for result in results):
        own = [result for row in rows for result in row.results if result.dataset == dataset]
        sections[dataset] = pictures(dataset, own, validations.get(dataset), data / "plots")
    histograms = {}
    for dataset, validation in validations.items():
        alt = _histogram_in_words(validation).capitalize()
        histograms[dataset] = Picture(f"{dataset}-returns", "Episode returns", "", alt, returns_figure(validation))
    tables = experiment_tables(rows, load_diagnoses(data / "metrics"))
    experiments = experiment_pictures(rows, validations)
    page = _template().render(
        rows=rows,
        results=results,
        tables=tables,
        experiments=experiments,
        sections=sections,
        validations=validations,
        histograms=histograms,
        training=_training_numbers(data / "metrics"),
        sources=SOURCES,
    )
    for picture in [*experiments, *itertools.chain(*sections.values()), *histograms.values()]:
        write_atomically(out / f"{picture.name}.png", figure_png(picture.figure))
    write_atomically(out / "results.md", results_markdown(rows, tables, experiments))
    write_atomically(out / "index.html", page)
    return out / "index.html"


def results_markdown(rows: Sequence[Row], tables: Sequence[Table], experiments: Sequence[Picture]) -> str:
    """The tables and figures beside the paper's, as a text to commit; the figures are files beside it."""
    commits = sorted({result.git_commit[:10] for row in rows for result in row.results if result.git_commit})
    header = (
        "Written by the stage `report` (`python -m pipelines.stages.report`) from the files under `data/metrics`, not by hand. "
        f"The evaluations ran at commit {', '.join(commits) or 'unknown'}. Scores are D4RL's normalised ones, 0 a random "
        "policy and 100 an expert, of undiscounted returns. Each line says where its data comes from. The paper is "
        "Jiang et al., *Efficient Planning in a Compact Latent Action Space*, ICLR 2023; its numbers are of D4RL's own data."
    )
    figures = [f"### {each.title}\n\n![{each.alt}]({each.name}.png)\n\n{each.caption}\n" for each in experiments]
    parts = ["# Results\n", header + "\n", *map(markdown, [protocol_table(rows), *tables]), *figures]
    return "\n".join(parts)


def _training_numbers(metrics: Path) -> dict[str, list[tuple[str, dict[str, float]]]]:
    """By training stage, the last numbers of each DATASET-SEED."""
    stages = {}
    for stage in ("train_vqvae", "train_prior"):
        numbers = [(path.stem, read_json(path)) for path in sorted((metrics / stage).glob("*.json"))]
        stages[stage] = [(key, {k: v for k, v in each.items() if type(v) in (int, float)}) for key, each in numbers]
    return {stage: numbers for stage, numbers in stages.items() if numbers}


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["number"] = _number
    environment.filters["score"] = lambda value: NOTHING if value is None else f"{value:.1f}"
    environment.filters["svg"] = lambda figure: Markup(figure_svg(figure))
    return environment.get_template("report.html")


def _number(value: float | None, digits: int = 4) -> str:
    if value is None:
        return NOTHING
    return f"{value:,}" if isinstance(value, int) else f"{value:,.{digits}g}"
