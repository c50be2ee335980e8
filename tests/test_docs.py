"""The documents show the project as it is."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_picture_of_the_architecture_draws_the_layers_that_import_linter_enforces() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    picture = (ROOT / "docs/architecture.svg").read_text().partition('<g class="layers">')[2].partition("</g>")[0]
    drawn: dict[str, list[str]] = {}
    for height, text in re.findall(r'<text x="[\d.]+" y="(\d+)">([^<]+)</text>', picture):
        drawn.setdefault(height, []).append(text)
    rows = [drawn[height] for height in sorted(drawn, key=int)][1:]  # below the row of pipelines
    assert [frozenset(row) for row in rows] == [frozenset(re.findall(r"tap\.(\w+)", layer)) for layer in layers[1:]]
