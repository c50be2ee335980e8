"""The report: results, curves and validations of all runs, on one page that needs no network.

What the stages wrote under data/ goes in (metrics/, plots/, raw/*/validation.json); what comes out is one HTML file with
its figures inside, and the same figures as PNG files for slides. Equal inputs give equal bytes.

Honest numbers are this module's business:
- a mean comes with its standard error, and with what the error is over: seeds, or episodes where there is one seed only;
- runs that differ in data, scale, simulator, planner or evaluation seeds never share a line;
- the paper's number stands beside a result only where the dataset is the paper's own.
"""

import csv
import io
import itertools
import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, PercentFormatter, StrMethodFormatter
from pydantic import BaseModel, ConfigDict, ValidationError

from tap.files import read_json, write_atomically

Curves = dict[str, np.ndarray]  # one array a column; NaN where a row has no value
Validation = dict[str, Any]

SOURCES = {
    "d4rl": "original D4RL",
    "file": "your own file",
    "recollected": "recollected, not D4RL's data",
    "bundled": "bundled, not D4RL's data",
}
PAPER_SOURCES = ("d4rl", "file")  # under the paper's own dataset id, these can hold the paper's own data
NOTHING = "\N{EN DASH}"
SIMULATORS = ("gymnasium", "gymnasium-robotics", "mujoco")

# Okabe and Ito's colours, told apart by colour-blind readers. In the page, CSS puts its own light or dark ones in their place.
INK, MUTED, GRID, DATASET, TAP, OTHER = "#1c2128", "#5b6470", "#dce0e5", "#a3acb8", "#0072b2", "#d55e00"
THEME = {INK: "--ink", MUTED: "--muted", GRID: "--grid", DATASET: "--dataset", TAP: "--tap", OTHER: "--other"}
STYLE: Any = {
    "figure.figsize": (4.6, 4.0),
    "figure.constrained_layout.use": True,
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.linewidth": 0.8,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "legend.frameon": False,
    "lines.linewidth": 1.3,
    "savefig.dpi": 200,
    "svg.fonttype": "none",
    "svg.hashsalt": "tap",
}


# ---------------------------------------------------------------- results


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
    runs: dict[str, str | None]
    git_commit: str | None
    ablation: str | None = None

    @property
    def simulator(self) -> str:
        """The versions that the physics depends on."""
        return ", ".join(f"{name} {self.versions[name]}" for name in SIMULATORS if name in self.versions)

    @property
    def experiment(self) -> tuple[object, ...]:
        """What two results must share for their seeds to be averaged, the planner aside."""
        data = (self.dataset, self.source, self.digest, self.scale)
        return (*data, self.environment, self.simulator, self.environment_seed, self.episodes)


def load_results(folder: Path) -> list[Result]:
    """All results under `folder`/evaluate and `folder`/ablations, by dataset, ablation and seed.

    Raises ValueError where there is no evaluation, and names the file that is no result.
    """
    results = []
    for path in [*folder.glob("evaluate/*.json"), *folder.glob("ablations/*.json")]:
        try:
            results.append(Result.model_validate(read_json(path)))
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
            raise ValueError(f"{path} is no result ({problems}): run its stage again with `dvc repro --force`") from None
    if all(result.ablation for result in results):
        raise ValueError(f"{folder / 'evaluate'} holds no results: run `dvc repro evaluate` first")
    return sorted(results, key=lambda result: (result.dataset, result.ablation or "", result.seed))


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
    def score(self) -> Estimate:
        """Mean over seeds; over the episodes of the only seed where there is one."""
        if len(self.results) == 1:
            if self.first.normalized_score is None:
                return mean_and_standard_error(self.first.returns)
            return Estimate(self.first.normalized_score, self.first.normalized_score_standard_error)
        scores = [result.normalized_score for result in self.results if result.normalized_score is not None]
        return mean_and_standard_error(scores if self.normalized else [statistics.fmean(each.returns) for each in self.results])

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

    def ablation(self, name: str) -> "Row | None":
        """The row of the ablation called `name`, if it was run."""
        return next((row for row in self.ablations if row.first.ablation == name), None)


