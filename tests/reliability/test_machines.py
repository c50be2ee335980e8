"""Machines as users have them: no git repository or another user's, no name, no home folder, results on another disk."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from conftest import ROOT, copy_project, run
from stub_project import make_stub_project

from pipelines.orchestration import repro, sweep
from tap.tracking import run as tracking

NAMELESS = ("unshare", "--user", "--map-user=54321", "--")  # a user without an entry in /etc/passwd, and without its rights
STALE = "from pipelines.orchestration import repro; print(len(repro.stale(repro.instances(['a'], [0]))))"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    make_stub_project(folder)
    return folder


def python(
    folder: Path, *arguments: str, within: Sequence[str] = (), **environment: str | None
) -> subprocess.CompletedProcess[str]:
    """Python in `folder`, by the command `within`; a variable that is None is unset."""
    names = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    variables = {key: value for key, value in names.items() if value is not None}
    command = [*within, sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)


def test_without_a_git_repository_the_remedy_is_named_and_helps(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As from a ZIP file of the project."""
    shutil.rmtree(project / ".git")
    monkeypatch.chdir(project)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(project.parent))
    with pytest.raises(
        ValueError, match=f"^{project} is not a git repository, which DVC needs: run `git init` here; or"
    ) as error:
        repro.stale(repro.instances(["a"], [0]))
    assert "\n" not in str(error.value)
    subprocess.run(["git", "init", "-q"], check=True)
    assert repro.stale(repro.instances(["a"], [0]))
    assert tracking.git_state() == ("unknown", "unknown")  # nothing is committed
    shutil.rmtree(project / ".git")
    subprocess.run([sys.executable, "-m", "dvc", "config", "--local", "core.no_scm", "true"], check=True)
    assert repro.stale(repro.instances(["a"], [0]))


def test_another_users_repository_has_an_unknown_commit_and_no_clean_code(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    assert tracking.git_state()[1] is False
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")  # git then treats every repository as another user's
    refused = subprocess.run(["git", "status"], capture_output=True, text=True)
    assert "dubious ownership" in refused.stderr
    assert tracking.git_state() == ("unknown", "unknown")
    with pytest.raises(ValueError, match="git does not tell this folder's commit"):
        sweep._commit()


def test_a_repository_around_the_project_is_not_its_own(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a home folder is in git, and ignores the project."""
    shutil.rmtree(project / ".git")
    home = project.parent
    (home / ".gitignore").write_text("*\n")
    subprocess.run(["git", "init", "-q", home], check=True)
    subprocess.run(["git", "-C", home, "add", "-f", ".gitignore"], check=True)
    identity = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    subprocess.run(["git", "-C", home, *identity, "commit", "-qm", "home"], check=True)
    monkeypatch.chdir(project)
    assert tracking.git_state() == ("unknown", "unknown")


nameless = pytest.mark.skipif(
    subprocess.run([*NAMELESS, "true"], capture_output=True).returncode != 0, reason="unshare may not make users here"
)


@nameless
def test_a_user_without_a_name_can_work(project: Path, tmp_path: Path) -> None:
    asked = python(project, "-c", "import pwd, os; pwd.getpwuid(os.getuid())", within=NAMELESS)
    assert "uid not found" in asked.stderr
    names: dict[str, str | None] = dict.fromkeys(("USER", "LOGNAME", "LNAME", "USERNAME"))
    found = python(project, "-c", STALE, within=NAMELESS, **names, HOME=str(tmp_path / "missing"))
    assert found.returncode == 0, found.stderr
    assert int(found.stdout) == 12  # all but `params`, which has just run


@nameless
def test_without_name_and_home_the_remedy_is_named(project: Path) -> None:
    found = python(project, "-m", "pipelines.cli", "datasets", within=NAMELESS, HOME=None)
    assert (found.returncode, found.stderr) == (
        1,
        "error: this user has no home folder: set HOME to a folder for settings and caches, like HOME=/tmp/home\n",
    )


@pytest.mark.parametrize("home", [None, "", "/proc/nowhere"], ids=["unset", "empty", "not writable"])
def test_a_user_without_a_usable_home_can_work(project: Path, home: str | None) -> None:
    found = python(project, "-c", STALE, HOME=home)
    assert found.returncode == 0, found.stderr
    assert int(found.stdout) == 12  # all but `params`, which has just run


def test_results_on_another_disk_are_refused_before_anything_is_computed(tmp_path: Path) -> None:
    """`data` may be a link within the project; DVC refuses results outside it, after it has computed them."""
    folder, disk = tmp_path / "project", tmp_path / "disk"
    folder.mkdir()
    copy_project(folder, {"my-hopper": {}}, ablate={"datasets": [], "planners": [], "models": []})
    (folder / "data").rename(disk)
    (folder / "data").symlink_to(disk)
    refused = run(folder, sys.executable, "-m", "dvc", "repro", "params", check=False)
    assert refused.returncode != 0 and not (disk / "params").exists()
    assert "error: data/raw is linked to another place, where DVC accepts no results: make it a folder again" in refused.stderr
    assert "Traceback" not in refused.stderr
    without = run(folder, sys.executable, "-m", "pipelines.stages.params")  # without DVC nothing stands against it
    assert without.returncode == 0 and (disk / "params/my-hopper/fetch.json").exists()

    (folder / "data").unlink()
    shutil.copytree(disk, folder / "data")
    for setting in (("cache", "dir", "--local", str(disk / "cache")), ("config", "--local", "cache.type", "symlink")):
        run(folder, sys.executable, "-m", "dvc", *setting)
    run(folder, sys.executable, "-m", "dvc", "repro", "params")  # the remedy
    assert (folder / "data/params/my-hopper/fetch.json").resolve().is_relative_to(disk)
