"""A team at work: real Prefect and MLflow servers, a DVC remote, two workers with their own clones, one of which is lost."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from conftest import IDENTITY, copy_project, metrics, run, tiny_tree
from mlflow import MlflowClient
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun
from prefect.settings import PREFECT_API_URL, temporary_settings

pytestmark = pytest.mark.sweep
DATASET, SEEDS = "my-hopper", [0, 1, 2]
STAGES = ("train_vqvae", "train_prior", "train_critic", "evaluate")


def slow_tree() -> dict[str, Any]:
    """As tiny_tree, but the first training takes long enough to be caught in the middle."""
    tree = tiny_tree()
    tree["train_vqvae"]["fit"] |= {"updates": 200, "checkpoint_every": 25}
    return tree


@dataclass
class Team:
    """A folder with servers, remote, checkpoints and clones; `launcher` is the project that all are cloned from."""

    folder: Path
    prefect_port: int
    mlflow_port: int

    @property
    def launcher(self) -> Path:
        return self.folder / "launcher"

    @property
    def environment(self) -> dict[str, str]:
        return {
            **{key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "MLFLOW_", "PYTEST_"))},
            "PREFECT_API_URL": f"http://127.0.0.1:{self.prefect_port}/api",
            "PREFECT_HOME": str(self.folder / "prefect"),
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{self.mlflow_port}",
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            "TAP_REMOTE": str(self.folder / "remote"),
            "TAP_CHECKPOINTS": str(self.folder / "checkpoints"),
            "OMP_NUM_THREADS": "1",
        }

    @contextmanager
    def process(self, *command: str) -> Iterator[psutil.Process]:
        """`python -m COMMAND` in the launcher's folder; at the end it gets SIGTERM, and with it all that it started."""
        with (self.folder / "log.txt").open("a") as log:
            started = subprocess.Popen(
                [sys.executable, "-m", *command], cwd=self.launcher, env=self.environment, stdout=log, stderr=log
            )
        process = psutil.Process(started.pid)
        try:
            yield process
        finally:
            started.terminate()
            started.wait(60)

    @contextmanager
    def sweep(self) -> Iterator[subprocess.Popen[str]]:
        """`tap sweep` in the launcher's folder."""
        # A shell's background job, as these tests may be, ignores SIGINT, and so would all that it starts.
        code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
        code += "; from pipelines.cli import app; app(['sweep'])"
        command = [sys.executable, "-c", code]
        with subprocess.Popen(
            command, cwd=self.launcher, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    @contextmanager
    def worker(self, name: str) -> Iterator[psutil.Process]:
        """`tap worker cpu`, once it waits for work."""
        clone, started = str(self.folder / name), f"-{name}' started!"
        before = (self.folder / "log.txt").read_text(errors="replace").count(started)
        with self.process("pipelines.cli", "worker", "cpu", "--clone", clone, "--git", str(self.launcher)) as process:
            wait_until(lambda: (self.folder / "log.txt").read_text(errors="replace").count(started) > before, 120)
            yield process

    def left(self) -> list[str]:
        """Command lines of all processes that work in this folder."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("TAP_REMOTE") == self.environment["TAP_REMOTE"] and process.status() != "zombie":
                    found.append(" ".join(process.cmdline()))
            except psutil.Error:
                continue
        return found

    @contextmanager
    def client(self) -> Iterator[SyncPrefectClient]:
        with temporary_settings({PREFECT_API_URL: self.environment["PREFECT_API_URL"]}), get_client(sync_client=True) as client:
            yield client

    def combinations(self) -> dict[str, FlowRun]:
        """The newest flow run of each combination, by name."""
        with self.client() as client:
            runs = sorted(client.read_flow_runs(), key=lambda run: str(run.created))
        return {run.name: run for run in runs if "dataset" in run.parameters and "seed" in run.parameters}

    def runs(self) -> list[Any]:
        """All runs in MLflow."""
        client = MlflowClient(self.environment["MLFLOW_TRACKING_URI"])
        return list(client.search_runs([each.experiment_id for each in client.search_experiments()], max_results=1000))


def wait_until(condition: Callable[[], Any], seconds: float) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return found


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    folder = tmp_path_factory.mktemp("team")
    team = Team(folder, free_port(), free_port())
    team.launcher.mkdir()
    nothing = {"datasets": [], "planners": [], "models": []}
    copy_project(team.launcher, {DATASET: slow_tree()}, seeds=SEEDS, ablate=nothing)
    mlflow = ["mlflow", "server", "--port", str(team.mlflow_port), "--workers", "2"]
    mlflow += ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", str(folder / "artifacts")]
    with ExitStack() as stack:
        stack.enter_context(team.process("prefect", "--no-prompt", "server", "start", "--port", str(team.prefect_port)))
        stack.enter_context(team.process(*mlflow))
        wait_until(lambda: answers(team.environment["PREFECT_API_URL"] + "/health"), 120)
        wait_until(lambda: answers(team.environment["MLFLOW_TRACKING_URI"] + "/health"), 120)
        yield team
    wait_until(lambda: not team.left(), 30)


def at_work(worker: psutil.Process, stage: str) -> str | None:
    """What a worker does a stage for: DATASET-SEED."""
    for child in worker.children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
            match child.cmdline():
                case [_, "-m", module, dataset, seed] if module == f"pipelines.stages.{stage}":
                    return f"{dataset}-{seed}"
    return None


def kill_hard(process: psutil.Process) -> None:
    """As a machine that loses power: everything at once, watchdogs too."""
    family = [*process.children(recursive=True), process]
    for member in family:
        member.suspend()
    for member in family:
        member.kill()


def test_a_sweep_survives_the_loss_of_a_worker(team: Team) -> None:
    with team.worker("one"), team.worker("two") as lost, team.sweep() as sweep:

        def caught() -> str | None:
            """The combination that the worker trains, as soon as there is a checkpoint of it."""
            name = at_work(lost, "train_vqvae")
            return name if name and list(team.folder.glob(f"checkpoints/train_vqvae-{name}*/checkpoint.pt")) else None

        name = wait_until(caught, 240)
        kill_hard(lost)
        # Meanwhile, the same on one machine, which shares nothing with the team.
        run(team.folder, "git", "clone", "-q", "launcher", "alone")
        alone = team.folder / "alone"
        run(alone, sys.executable, "-m", "dvc", "repro", *(f"evaluate@{DATASET}-{seed}" for seed in SEEDS))
        output, _ = sweep.communicate(timeout=400)
        assert sweep.returncode == 0, output
    assert set(re.findall(r"Running stage '(\S+)'", output)) == {"params", f"fetch@{DATASET}", "report"}  # the rest is restored

    combinations = team.combinations()
    assert set(combinations) == {f"{DATASET}-{seed}" for seed in SEEDS}
    assert {each.state and each.state.name for each in combinations.values()} == {"Completed"}
    assert {key: each.run_count for key, each in combinations.items()} == {key: 1 + (key == name) for key in combinations}

    for stage in STAGES:
        assert metrics(team.launcher, stage) == metrics(alone, stage)
    assert "Data and pipelines are up to date." in run(team.launcher, sys.executable, "-m", "dvc", "status").stdout

    runs = team.runs()
    assert {each.info.status for each in runs} <= {"FINISHED", "KILLED"}
    finished = [each for each in runs if each.info.status == "FINISHED"]
    stages = [each.data.tags["stage"] for each in finished]
    counts = {stage: stages.count(stage) for stage in ("sweep", "train_evaluate", *STAGES)}
    # Nothing was computed twice: the lost training was resumed, and goes on in its run.
    assert counts == {"sweep": 1} | dict.fromkeys(("train_evaluate", *STAGES), len(SEEDS))
    (parent,) = (each for each in finished if each.data.tags["stage"] == "sweep")
    for each in finished:
        if each.data.tags["stage"] == "train_evaluate":
            assert each.data.tags["mlflow.parentRunId"] == parent.info.run_id
            assert {"normalized_score", "codebook_perplexity", "latency_ms_median"} <= set(each.data.metrics)


def test_a_cancelled_sweep_leaves_nothing_running_and_the_next_goes_on(team: Team) -> None:
    content = yaml.safe_load((team.launcher / "params.yaml").read_text())
    (team.launcher / "params.yaml").write_text(yaml.safe_dump(content | {"seeds": [4]}))
    run(team.launcher, "git", *IDENTITY, "commit", "-qam", "another seed")
    name = f"{DATASET}-4"
    with team.worker("one") as worker:
        with team.sweep() as sweep:
            wait_until(lambda: at_work(worker, "train_prior"), 240)
            sweep.send_signal(signal.SIGINT)
            output, _ = sweep.communicate(timeout=120)
        assert sweep.returncode != 0 and not at_work(worker, "train_prior"), output
        state = team.combinations()[name].state
        assert state and state.name == "Cancelled"

        with team.sweep() as sweep:
            output, _ = sweep.communicate(timeout=300)
        assert sweep.returncode == 0, output
    assert f"{name}.json" in metrics(team.launcher)
    runs = [each for each in team.runs() if each.data.tags.get("seed") == "4"]
    assert [each.data.tags["stage"] for each in runs].count("train_vqvae") == 1  # it was done
    assert "RUNNING" not in {each.info.status for each in team.runs()}