def table_rows(results: Sequence[Result]) -> list[Row]:
    """The results table: one row an experiment and planner, in the order of `results`, each with its ablations."""

    def grouped(some: Sequence[Result]) -> list[tuple[Result, ...]]:
        groups: dict[tuple[object, ...], list[Result]] = {}
        for result in some:
            key = (*result.experiment, result.ablation, json.dumps(result.planner, sort_keys=True))
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
    with Path(__file__).with_name("paper_scores.csv").open(newline="") as file:
        return {
            line["method"]: Estimate(float(line["score"]), float(line["standard_error"]) if line["standard_error"] else None)
            for line in csv.DictReader(file)
            if line["dataset"] == dataset
        }


# ---------------------------------------------------------------- figures


def read_curves(path: Path) -> Curves:
    """The columns of a training curve file. Raises ValueError where it holds no table of numbers."""
    try:
        with path.open(newline="") as file:
            header, *lines = csv.reader(file)
        columns = np.array([[float(cell or "nan") for cell in line] for line in lines]).T
        return dict(zip(header, columns, strict=True))
    except ValueError:
        raise ValueError(f"{path} is no table of numbers: run its stage again with `dvc repro --force`") from None


def score_figure(results: Sequence[Result], validation: Validation | None) -> Figure:
    """Return of each evaluated episode, one line a seed, above the histogram of the dataset's own returns (same axis)."""
    with rc_context(STYLE):
        figure = Figure()
        rows = 2 if validation else 1
        axes = figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0]
        episodes = axes[0]
        for place, result in enumerate(results):
            places = [place] * len(result.returns)
            episodes.plot(result.returns, places, "o", color=TAP, alpha=0.55, markeredgewidth=0, markersize=6)
            bar = min(22, 80 / len(results))
            episodes.plot(statistics.fmean(result.returns), place, "|", color=INK, markersize=bar, markeredgewidth=2)
        episodes.set(ylim=(len(results) - 0.4, -0.6), yticks=range(len(results)))
        episodes.set_yticklabels([f"seed {result.seed}" for result in results])
        episodes.grid(axis="y", visible=False)
        episodes.set_title("TAP: each episode, and the mean of its seed")
        if validation:
            mean = statistics.fmean(value for result in results for value in result.returns)
            axes[1].axvline(mean, color=TAP, linewidth=1.6)
            _draw_returns(axes[1], validation)
        axes[-1].set_xlabel("episode return (sum of rewards, undiscounted)")
        return figure


def returns_figure(validation: Validation) -> Figure:
    """Histogram of the dataset's episode returns."""
    with rc_context(STYLE):
        figure = Figure(figsize=(4.6, 2.4))
        axes = figure.subplots()
        _draw_returns(axes, validation)
        axes.set_xlabel("episode return (sum of rewards, undiscounted)")
        return figure


def _draw_returns(axes: Axes, validation: Validation) -> None:
    histogram, mean = validation["return_histogram"], validation["return"]["mean"]
    axes.stairs(histogram["counts"], histogram["edges"], fill=True, color=DATASET)
    axes.axvline(mean, color=INK, linestyle="--", linewidth=1)
    axes.set_title(f"Dataset: {validation['episodes']:,} episodes, mean {mean:,.4g} (dashed)")
    axes.set_ylabel("episodes")
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))


