"""Figures of results, training and plans, as SVG for a page with light and dark colours and as PNG for slides."""

import csv
import io
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, PercentFormatter, StrMethodFormatter

from tap.results import Result

Curves = dict[str, np.ndarray]  # one array a column; NaN where a row has no value
Validation = dict[str, Any]

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
