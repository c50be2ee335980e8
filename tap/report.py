"""The report: results, curves and validations of all runs, on one page that needs no network.

What the stages wrote under data/ goes in (metrics/, plots/, raw/*/validation.json); what comes out is one HTML file with
its figures inside, and the same figures as PNG files for slides. Equal inputs give equal bytes.
"""

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
from markupsafe import Markup
from matplotlib.figure import Figure

from tap.figures import (
    Validation,
    codebook_figure,
    figure_png,
    figure_svg,
    loss_figure,
    plan_figure,
    read_curves,
    returns_figure,
    score_figure,
)
from tap.files import read_json, write_atomically
from tap.results import Result, load_results, paper_scores, table_rows

SOURCES = {
    "d4rl": "original D4RL",
    "file": "your own file",
    "recollected": "recollected, not D4RL's data",
    "bundled": "bundled, not D4RL's data",
}
NOTHING = "\N{EN DASH}"


@dataclass(frozen=True)
class Picture:
    """A figure as the page shows it; `alt` says in words what it shows."""

    name: str
    title: str
    caption: str
    alt: str
    figure: Figure


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
    """Read what the stages wrote under `data`, write `out`/index.html and the PNG files; returns the page's path.

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
    page = _template().render(
        rows=rows,
        results=results,
        published={row.first.dataset: paper_scores(row.first.dataset, row.first.source) for row in rows if row.paper},
        sections=sections,
        validations=validations,
        histograms=histograms,
        training=_training_numbers(data / "metrics"),
        sources=SOURCES,
    )
    for picture in [*itertools.chain(*sections.values()), *histograms.values()]:
        write_atomically(out / f"{picture.name}.png", figure_png(picture.figure))
    write_atomically(out / "index.html", page)
    return out / "index.html"


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
