"""The figure of a dataset without a simulator: action errors by steps ahead and by action dimension."""

from collections.abc import Sequence

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tap.reporting.held_out import HOLD, HeldOutRow, dimension_names, in_thousandths
from tap.reporting.pictures import Picture
from tap.reporting.style import DATASET, INK, OTHER, STYLE, TAP
from tap.results import ValidationReport

STYLES = (TAP, "o"), (OTHER, "s"), (INK, "^")  # of the first policies; a table has the others


def held_out_picture(rows: Sequence[HeldOutRow], validation: ValidationReport | None) -> Picture:
    """The errors of TAP, the next two policies, and of holding the last action."""
    dataset, shown = rows[0].first.dataset, rows[: len(STYLES)]
    caption = (
        "Squared errors as shares of the variance of the recorded actions: 0 is the recorded action, 1 the mean of all. Above: "
        "of the actions of a plan, by how many steps after the decision they are executed. Below: of the action at the "
        "decision, by its dimension."
    )
    errors = "; ".join(f"{row.title} {in_thousandths(row.error)}" for row in shown)
    held = rows[0].mean("hold_error_ahead")[0]
    alt = f"Action errors by steps ahead and by dimension. At the decision: {errors}; {HOLD} {held:.3f}."
    figure = held_out_figure(shown, dimension_names(rows[0].first, validation))
    return Picture(f"{dataset}-action-error", "Action error on held-out episodes", caption, alt, figure)


def held_out_figure(rows: Sequence[HeldOutRow], names: Sequence[str]) -> Figure:
    """Above one line a policy over steps ahead; below one mark a policy for each of the dimensions `names`."""
    std = rows[0].mean("std")
    varies = std > 0
    places = np.arange(varies.sum())
    longest = max(rows, key=lambda row: len(row.mean("hold_error_ahead"))).mean("hold_error_ahead")
    with rc_context(STYLE):
        figure = Figure(figsize=(4.6, 2.8 + 0.16 * len(places)))
        ahead, by_dimension = figure.subplots(2, 1, height_ratios=(2.0, 0.5 + 0.16 * len(places)))
        for row, (color, marker) in zip(rows, STYLES, strict=False):
            style = {"color": color, "marker": marker, "markersize": 4, "label": row.title}
            ahead.plot(row.mean("error_ahead"), **style)
            by_dimension.plot(_shares(row.mean("rmse")[0], std), places, linestyle="none", **style)
        held = {"color": DATASET, "marker": "|", "label": HOLD}
        ahead.plot(longest, **held)
        by_dimension.plot(_shares(rows[0].mean("hold_rmse")[0], std), places, linestyle="none", markersize=8, **held)
        ahead.set(xlabel="steps after the decision", ylabel="share of the variance")
        ahead.set_ylim(bottom=0)
        ahead.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        by_dimension.set(xlabel="share of the variance, at the decision", yticks=places, ylim=(len(places) - 0.5, -0.5))
        by_dimension.set_yticklabels([name for name, moves in zip(names, varies, strict=True) if moves], fontsize=7)
        by_dimension.set_xlim(left=0)
        figure.legend(*ahead.get_legend_handles_labels(), loc="outside upper center", ncols=2, handlelength=1.6)
        return figure


def _shares(rmse: np.ndarray, std: np.ndarray) -> np.ndarray:
    """Of the dimensions that vary."""
    varies = std > 0
    return np.asarray(np.square(rmse[varies] / std[varies]))
