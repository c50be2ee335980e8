"""The library's tests with the oldest and with the newest versions of its dependencies that pyproject.toml allows.

Each runs in a virtual environment of its own, without extras, in a temporary folder: two gigabytes and, on two cores, some
minutes. Tests that need more than the library are left out. "oldest" installs the lower bound of each dependency that the
library declares, and for those that it does not declare what pip chooses.
"""

import argparse
import ast
import json
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tqdm import tqdm

from benchmarks.measure import Result

ROOT = Path(__file__).parents[2]
TOOLS = ["pytest>=8,<9", "hypothesis", "pyyaml"]  # of the tests
SHARED = {"conftest", "recordings", "stage_files", "distributed_training"}  # modules of tests/
MORE_THAN_THE_LIBRARY = ("tap.reporting", "tap.serving", "tap.tracking")
OTHER_SIMULATORS = ("test_make.py", "test_registration.py")  # in them AntMaze and Adroit, which are extras


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--versions", nargs="+", choices=("oldest", "newest"), default=["oldest", "newest"])
    parser.add_argument("--files", type=int, default=len(library_tests()), help="how many test files to run [all]")
    options = parser.parse_args()
    files = library_tests()[: options.files]
    print(json.dumps({which: tested(which, files) for which in tqdm(options.versions)}, indent=2))


def dependencies() -> list[Requirement]:
    """The library's own, as pyproject.toml declares them."""
    return [Requirement(line) for line in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]]


def oldest(requirement: Requirement) -> str:
    """The requirement at its lower bound."""
    (bound,) = (each.version for each in requirement.specifier if each.operator in (">=", "=="))
    extras = f"[{','.join(requirement.extras)}]" if requirement.extras else ""
    return f"{requirement.name}{extras}=={bound}"


def library_tests() -> list[Path]:
    """The test files that import, beside the standard library, only the library without extras, and what tests share."""
    distributions = metadata.packages_distributions()
    allowed = {canonicalize_name(Requirement(line).name) for line in [*map(str, dependencies()), *TOOLS]}

    def is_allowed(module: str) -> bool:
        top = module.partition(".")[0]
        if module.startswith(MORE_THAN_THE_LIBRARY):
            return False
        own = top == "tap" or top in SHARED or top in sys.stdlib_module_names
        return own or bool(allowed & {canonicalize_name(name) for name in distributions.get(top, [])})

    files = [file for file in sorted((ROOT / "tests").rglob("test_*.py")) if file.name not in OTHER_SIMULATORS]
    return [file for file in files if all(map(is_allowed, _imported(file)))]


def _imported(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names)
            case ast.ImportFrom(module=str(module), level=0):
                yield module


def tested(which: str, files: list[Path]) -> Result:
    """Installs the library's `which` versions and runs test files with them: versions, pytest's last line, seconds."""
    start = time.perf_counter()
    wanted = [oldest(each) for each in dependencies()] if which == "oldest" else []
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        python = Path(folder) / "bin/python"
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, str(ROOT), *wanted, *TOOLS], check=True, stdout=sys.stderr)
        installed = time.perf_counter()
        tests = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
        ran = subprocess.run(tests, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        print(ran.stdout, file=sys.stderr)
        names = [each.name for each in dependencies()]
        ask = f"import json; from importlib.metadata import version as v; print(json.dumps({{n: v(n) for n in {names}}}))"
        versions = json.loads(subprocess.run([python, "-c", ask], check=True, stdout=subprocess.PIPE, text=True).stdout)
    return {
        "versions": versions,
        "test_files": len(files),
        "tests": ran.stdout.splitlines()[-1],
        "passed": ran.returncode == 0,
        "install_seconds": round(installed - start),
        "test_seconds": round(time.perf_counter() - installed),
    }


if __name__ == "__main__":
    main()
