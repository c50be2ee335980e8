"""Figures of one dataset: scores, training curves, plans, and mazes."""

import base64
import csv
import io
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.patches import Rectangle
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, PercentFormatter, StrMethodFormatter

from tap.envs.mazes import CELL_SIZE, MAZES, Maze
from tap.reporting.style import DATASET, INK, OTHER, STYLE, TAP
from tap.results import Evaluation, ValidationReport

Curves = dict[str, np.ndarray]  # one array per column; NaN if a row has no value

FEW_TO_MANY = LinearSegmentedColormap.from_list("few to many", [DATASET, TAP])
SEARCHES = {
    "uniform": "Uniform over the codebook",
    "prior": "From the prior",
    "prior_sampling": "Sampling",
    "beam": "Beam search",
}
SMALLEST_ERROR = 1e-12  # an error of zero has no place on a logarithmic axis


def read_curves(path: Path) -> Curves:
    """The columns of a file of training curves. Raises ValueError if it is not a table of numbers."""
    try:
        with path.open(newline="") as file:
            header, *lines = csv.reader(file)
        columns = np.array([[float(cell or "nan") for cell in line] for line in lines]).T
        return dict(zip(header, columns, strict=True))
    except ValueError:
        raise ValueError(f"{path} is not a table of numbers: run its stage again with `dvc repro --force`") from None


def score_figure(evaluations: Sequence[Evaluation], validation: ValidationReport | None) -> Figure:
    """Return of each evaluated episode, one line per seed, above the histogram of the dataset's returns, on the same axis."""
    with rc_context(STYLE):
        figure = Figure()
        rows = 2 if validation else 1
        axes = figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0]
        episodes = axes[0]
        bar = min(22, 80 / len(evaluations))
        for place, each in enumerate(evaluations):
            places = [place] * len(each.returns)
            episodes.plot(each.returns, places, "o", color=TAP, alpha=0.55, markeredgewidth=0, markersize=6)
            episodes.plot(statistics.fmean(each.returns), place, "|", color=INK, markersize=bar, markeredgewidth=2)
        episodes.set(ylim=(len(evaluations) - 0.4, -0.6), yticks=range(len(evaluations)))
        episodes.set_yticklabels([f"seed {each.seed}" for each in evaluations])
        episodes.grid(axis="y", visible=False)
        episodes.set_title("TAP: each episode, and the mean of its seed")
        if validation:
            mean = statistics.fmean(value for each in evaluations for value in each.returns)
            axes[1].axvline(mean, color=TAP, linewidth=1.6)
            _plot_returns(axes[1], validation)
        axes[-1].set_xlabel("episode return (sum of rewards, undiscounted)")
        return figure


def returns_figure(validation: ValidationReport) -> Figure:
    """Histogram of the dataset's episode returns."""
    with rc_context(STYLE):
        figure = Figure(figsize=(4.6, 2.4))
        axes = figure.subplots()
        _plot_returns(axes, validation)
        axes.set_xlabel("episode return (sum of rewards, undiscounted)")
        return figure


def _plot_returns(axes: Axes, validation: ValidationReport) -> None:
    histogram, mean = validation.return_histogram, validation.episode_return.mean
    axes.stairs(histogram.counts, histogram.edges, fill=True, color=DATASET)
    axes.axvline(mean, color=INK, linestyle="--", linewidth=1)
    axes.set_title(f"Dataset: {validation.episodes:,} episodes, mean {mean:,.4g} (dashed)")
    axes.set_ylabel("episodes")
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))


