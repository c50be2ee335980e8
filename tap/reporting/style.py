"""The look of figures, and their files: SVG for a page with light and dark colours, PNG for slides."""

import io
import re
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers can distinguish. The page's CSS replaces them, for light and dark themes.
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
