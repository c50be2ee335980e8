"""The paper's figures over all datasets: ablations, action dimensions, decision time."""

import statistics
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from tap.reporting.paper import read_paper
from tap.reporting.rows import Row
from tap.reporting.studies import Column, Comparison, Study, column_means
from tap.reporting.style import DATASET, INK, MUTED, OTHER, STYLE, TAP


def ablation_figure(panels: Sequence[tuple[Study, Sequence[Column], Sequence[Comparison]]]) -> Figure:
    """Bars of the paper's ablations, one panel per study: mean over its datasets, ours and the paper's on D4RL's own data."""
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
        for axes in grid:  # an unused panel in the last row
            axes.set_axis_off()
        handles = [Rectangle((0, 0), 1, 1, color=colour) for colour in (TAP, DATASET)]
        labels = ["this run", "the paper, on D4RL's own data"]
        figure.legend(handles, labels, loc="outside upper right", ncols=2, handlelength=1)
        return figure


LatentSteps = Sequence[tuple[int, Sequence[Row]]]  # by latent step, the rows of the same datasets


def latent_step_figure(conditional: LatentSteps, unconditional: LatentSteps) -> Figure:
    """Scores, predicted returns and state errors against L, with and without a state-conditional decoder, as in the paper."""
    measures: dict[str, Callable[[Row], float | None]] = {
        "normalised score": lambda row: row.score.mean,
        "predicted return": lambda row: row.search_value,
        "state error": lambda row: row.state_prediction_error,
    }
    with rc_context(STYLE):
        figure = Figure(figsize=(9.4, 2.8))
        for axes, (name, measure) in zip(figure.subplots(1, 3), measures.items(), strict=True):
            for steps, label, colour, form in (
                (conditional, "conditional decoder", TAP, "o-"),
                (unconditional, "unconditional decoder", OTHER, "s--"),
            ):
                means = [statistics.fmean(value for row in rows if (value := measure(row)) is not None) for _, rows in steps]
                axes.plot([L for L, _ in steps], means, form, color=colour, markersize=5, label=label)
            axes.set_title(name.capitalize())
            axes.set(xlabel="latent step L", ylabel=name)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper right", ncols=2)
        return figure


def relative_figure(points: Mapping[str, Sequence[tuple[int, float, float]]]) -> Figure:
    """Ratio of our score to a baseline's against action dimensions, one panel per baseline, with the ratio of the paper's TAP.

    `points` are (dimensions, our ratio, the paper's ratio) by baseline.
    """
    with rc_context(STYLE):
        figure = Figure(figsize=(2.3 * len(points) + 0.6, 2.8))
        panels = figure.subplots(1, len(points), sharey=True, squeeze=False)[0]
        for axes, (method, ratios) in zip(panels, points.items(), strict=True):
            dims, ours, papers = zip(*ratios, strict=True)
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
    """Seconds per decision against D = S + A + 2, with the paper's times of TT and TAP on its machine."""
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
    """Seconds per decision against the planning horizon, one line per dataset, with the paper's longest plan."""
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
