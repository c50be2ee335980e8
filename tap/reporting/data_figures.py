"""Figures of a dataset's profile: its episodes, and one small figure for each dimension."""

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tap.data.profile import DimensionStatistics
from tap.reporting.style import DATASET, INK, STYLE, TAP

BINS = 40
RASTERIZED = 1000  # more points than this are drawn as pixels, which take less space


def episodes_figure(values: np.ndarray, label: str) -> Figure:
    """Histogram of one value per episode (E,), and the values in the file's order."""
    low, high = widened(float(values.min()), float(values.max()))
    with rc_context(STYLE | {"axes.formatter.useoffset": False}):
        figure = Figure(figsize=(4.6, 3.6))
        histogram, order = figure.subplots(2, 1)
        counts, edges = np.histogram(values, BINS, (low, high))
        histogram.stairs(counts, edges, fill=True, color=DATASET)
        histogram.axvline(values.mean(), color=INK, linestyle="--", linewidth=1)
        histogram.set_title(f"mean {values.mean():,.4g} (dashed)")
        histogram.set(xlabel=label, ylabel="episodes")
        histogram.xaxis.set_major_locator(MaxNLocator(5))
        histogram.yaxis.set_major_locator(MaxNLocator(4, integer=True))
        points = {"color": TAP, "alpha": 0.5, "markeredgewidth": 0, "markersize": 3}
        order.plot(values, "o", rasterized=len(values) > RASTERIZED, **points)
        order.margins(y=0.1)
        order.set(xlabel="episode, in the file's order", ylabel=label.partition(" (")[0], xlim=(-0.5, len(values) - 0.5))
        order.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        return figure


def dimension_figure(statistics: DimensionStatistics, dim: int) -> Figure:
    """Left the histogram of a dimension's sample, from its least to its greatest value; right mean ± std of parts of the file.

    Without axes, for a line of a table that has the numbers.
    """
    with rc_context(STYLE | {"figure.constrained_layout.use": False}):
        figure = Figure(figsize=(3.2, 0.36))
        low, high = widened(float(statistics.min[dim]), float(statistics.max[dim]))
        axes = _bare_axes(figure, 0.0, 0.48)
        counts, _ = np.histogram(statistics.sample[:, dim].astype(np.float64), BINS, (low, high))
        axes.stairs(counts, fill=True, color=DATASET, clip_on=False)
        axes.set(xlim=(0, BINS), ylim=(0, 1.05 * max(counts.max(), 1)))
        axes.axhline(0, color=DATASET, linewidth=0.8, clip_on=False)
        axes = _bare_axes(figure, 0.54, 0.46)
        mean, std = statistics.part_mean[:, dim], statistics.part_std[:, dim]
        axes.fill_between(np.arange(len(mean)), mean - std, mean + std, color=DATASET, alpha=0.35, linewidth=0, clip_on=False)
        axes.plot(mean, color=TAP, marker="." if len(mean) == 1 else None, clip_on=False)
        bottom, top = widened(float((mean - std).min()), float((mean + std).max()))
        axes.set(xlim=(-0.2, max(len(mean) - 0.8, 0.2)), ylim=(bottom, top))
        return figure


def _bare_axes(figure: Figure, left: float, width: float) -> Axes:
    axes = figure.add_axes((left, 0.05, width, 0.9))
    axes.set_axis_off()
    return axes


def widened(low: float, high: float) -> tuple[float, float]:
    """A range, widened if it is too narrow for float64 to divide into bins."""
    least = 1e-6 * (1 + abs(low))
    return (low, high) if high - low > least else (low - 0.5, high + 0.5)
