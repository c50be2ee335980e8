"""The documents against the repository that they describe."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]


def test_the_picture_of_the_architecture_draws_the_layers_that_import_linter_enforces() -> None:
    (layers,) = (contract["layers"] for contract in CONTRACTS if contract["type"] == "layers")
    picture = (ROOT / "docs/architecture.svg").read_text().partition('<g class="layers">')[2].partition("</g>")[0]
    drawn: dict[str, list[str]] = {}
    for height, text in re.findall(r'<text x="[\d.]+" y="(\d+)">([^<]+)</text>', picture):
        drawn.setdefault(height, []).append(text)
    rows = [frozenset(drawn[height]) for height in sorted(drawn, key=int)]
    assert rows == [frozenset(re.findall(r"(?:tap\.)?(\w+)", layer)) for layer in layers]


def test_the_architecture_page_lists_every_module() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    for init in [*ROOT.glob("tap/*/__init__.py"), *ROOT.glob("pipelines/*/__init__.py")]:
        package = init.parent
        (row,) = re.findall(rf"^\| `{package.relative_to(ROOT)}/` \| (.*)$", page, re.MULTILINE)
        listed = set(re.findall(r"`(\w+)`", row.partition(" | ")[0]))
        assert listed == {path.stem for path in package.glob("*.py")} - {"__init__"}, package.name
    for path in [*ROOT.glob("tap/*.py"), *ROOT.glob("pipelines/*.py")]:
        assert path.stem == "__init__" or f"`{path.relative_to(ROOT)}`" in page, path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_modules_and_tests_named_in_the_docs_exist(page: Path) -> None:
    text = page.read_text()
    paths = set(re.findall(r"`((?:tap|pipelines|scripts|tests|benchmarks|docs)/[a-z0-9_./]*)`", text))
    links = {
        link for link in re.findall(r"\]\(([^)#]+)\)|src=\"([^\"]+)\"", text) for link in link if link and "://" not in link
    }
    missing = [path for path in paths if not (ROOT / path).exists()] + [
        link for link in links if not (page.parent / link).exists()
    ]
    modules = set(re.findall(r"(?:`|python -m |import )((?:tap|pipelines|scripts|benchmarks)(?:\.[a-z0-9_]+)+)\b", text))
    missing += [module for module in modules if not is_module_or_member(module)]
    for file, test in re.findall(r"`(test_\w+\.py)::(test_\w+)`", text):
        if not any(f"def {test}(" in path.read_text() for path in ROOT.glob(f"tests/**/{file}")):
            missing.append(f"{file}::{test}")
    assert not missing


def is_module_or_member(name: str) -> bool:
    """Whether `a.b.c` is a module, or c a function, class or constant of the module a.b."""
    path, (parent, _, member) = ROOT / name.replace(".", "/"), name.rpartition(".")
    if path.with_suffix(".py").exists() or (path / "__init__.py").exists():
        return True
    module = ROOT / f"{parent.replace('.', '/')}.py"
    return module.exists() and re.search(rf"^(?:def |class )?{member}\b", module.read_text(), re.MULTILINE) is not None


def test_contracts_named_on_the_architecture_page_are_those_of_import_linter() -> None:
    named = re.findall(r"\*([^*]+)\*\s+\(import-linter\)", (ROOT / "docs/architecture.md").read_text())
    assert sorted(named) == sorted(contract["name"] for contract in CONTRACTS)
