"""The stage params on a copy of the project: what it refuses, and what it leaves behind."""

import re
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, copy_project, run

from pipelines.stages.params import OUTPUTS
from tap.settings import METHODS

pytestmark = pytest.mark.xdist_group("params")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project in which dataset `mine` was fetched."""
    folder = tmp_path_factory.mktemp("params")
    copy_project(folder, {"mine": {}}, seeds=[0], methods=[], ablate={"datasets": [], "planners": [], "models": []})
    run(folder, "dvc", "repro", "-q", "fetch@mine")
    return folder


@pytest.mark.parametrize("place", ["data/raw/mine/episodes", "data/params/mine", "link"])
def test_a_users_file_among_results_is_refused_before_anything_is_removed(project: Path, place: str) -> None:
    (project / "link").unlink(missing_ok=True)
    (project / "link").symlink_to(project / "data/raw/mine")
    file = project / place / "my-hopper.hdf5"
    file.write_bytes((project / "my-hopper.hdf5").read_bytes())
    original = (project / "params.yaml").read_text()
    content = yaml.safe_load(original)
    content["datasets"]["mine"]["fetch"]["path"] = f"{place}/my-hopper.hdf5"
    (project / "params.yaml").write_text(yaml.safe_dump(content))
    try:
        for command in (
            ["dvc", "repro"],
            ["python", "-m", "pipelines.cli", "run"],
            ["python", "-m", "pipelines.cli", "validate", "mine"],
        ):
            result = run(project, *command, check=False)
            assert result.returncode != 0
            said = re.sub(r"\s+", " ", result.stdout + result.stderr)
            assert f"datasets.mine.fetch.path in params.yaml: {place}/my-hopper.hdf5 lies in data/" in said
            assert "move it, for example to data/my-hopper.hdf5" in said and "Traceback" not in said
            assert file.read_bytes() == (project / "my-hopper.hdf5").read_bytes()
    finally:
        (project / "params.yaml").write_text(original)
        file.unlink()


def test_params_of_what_is_no_longer_listed_are_removed(project: Path) -> None:
    original = (project / "params.yaml").read_text()
    content = yaml.safe_load(original)
    content["datasets"]["other"] = content["datasets"]["mine"]
    for text, folders in ((yaml.safe_dump(content), {"mine", "other"}), (original, {"mine"})):
        (project / "params.yaml").write_text(text)
        run(project, "dvc", "repro", "-q", "params")
        assert {path.parent.name for path in (project / "data/params").rglob("*.json")} == folders
    assert run(project, "dvc", "status", "params", "fetch@mine").stdout.strip() == "Data and pipelines are up to date."


def test_the_folders_of_results_are_those_of_dvc_and_make_clean() -> None:
    stages = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
    outs = [out for stage in stages.values() for key in ("outs", "plots", "metrics") for out in stage.get(key, [])]
    names = {next(iter(out)) if isinstance(out, dict) else out for out in outs}
    names = {name.replace("${item.method}", method) for name in names for method in METHODS}
    folders = {"/".join(name.split("/")[:2]) for name in names}
    assert folders == set(map(str, OUTPUTS))
    clean = (ROOT / "Makefile").read_text().partition("clean:")[2].partition("distclean:")[0]
    assert set(re.findall(r"data/[\w-]+", clean)) == folders
