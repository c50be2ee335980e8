"""Figures of results, training and plans, as SVG for a page with light and dark colours and as PNG for slides."""

import base64
import csv
import io
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
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
from tap.reporting.results import Result, Row, read_paper
from tap.reporting.tables import Column, Comparison, Study, column_means

Curves = dict[str, np.ndarray]  # one array a column; NaN where a row has no value
Validation = dict[str, Any]

# Okabe and Ito's colours, told apart by colour-blind readers. In the page, CSS puts its own light or dark ones in their place.
INK, MUTED, GRID, DATASET, TAP, OTHER = "#1c2128", "#5b6470", "#dce0e5", "#a3acb8", "#0072b2", "#d55e00"
THEME = {INK: "--ink", MUTED: "--muted", GRID: "--grid", DATASET: "--dataset", TAP: "--tap", OTHER: "--other"}
FEW_TO_MANY = LinearSegmentedColormap.from_list("few to many", [DATASET, TAP])
SEARCHES = {
    "uniform": "Uniform over the codebook",
    "prior": "From the prior",
    "prior_sampling": "Sampling",
    "beam": "Beam search",
}
SMALLEST_ERROR = 1e-12  # a plan that the simulator follows exactly has none on a logarithmic axis
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


def ablation_figure(panels: Sequence[tuple[Study, Sequence[Column], Sequence[Comparison]]]) -> Figure:
    """The paper's ablation bars, one panel a study: mean over its datasets, ours beside the paper's on D4RL's own data."""
    with rc_context(STYLE):
        figure = Figure(figsize=(9.4, 2.5 * ((len(panels) + 1) // 2)))
        grid = figure.subplots((len(panels) + 1) // 2, 2, squeeze=False).flat
        for (study, columns, comparisons), axes in zip(panels, grid, strict=False):
            ours, paper = column_means(comparisons)
            places = np.arange(len(columns))
            published = np.array([np.nan if mean is None else mean for mean in paper])
            errors = [mean.standard_error or 0.0 for mean in ours]
            error_style = {"ecolor": INK, "elinewidth": 1}
            axes.bar(places - 0.2, [mean.mean for mean in ours], 0.38, color=TAP, yerr=errors, error_kw=error_style)
            axes.bar(places + 0.2, published, 0.38, color=DATASET)
            axes.set_xticks(places, [column.label.replace(", ", ",\n") for column in columns])
            axes.grid(axis="x", visible=False)
            names = [each.base.first.dataset for each in comparisons]
            axes.set_title(f"{study.title}\n({names[0] if len(names) == 1 else f'mean of {len(names)} datasets'})")
            axes.set_ylabel("normalised score")
        for axes in grid:  # a panel too many in the last row
            axes.set_axis_off()
        handles = [Rectangle((0, 0), 1, 1, color=colour) for colour in (TAP, DATASET)]
        labels = ["this run", "the paper, on D4RL's own data"]
        figure.legend(handles, labels, loc="outside upper right", ncols=2, handlelength=1)
        return figure


LatentSteps = Sequence[tuple[int, Sequence[Row]]]  # by latent step, the rows of the same datasets


def latent_step_figure(conditional: LatentSteps, unconditional: LatentSteps) -> Figure:
    """The paper's scores, search values and state errors against L, with and without a state-conditional decoder."""
    measures: dict[str, Callable[[Row], float | None]] = {
        "normalised score": lambda row: row.score.mean,
        "search value": lambda row: row.search_value,
        "state error": lambda row: row.state_prediction_error,
    }
    with rc_context(STYLE):
        figure = Figure(figsize=(9.4, 2.8))
        for axes, (name, measure) in zip(figure.subplots(1, 3), measures.items(), strict=True):
            for steps, label, colour, form in (
                (conditional, "conditional decoder", TAP, "o-"),
                (unconditional, "unconditional decoder", OTHER, "s--"),
            ):
                known = [(L, [measure(row) for row in rows]) for L, rows in steps]
                means = [(L, statistics.fmean(v for v in values if v is not None)) for L, values in known if None not in values]
                axes.plot([L for L, _ in means], [mean for _, mean in means], form, color=colour, markersize=5, label=label)
            axes.set_title(name.capitalize())
            axes.set(xlabel="latent step L", ylabel=name)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper right", ncols=2)
        return figure


def relative_figure(points: Mapping[str, Sequence[tuple[int, float, float]]]) -> Figure:
    """Our score over baselines' against the action's dimensions, a panel a baseline, beside what the paper's TAP has.

    `points` are (dimensions, our ratio, the paper's ratio) by baseline.
    """
    with rc_context(STYLE):
        figure = Figure(figsize=(2.3 * len(points) + 0.6, 2.8))
        panels = figure.subplots(1, len(points), sharey=True, squeeze=False)[0]
        for axes, (method, some) in zip(panels, points.items(), strict=True):
            dims, ours, papers = zip(*some, strict=True)
            axes.axhline(1, color=OTHER, linewidth=1)
            axes.plot(dims, papers, "D:", color=MUTED, markerfacecolor="none", label="the paper's TAP")
            axes.plot(dims, ours, "o-", color=TAP, label="TAP, this run")
            axes.set_title(f"relative to {method}")
            axes.set(xlabel="action dimensions")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        panels[0].set(ylabel="mean score / the baseline's")
        panels[0].set_ylim(bottom=min(0, *panels[0].get_ylim()))
        panels[-1].legend()
        return figure


def dimension_latency_figure(rows: Sequence[tuple[int, Row]]) -> Figure:
    """Seconds a decision against D = S + A + 2, beside what the paper says of TT and TAP on its own machine."""
    with rc_context(STYLE):
        figure = Figure(figsize=(4.6, 2.8))
        axes = figure.subplots()
        axes.plot([dim for dim, _ in rows], [row.latency.median / 1000 for _, row in rows], "o", color=TAP, label="this run")
        for method, colour, marker, label in (
            ("TT", OTHER, "s", "TT, as the paper measured"),
            ("TAP", MUTED, "v", "TAP in the paper: at most"),
        ):
            lines = [line for line in read_paper("latency") if line["method"] == method and line["horizon"] == "15"]
            places = [int(line["dimension"]) for line in lines]
            axes.plot(places, [float(line["seconds"]) for line in lines], marker, color=colour, label=label, linestyle=":")
        axes.set_yscale("log")
        axes.set_title("Decision time against dimensions")
        axes.set(xlabel="dimensions of a step, D = S + A + 2", ylabel="seconds (log scale)")
        axes.legend()
        return figure


def horizon_latency_figure(datasets: Mapping[str, Sequence[tuple[int, Row]]]) -> Figure:
    """Seconds a decision against the planning horizon, a line a dataset, beside the paper's longest plan."""
    with rc_context(STYLE):
        figure = Figure(figsize=(4.6, 2.8))
        axes = figure.subplots()
        for number, (dataset, rows) in enumerate(datasets.items()):
            seconds = [row.latency.median / 1000 for _, row in rows]
            form = "o" + ("-", "--", ":", "-.")[number % 4]
            axes.plot([horizon for horizon, _ in rows], seconds, form, color=TAP, markersize=4, label=dataset)
        (longest,) = (line for line in read_paper("latency") if line["horizon"] != "15")
        axes.plot(int(longest["horizon"]), float(longest["seconds"]), "v", color=MUTED, label="TAP in the paper: at most")
        axes.set_ylim(bottom=0)
        axes.set_title("Decision time against the planning horizon")
        axes.set(xlabel="steps planned ahead", ylabel="seconds")
        axes.legend()
        return figure


def mazes_figure(paths: Mapping[str, Sequence[np.ndarray]]) -> Figure:
    """Some of MAZES side by side as in the paper, with the positions (T, 2) of trajectories drawn over each, in metres."""
    columns = [len(MAZES[name].rows[0]) for name in paths]
    with rc_context(STYLE):
        height = 0.24 * max(len(MAZES[name].rows) for name in paths) + 0.7
        figure = Figure(figsize=(max(0.24 * sum(columns) + 0.3 * len(columns), 2.4), height))
        grid = figure.subplots(1, len(paths), squeeze=False, width_ratios=columns)[0]
        for axes, (name, drawn) in zip(grid, paths.items(), strict=True):
            _draw_maze(axes, MAZES[name], drawn)
            axes.set_title(name)
        handles, labels = grid[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), handlelength=1.2)
        return figure


def _draw_maze(axes: Axes, maze: Maze, paths: Sequence[np.ndarray]) -> None:
    (left, bottom), (right, top) = maze.centre((0, 0)), maze.centre((len(maze.rows) - 1, len(maze.rows[0]) - 1))
    half = CELL_SIZE / 2
    _draw_walls(axes, [maze.centre(cell).tolist() for cell in maze.walls])
    for path in paths:
        axes.plot(*path.T, color=TAP, alpha=0.7, linewidth=0.8)
    axes.plot(*maze.centre(maze.start), "o", color=INK, markersize=5, label="start")
    axes.plot(*maze.centre(maze.goal), "*", color=OTHER, markersize=9, label="goal")
    axes.set(xlim=(left - half, right + half), ylim=(bottom - half, top + half), aspect="equal", xticks=[], yticks=[])
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)


def _draw_walls(axes: Axes, centres: Sequence[Sequence[float]]) -> None:
    """Wall cells of a maze, without a say in what the axes show."""
    for x, y in centres:
        corner = (x - CELL_SIZE / 2, y - CELL_SIZE / 2)
        axes.add_artist(Rectangle(corner, CELL_SIZE, CELL_SIZE, color=DATASET, linewidth=0))


def distribution_figure(distributions: Mapping[str, Mapping[str, Sequence[float]]]) -> Figure:
    """Predicted return of drawn plans against the error of their states, one panel a distribution, bluer where more fall."""
    returns, errors = (
        np.concatenate([drawn[key] for drawn in distributions.values()])
        for key in ("predicted_returns", "state_prediction_errors")
    )
    extent = (*_wide(returns), *_wide(np.log10(errors.clip(min=SMALLEST_ERROR))))
    with rc_context(STYLE):
        figure = Figure(figsize=(4.6, 2.9))
        panels = figure.subplots(1, len(distributions), sharex=True, sharey=True, squeeze=False)[0]
        for axes, (name, drawn) in zip(panels, distributions.items(), strict=True):
            x, y = drawn["predicted_returns"], np.clip(drawn["state_prediction_errors"], SMALLEST_ERROR, None)
            shape: dict[str, Any] = {"extent": extent, "gridsize": 28, "mincnt": 1, "linewidths": 0}
            axes.hexbin(x, y, yscale="log", bins="log", cmap=FEW_TO_MANY, **shape)
            axes.axhline(np.median(y), color=INK, linestyle="--", linewidth=1)
            axes.set_title(f"{SEARCHES[name]}\nmedian error {np.median(y):.2g} (dashed)")
            axes.xaxis.set_major_locator(MaxNLocator(4))
            axes.set_xlabel("predicted return")
        panels[0].set_ylabel("state prediction error")
        return figure


def _wide(values: np.ndarray) -> tuple[float, float]:
    """Least and largest value, apart from each other."""
    low, high = float(values.min()), float(values.max())
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def candidates_figure(plans: Sequence[Mapping[str, Any]]) -> Figure:
    """The plans that each search chooses from, in two observation dimensions: a column a search, a row a state.

    Colour tells the rank of a plan's objective among both searches' plans. Pictures of the simulator stand below their panel.
    """
    searches = list(plans[0]["searches"])
    heights = [height for each in plans for height in ([1.0, 0.3] if each["frames"] else [1.0])]
    with rc_context(STYLE):
        figure = Figure(figsize=(4.6, 0.4 + 2.1 * sum(heights)))
        grid = figure.subplots(len(heights), len(searches), squeeze=False, gridspec_kw={"height_ratios": heights})
        rows = iter(grid)
        for each in plans:
            panels = next(rows)
            everything = np.concatenate([each["searches"][search]["scores"] for search in searches])
            for axes, search in zip(panels, searches, strict=True):
                _draw_walls(axes, each["walls"])
                _draw_candidates(axes, each["searches"][search], np.sort(everything))
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


def _draw_candidates(axes: Axes, drawn: Mapping[str, Any], sorted_scores: np.ndarray) -> None:
    observations, order = np.asarray(drawn["observations"]), np.argsort(drawn["scores"])
    ranks = np.searchsorted(sorted_scores, np.asarray(drawn["scores"])[order]) / len(sorted_scores)
    lines = LineCollection(list(observations[order]), array=ranks, cmap=FEW_TO_MANY, linewidths=0.6, alpha=0.6, rasterized=True)
    lines.set_clim(0, 1)
    axes.add_collection(lines)
    axes.plot(*observations[drawn["chosen"]].T, color=OTHER, marker=".", markersize=4, label="chosen plan")
    axes.plot(*np.asarray(drawn["simulated"]).T, color=INK, linestyle="--", label="simulated")


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
