"""Each package imports only distributions that the library or the package's extra declares in pyproject.toml."""

import ast
import importlib.metadata
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DISTRIBUTIONS = importlib.metadata.packages_distributions()
OWN = {"tap", "pipelines", "scripts"}
EXTRAS = {"tap/tracking": ["tracking"], "tap/serving": ["serving"], "tap/reporting": ["reporting"]}
EXTRAS |= {"pipelines": ["pipeline"], "scripts": ["pipeline", "collect"]}
# tap/envs imports these only for an environment that needs them, and reports the extra where they are missing.
OPTIONAL = {"tap/envs": {"gymnasium_robotics": "robotics", "d4rl": "d4rl", "gym": "d4rl"}}  # d4rl depends on gym
OPTIONAL |= {"tap/methods": {"torchrl": "offline-rl", "tensordict": "offline-rl"}}  # as the stage train_methods does
OPTIONAL |= {"pipelines": {"onnxruntime": "export", "onnxscript": "export"}}  # as pipelines/exporting/formats.py does
PACKAGES = [str(path.parent.relative_to(ROOT)) for path in sorted(ROOT.glob("tap/*/__init__.py"))]


def declared(extras: list[str]) -> set[str]:
    """The distributions of the library and of extras, with those of the project's extras that an extra names."""
    found = set()
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in PROJECT["optional-dependencies"][extra])]
    for requirement in map(Requirement, lines):
        if requirement.name == PROJECT["name"]:
            found |= declared(sorted(requirement.extras))
        else:
            found.add(canonicalize_name(requirement.name))
    return found


def imported(tree: ast.AST) -> Iterator[str]:
    """The top-level modules that a module imports anywhere, also in functions and by importlib.import_module("...")."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (name.name.partition(".")[0] for name in names)
            case ast.ImportFrom(module=str(module), level=0):
                yield module.partition(".")[0]
            case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(module))]):
                yield module.partition(".")[0]


def undeclared(files: list[Path], extras: list[str], optional: dict[str, str]) -> set[str]:
    """The modules that `files` import and no distribution of the library or of `extras` contains."""
    assert files
    modules = {module for file in files for module in imported(ast.parse(file.read_text()))}
    third_party = modules - sys.stdlib_module_names - OWN - optional.keys()
    names = declared(extras)
    return {
        module
        for module in third_party
        if not names & {canonicalize_name(name) for name in DISTRIBUTIONS.get(module, [module])}
    }


@pytest.mark.parametrize("package", [*PACKAGES, "pipelines", "scripts"])
def test_a_package_imports_what_its_extra_declares(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert undeclared(files, EXTRAS.get(package, []), OPTIONAL.get(package, {})) == set()


@pytest.mark.parametrize("folder", ["pipelines", "pipelines/orchestration", "pipelines/serving", "benchmarks/reliability"])
def test_no_module_hides_a_library_where_its_folder_is_searched_first(folder: str) -> None:
    """As Prefect's workers search the folder of a flow's module; `import dvc` found a module of ours there."""
    modules = {path.stem for path in (ROOT / folder).glob("*.py")} - {"__init__"}
    assert modules & (DISTRIBUTIONS.keys() | sys.stdlib_module_names) == set()


def test_the_library_without_packages_needs_no_extra() -> None:
    assert undeclared(sorted((ROOT / "tap").glob("*.py")), [], {}) == set()


@pytest.mark.parametrize(("package", "optional"), OPTIONAL.items())
def test_an_optional_import_has_an_extra(package: str, optional: dict[str, str]) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    extras = EXTRAS.get(package, [])
    assert undeclared(files, [*extras, *sorted(set(optional.values()))], {}) - {"gym"} == set()
    assert undeclared(files, extras, {}) == optional.keys()


@pytest.mark.parametrize(
    "code", ["import matplotlib", "def f():\n    from mlflow.models import set_model", "import httpx as h"]
)
def test_an_undeclared_import_is_found(code: str, tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(code)
    assert len(undeclared([file], [], {})) == 1 and undeclared([file], ["pipeline"], {}) == set()