def loss_figure(vqvae: Sequence[Curves], prior: Sequence[Curves], critic: Sequence[Curves], actor: Sequence[Curves]) -> Figure:
    """Training and held-out loss of each model against updates, one pair of lines per seed."""
    panels = {
        ("VQ-VAE: reconstruction and commitment", "loss (log scale)"): vqvae,
        ("Prior: cross-entropy of the next code", "loss (nats per code)"): prior,
        ("Critic: squared error of normalised returns", "loss (log scale)"): critic,
        ("Actor: Huber's loss of normalised actions", "loss (log scale)"): actor,
    }
    panels = {words: curves for words, curves in panels.items() if curves}
    with rc_context(STYLE):
        figure = Figure(figsize=(STYLE["figure.figsize"][0], 2.2 * len(panels) + 0.4))
        for axes, ((title, label), curves) in zip(
            figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels.items(), strict=True
        ):
            _plot_losses(axes, curves)
            axes.set_title(title)
            axes.set_ylabel(label)
            if "log" in label:
                axes.set_yscale("log")
                axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
                axes.yaxis.set_minor_locator(NullLocator())
            axes.legend(loc="upper right", ncols=2, handlelength=1.4)
        axes.set_xlabel("updates")
        return figure


def _plot_losses(axes: Axes, curves: Sequence[Curves]) -> None:
    for place, each in enumerate(curves):
        training, held_out = (None, None) if place else ("training", "held out")  # one entry each in the legend
        axes.plot(each["step"], each["loss"], color=TAP, alpha=0.6, linewidth=1, label=training)
        if "held_out_loss" in each:
            measured = np.isfinite(each["held_out_loss"])
            axes.plot(each["step"][measured], each["held_out_loss"][measured], color=OTHER, label=held_out)


