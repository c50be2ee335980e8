"""A team on one machine: real Prefect and MLflow servers, a DVC remote, and clones of a tiny project for workers and sweeps."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from conftest import copy_project, tiny_tree
from mlflow import MlflowClient
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun
from prefect.settings import PREFECT_API_URL, temporary_settings

DATASET = "my-hopper"


@dataclass(frozen=True)
class Team:
    """A folder with servers, remote, checkpoints and clones; `launcher` is the project that all are cloned from."""

    folder: Path
    prefect_port: int
    mlflow_port: int

    @classmethod
    def make(cls, folder: Path, seeds: Sequence[int]) -> "Team":
        """A team whose launcher is a tiny project with `seeds`, of which no server runs yet."""
        team = cls(folder, _free_port(), _free_port())
        team.launcher.mkdir(parents=True)
        tree = tiny_tree()
        # The first training takes long enough to be caught in the middle.
        tree["train_vqvae"]["fit"] |= {"updates": 200, "checkpoint_every": 25}
        nothing = {"datasets": [], "planners": [], "models": []}
        copy_project(team.launcher, {DATASET: tree}, seeds=list(seeds), ablate=nothing)
        return team

    @property
    def launcher(self) -> Path:
        return self.folder / "launcher"

    @property
    def log(self) -> Path:
        """What servers and workers print."""
        return self.folder / "log.txt"

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

    @property
    def prefect_command(self) -> list[str]:
        return ["prefect", "--no-prompt", "server", "start", "--port", str(self.prefect_port)]

    @property
    def mlflow_command(self) -> list[str]:
        store = ["--backend-store-uri", f"sqlite:///{self.folder}/mlflow.db"]
        artifacts = ["--artifacts-destination", str(self.folder / "artifacts")]
        return ["mlflow", "server", "--port", str(self.mlflow_port), "--workers", "2", *store, *artifacts]

    def worker_command(self, name: str) -> list[str]:
        """`tap worker cpu` with a clone of that name."""
        return ["pipelines.cli", "worker", "cpu", "--clone", str(self.folder / name), "--git", str(self.launcher)]

    @contextmanager
    def process(self, *command: str, **environment: str) -> Iterator[psutil.Popen]:
        """`python -m COMMAND` in the launcher's folder; at the end it gets SIGTERM, and with it all that it started."""
        with self.log.open("a") as log:
            process = psutil.Popen(
                [sys.executable, "-m", *command], cwd=self.launcher, env=self.environment | environment, stdout=log, stderr=log
            )
        try:
            yield process
        finally:
            with suppress(psutil.NoSuchProcess):  # it was killed
                process.terminate()
            process.wait(60)

    @contextmanager
    def servers(self) -> Iterator[None]:
        """Prefect's and MLflow's server, once they answer; at the end no process may work in this folder."""
        with ExitStack() as stack:
            stack.enter_context(self.process(*self.prefect_command))
            stack.enter_context(self.process(*self.mlflow_command))
            wait_until(self.servers_answer, 120)
            yield
        wait_until(lambda: not self.left(), 30)

    def servers_answer(self) -> bool:
        return _answers(self.environment["PREFECT_API_URL"]) and _answers(self.environment["MLFLOW_TRACKING_URI"])

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
    def worker(self, name: str) -> Iterator[psutil.Popen]:
        """`tap worker cpu`, once it waits for work."""
        started = f"-{name}' started!"
        before = self.log.read_text(errors="replace").count(started)
        with self.process(*self.worker_command(name)) as process:
            wait_until(lambda: self.log.read_text(errors="replace").count(started) > before, 120)
            yield process

    def processes(self) -> list[psutil.Process]:
        """All processes that work in this folder."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("TAP_REMOTE") == self.environment["TAP_REMOTE"] and process.status() != "zombie":
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def left(self) -> list[str]:
        """Command lines of all processes that work in this folder."""
        found = []
        for process in self.processes():
            try:
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


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5):
            return True
    except OSError:
        return False
