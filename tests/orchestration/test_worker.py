"""A worker's clone: which commit it holds, and that results come and go by the DVC remote, in a folder or on S3."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import boto3
import psutil
import pytest
from conftest import IDENTITY, ROOT
from moto.server import ThreadedMotoServer
from stub_project import make_stub_project, ran

from pipelines.orchestration import worker
from pipelines.orchestration.repro import dvc


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *IDENTITY, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    folder = tmp_path / "origin"
    folder.mkdir()
    make_stub_project(folder)
    return folder


@pytest.fixture
def clone(origin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "clones" / "one"
    worker.set_up(folder, str(origin), str(tmp_path / "remote"))
    monkeypatch.setenv("TAP_CLONE", str(folder))
    return folder


def test_a_clone_goes_to_the_commit_that_a_run_names(origin: Path, clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = git(origin, "rev-parse", "HEAD")
    (origin / "params.yaml").write_text((origin / "params.yaml").read_text() + "# changed\n")
    git(origin, "commit", "-qam", "second")
    second = git(origin, "rev-parse", "HEAD")
    assert git(clone, "rev-parse", "HEAD") == first

    assert worker.enter_clone() == {"directory": str(clone)}
    assert git(clone, "rev-parse", "HEAD") == second  # the newest, where none is named
    (clone / "params.yaml").write_text("left behind by a killed run")
    monkeypatch.setenv("TAP_COMMIT", first)
    worker.enter_clone()
    assert git(clone, "rev-parse", "HEAD") == first and git(clone, "status", "--porcelain") == ""

    monkeypatch.setenv("TAP_COMMIT", "0" * 40)
    with pytest.raises(ValueError, match=rf"{origin} has no commit 0000.*push it there"):
        worker.enter_clone()


def test_a_second_set_up_keeps_the_clone_and_takes_another_origin(origin: Path, clone: Path, tmp_path: Path) -> None:
    (clone / "data").mkdir()
    (clone / "data/kept").write_text("")
    git(tmp_path, "clone", "-q", str(origin), str(tmp_path / "moved"))
    worker.set_up(clone, str(tmp_path / "moved"), str(tmp_path / "remote"))
    assert (clone / "data/kept").exists() and git(clone, "remote", "get-url", "origin") == str(tmp_path / "moved")


def test_what_cannot_be_used_is_refused_in_a_sentence(tmp_path: Path, origin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"nowhere.*does not exist"):
        worker.set_up(tmp_path / "clone", str(tmp_path / "nowhere"), str(tmp_path / "remote"))
    monkeypatch.chdir(origin)
    with pytest.raises(ValueError, match="no DVC remote is set here: set one with --remote"):
        worker.require_remote()
    worker.use_remote(origin, "s3://bucket/path")
    assert worker.require_remote() == "s3://bucket/path"
    with pytest.raises(ValueError, match="pool: 'tpu' is unknown: choose from gpu, cpu, control"):
        worker.start("tpu", tmp_path, None, None, 1)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An S3 server with one bucket; its URL for DVC."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    secrets = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
    for key, value in ({"AWS_ENDPOINT_URL": f"http://{host}:{port}"} | secrets).items():
        monkeypatch.setenv(key, value)
    boto3.client("s3").create_bucket(Bucket="results")
    yield "s3://results/tap"
    server.stop()


@pytest.mark.parametrize("kind", ["folder", "s3"])
def test_what_one_clone_has_computed_is_restored_in_another(
    kind: str, origin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    remote = request.getfixturevalue("bucket") if kind == "s3" else str(tmp_path / "remote")
    clones = [tmp_path / "one", tmp_path / "two"]
    for clone in clones:
        worker.set_up(clone, str(origin), remote)
    lines: list[str] = []

    def show(line: str, passing: bool) -> None:
        lines.append(line)

    trained = ["train_vqvae@a-0", "train_prior@a-0", "train_critic@a-0", "train_actor@a-0"]
    chain = ["params", "fetch@a", *trained, "evaluate@a-0"]

    monkeypatch.chdir(clones[0])
    for stage in chain:
        assert dvc("repro", "--pull", "--single-item", stage, show=show) == 0, lines
        assert dvc("push", "--run-cache", stage, show=show) == 0, lines
    assert ran(clones[0]) == chain

    monkeypatch.chdir(clones[1])
    assert dvc("repro", "--pull", *chain, show=show) == 0, lines
    assert ran(clones[1]) == []
    for path in ("data/prior/a-0", "data/metrics/evaluate/a-0.json"):
        assert (clones[1] / path).read_bytes() == (clones[0] / path).read_bytes()


def test_what_a_worker_runs_ends_with_it() -> None:
    wait = "print('ready', flush=True)\nimport time\ntime.sleep(60)"
    run = f"from pipelines.orchestration.worker import end_with_worker\nend_with_worker()\n{wait}"
    start = f"import subprocess, sys\nprint(subprocess.Popen([sys.executable, '-c', {run!r}]).pid, flush=True)\n{wait}"
    environment = os.environ | {"TAP_CLONE": "anywhere"}
    command = [sys.executable, "-c", start]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        child = psutil.Process(int(parent.stdout.readline()))
        assert [parent.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        parent.kill()
        child.wait(timeout=20)