def codebook_figure(vqvae: Sequence[Curves]) -> Figure:
    """Share of codes in use and perplexity of the codebook against updates, one line per seed."""
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
    """Decoded plans against the simulator that executed the plans' actions, one column per example.

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
                for label, style in styles.items():
                    part = example[label]
                    values = np.asarray(part["observations"])[:, dims[row]] if row < len(dims) else part["rewards"]
                    axes.plot(values, label=label, **style)
                axes.yaxis.set_major_locator(MaxNLocator(3))
            column[0].set_title(example["title"])
            column[-1].xaxis.set_major_locator(MaxNLocator(6, integer=True))
            column[-1].set_xlabel("steps ahead")
        for row, axes in enumerate(grid[:, 0]):
            axes.set_ylabel(f"obs. {dims[row]}" if row < len(dims) else "reward")
        figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside upper right", ncols=2, handlelength=2)
        figure.align_ylabels(grid[:, 0])
        return figure


def mazes_figure(paths: Mapping[str, Sequence[np.ndarray]]) -> Figure:
    """Some of MAZES side by side as in the paper, with the positions (T, 2) of trajectories plotted over each, in metres."""
    columns = [len(MAZES[name].rows[0]) for name in paths]
    with rc_context(STYLE):
        height = 0.24 * max(len(MAZES[name].rows) for name in paths) + 0.7
        figure = Figure(figsize=(max(0.24 * sum(columns) + 0.3 * len(columns), 2.4), height))
        grid = figure.subplots(1, len(paths), squeeze=False, width_ratios=columns)[0]
        for axes, (name, trajectories) in zip(grid, paths.items(), strict=True):
            _plot_maze(axes, MAZES[name], trajectories)
            axes.set_title(name)
        handles, labels = grid[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), handlelength=1.2)
        return figure


def _plot_maze(axes: Axes, maze: Maze, paths: Sequence[np.ndarray]) -> None:
    (left, bottom), (right, top) = maze.centre((0, 0)), maze.centre((len(maze.rows) - 1, len(maze.rows[0]) - 1))
    half = CELL_SIZE / 2
    _plot_walls(axes, [maze.centre(cell).tolist() for cell in maze.walls])
    for path in paths:
        axes.plot(*path.T, color=TAP, alpha=0.7, linewidth=0.8)
    axes.plot(*maze.centre(maze.start), "o", color=INK, markersize=5, label="start")
    axes.plot(*maze.centre(maze.goal), "*", color=OTHER, markersize=9, label="goal")
    axes.set(xlim=(left - half, right + half), ylim=(bottom - half, top + half), aspect="equal", xticks=[], yticks=[])
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)


def _plot_walls(axes: Axes, centres: Sequence[Sequence[float]]) -> None:
    """Wall cells of a maze. Artists, unlike patches, leave the limits of the axes as they are."""
    for x, y in centres:
        corner = (x - CELL_SIZE / 2, y - CELL_SIZE / 2)
        axes.add_artist(Rectangle(corner, CELL_SIZE, CELL_SIZE, color=DATASET, linewidth=0))


def distribution_figure(distributions: Mapping[str, Mapping[str, Sequence[float]]]) -> Figure:
    """Predicted return of sampled plans against the error of their states, one panel per distribution, bluer for more plans."""
    returns, errors = (
        np.concatenate([plans[key] for plans in distributions.values()])
        for key in ("predicted_returns", "state_prediction_errors")
    )
    extent = (*_range(returns), *_range(np.log10(errors.clip(min=SMALLEST_ERROR))))
    with rc_context(STYLE):
        figure = Figure(figsize=(4.6, 2.9))
        panels = figure.subplots(1, len(distributions), sharex=True, sharey=True, squeeze=False)[0]
        for axes, (name, plans) in zip(panels, distributions.items(), strict=True):
            x, y = plans["predicted_returns"], np.clip(plans["state_prediction_errors"], SMALLEST_ERROR, None)
            shape: dict[str, Any] = {"extent": extent, "gridsize": 28, "mincnt": 1, "linewidths": 0}
            axes.hexbin(x, y, yscale="log", bins="log", cmap=FEW_TO_MANY, **shape)
            axes.axhline(np.median(y), color=INK, linestyle="--", linewidth=1)
            axes.set_title(f"{SEARCHES[name]}\nmedian error {np.median(y):.2g} (dashed)")
            axes.xaxis.set_major_locator(MaxNLocator(4))
            axes.set_xlabel("predicted return")
        panels[0].set_ylabel("state error")
        return figure


def _range(values: np.ndarray) -> tuple[float, float]:
    """Min and max, widened if they are equal."""
    low, high = float(values.min()), float(values.max())
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def candidates_figure(plans: Sequence[Mapping[str, Any]]) -> Figure:
    """The plans that each search chooses from, in two observation dimensions: one column per search, one row per state.

    Colour is the rank of a plan's score among both searches' plans. Pictures of the simulator are below their panel.
    """
    searches = list(plans[0]["searches"])
    heights = [height for each in plans for height in ([1.0, 0.3] if each["frames"] else [1.0])]
    with rc_context(STYLE):
        figure = Figure(figsize=(4.6, 0.4 + 2.1 * sum(heights)))
        grid = figure.subplots(len(heights), len(searches), squeeze=False, gridspec_kw={"height_ratios": heights})
        rows = iter(grid)
        for each in plans:
            panels = next(rows)
            scores = np.concatenate([each["searches"][search]["scores"] for search in searches])
            for axes, search in zip(panels, searches, strict=True):
                _plot_walls(axes, each["walls"])
                _plot_candidates(axes, each["searches"][search], np.sort(scores))
                axes.sharex(panels[0])
                axes.sharey(panels[0])
                axes.set_title(f"{SEARCHES[search]}\n{each['title']}")
                axes.set_xlabel(f"obs. {each['dimensions'][0]}")
            panels[0].set_ylabel(f"obs. {each['dimensions'][1]}")
            if each["frames"]:
                for axes, search in zip(next(rows), searches, strict=True):
                    axes.imshow(imread(io.BytesIO(base64.b64decode(each["frames"][search]))))
                    axes.set_axis_off()
        handles, labels = grid[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper right", ncols=2, handlelength=2)
        return figure


def _plot_candidates(axes: Axes, plans: Mapping[str, Any], sorted_scores: np.ndarray) -> None:
    observations, order = np.asarray(plans["observations"]), np.argsort(plans["scores"])
    ranks = np.searchsorted(sorted_scores, np.asarray(plans["scores"])[order]) / len(sorted_scores)
    lines = LineCollection(list(observations[order]), array=ranks, cmap=FEW_TO_MANY, linewidths=0.6, alpha=0.6, rasterized=True)
    lines.set_clim(0, 1)
    axes.add_collection(lines)
    axes.plot(*observations[plans["chosen"]].T, color=OTHER, marker=".", markersize=4, label="chosen plan")
    axes.plot(*np.asarray(plans["simulated"]).T, color=INK, linestyle="--", label="simulated")
