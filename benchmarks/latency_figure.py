"""The paper's latency figure from the JSON of `benchmarks.latency`: seconds per decision by dimensions, and by horizon.

Example: python -m benchmarks.latency_figure docs/latency.png latency.json
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from benchmarks.latency import SIZES
from tap.files import write_atomically
from tap.reporting.style import INK, OTHER, STYLE, TAP, figure_png


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT.png")
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="of several with one size, the last counts")
    options = parser.parse_args()
    measured = {name: size for file in options.files for name, size in json.loads(file.read_text()).items() if name in SIZES}
    write_atomically(options.out, figure_png(latency_figure(list(measured.values()))))


def latency_figure(sizes: Sequence[dict[str, Any]]) -> Figure:
    """Both methods' times, on a logarithmic scale, with their ratio at each size; `sizes` as `compare` returns them."""
    panels = (
        ("dimensions", [size for size in sizes if size["horizon"] == 15], "observations + actions, at horizon 15"),
        ("horizon", [size for size in sizes if size["dimensions"] == 14], "horizon, for Hopper"),
    )
    with rc_context(STYLE):
        figure = Figure(figsize=(9.4, 2.8))
        for axes, (key, shown, label) in zip(figure.subplots(1, 2, sharey=True), panels, strict=True):
            shown = sorted(shown, key=lambda size: size[key])
            places = [size[key] for size in shown]
            for method, name, form, colour in (("tt", "TT", "s-", OTHER), ("tap", "TAP", "o-", TAP)):
                axes.plot(places, [size[f"{method}_ms"] / 1000 for size in shown], form, color=colour, label=name, markersize=4)
            for place, size in zip(places, shown, strict=True):
                text = f"× {size['ratio']:.2g}"
                middle = (size["tt_ms"] * size["tap_ms"]) ** 0.5 / 1000  # halfway on the scale
                axes.text(place, middle, text, color=INK, ha="center", va="center")
            axes.set_yscale("log")
            axes.set_title(f"Decision time against {key}")
            axes.set(xlabel=label)
            axes.margins(x=0.1)
        figure.axes[0].set(ylabel="seconds (log scale)")
        figure.axes[0].legend()
        return figure


if __name__ == "__main__":
    main()