def loss_figure(vqvae: Sequence[Curves], prior: Sequence[Curves]) -> Figure:
    """Training and held-out loss of both models against updates, one pair of lines a seed."""
    panels = [
        (curves, title, label)
        for curves, title, label in (
            (vqvae, "VQ-VAE: reconstruction and commitment", "loss (log scale)"),
            (prior, "Prior: cross-entropy of the next code", "loss (nats a code)"),
        )
        if curves
    ]
    with rc_context(STYLE):
        figure = Figure()
        for axes, (curves, title, label) in zip(figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True):
            for seed, each in enumerate(curves):
                axes.plot(each["step"], each["loss"], color=TAP, alpha=0.6, linewidth=1, label="training" if not seed else None)
                if "held_out_loss" in each:
                    known = np.isfinite(each["held_out_loss"])
                    held_out = each["step"][known], each["held_out_loss"][known]
                    axes.plot(*held_out, color=OTHER, label="held out" if not seed else None)
            if "log" in label:
                axes.set_yscale("log")
                axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
                axes.yaxis.set_minor_locator(NullLocator())
            axes.set_title(title)
            axes.set_ylabel(label)
            axes.legend(loc="upper right", ncols=2, handlelength=1.4)
        axes.set_xlabel("updates")
        return figure


def codebook_figure(vqvae: Sequence[Curves]) -> Figure:
    """Share of codes in use and perplexity of the codebook against updates, one line a seed."""
    with rc_context(STYLE):
        figure = Figure()
        usage, perplexity = figure.subplots(2, 1, sharex=True)
        for each in vqvae:
            usage.plot(each["step"], each["codebook_usage"], color=TAP, alpha=0.8)
            perplexity.plot(each["step"], each["codebook_perplexity"], color=TAP, alpha=0.8)
        usage.set_title("Codes in use")
        usage.set(ylabel="share of the codebook", ylim=(0, 1.05))
        usage.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        perplexity.set_title("Perplexity: effective number of codes")
        perplexity.set(xlabel="updates", ylabel="codes")
        perplexity.set_ylim(bottom=0)
        return figure


def plan_figure(examples: Sequence[Mapping[str, Any]]) -> Figure:
    """Decoded plans against the simulator that followed the plans' actions, one column an example.

    Rows: the three observation dimensions that moved most in the simulator, then the reward.
    """
    simulated = np.asarray(examples[0]["simulated"]["observations"])
    dims = sorted(np.argsort(-simulated.std(axis=0), kind="stable")[:3].tolist())
    dashed = {"color": TAP, "linestyle": "--", "marker": ".", "markersize": 4}
    styles: dict[str, dict[str, Any]] = {"simulated": {"color": INK}, "planned": dashed}
    with rc_context(STYLE):
        figure = Figure()
        grid = figure.subplots(len(dims) + 1, len(examples), sharex="col", squeeze=False)
        for column, example in zip(grid.T, examples, strict=True):
            for row, axes in enumerate(column):
                for who, style in styles.items():
                    part = example[who]
                    values = np.asarray(part["observations"])[:, dims[row]] if row < len(dims) else part["rewards"]
                    axes.plot(values, label=who, **style)
                axes.yaxis.set_major_locator(MaxNLocator(3))
            column[0].set_title(example["title"])
            column[-1].xaxis.set_major_locator(MaxNLocator(6, integer=True))
            column[-1].set_xlabel("steps ahead")
        for row, axes in enumerate(grid[:, 0]):
            axes.set_ylabel(f"obs. {dims[row]}" if row < len(dims) else "reward")
        figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside upper right", ncols=2, handlelength=2)
        figure.align_ylabels(grid[:, 0])
        return figure


def figure_png(figure: Figure) -> bytes:
    """The figure as PNG, without a date or a program's name in it."""
    with rc_context(STYLE), io.BytesIO() as file:
        figure.savefig(file, format="png", metadata={"Software": None})
        return file.getvalue()


def figure_svg(figure: Figure) -> str:
    """The figure as an SVG element for a page whose CSS defines the variables named in THEME."""
    with rc_context(STYLE | {"savefig.transparent": True}), io.StringIO() as file:
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
        svg = file.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*">', "<g>", svg)  # they repeat from figure to figure, and nothing refers to them
    for colour, variable in THEME.items():
        svg = svg.replace(colour, f"var({variable})")
    return svg


# ---------------------------------------------------------------- the page


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
