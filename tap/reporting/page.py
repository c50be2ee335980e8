"""HTML pages that need no network: the templates next to this file, and how they show numbers and figures."""

from pathlib import Path

import jinja2
from markupsafe import Markup

from tap.reporting.style import figure_svg
from tap.reporting.tables import NOTHING


def template(name: str) -> jinja2.Template:
    """A template. Texts are escaped; its filters are `number`, `score`, and `svg` for a figure."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["number"] = number
    environment.filters["score"] = lambda value: NOTHING if value is None else f"{value:.1f}"
    environment.filters["svg"] = lambda figure: Markup(figure_svg(figure))
    return environment.get_template(name)


def number(value: float | None, digits: int = 4) -> str:
    """A number with so many significant digits, or with all before the decimal point."""
    if value is None:
        return NOTHING
    whole = isinstance(value, int) or abs(value) >= 10 ** (digits - 1)  # not 1e+02
    return f"{value:,.0f}" if whole else f"{value:,.{digits}g}"


def counted(count: int, noun: str) -> str:
    """1 row, 2,000 rows."""
    return f"{count:,} {noun}{'s' * (count != 1)}"
