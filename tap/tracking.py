"""MLflow: one run a stage. Only this module, `tap.registry` and `tap.serving` import mlflow.

A tracking server that is away never stops a stage, and never slows its loop: metrics wait in memory, and a thread of the run
sends them. What the server has not taken when the run ends is lost there, and one warning says so. The files that a stage
writes do not depend on the server.
"""

import fcntl
import importlib.metadata
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

# A server that does not answer costs seconds; by MLflow's defaults it would cost minutes.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "1")

import mlflow
from mlflow import MlflowClient
from mlflow.entities import Experiment, Metric, Param, RunInfo, RunTag
from mlflow.exceptions import MlflowException
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

EXPERIMENT = "tap"
BATCH = 1000  # metrics that MLflow takes in one request
MISSING = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")  # MLflow's error codes; the second for a missing alias

T = TypeVar("T")
logger = logging.getLogger(__name__)
logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)  # it warns of each retry; a Run warns once of them all


class Run:
    """A run in MLflow; made by `start_run`. Its methods neither raise nor wait long where the store is away."""

    def __init__(self, tracking_uri: str, client: MlflowClient | None = None, info: RunInfo | None = None) -> None:
        self.id: str | None = info.run_id if info else None  # None: the store could not be reached, nothing is tracked
        self.tracking_uri, self._client, self._info = tracking_uri, client, info
        # Never started: its own thread gives up where the store is away, and reports nothing in runs under ten seconds.
        self._system: Any = SystemMetricsMonitor(self.id, tracking_uri=tracking_uri) if info else None  # type: ignore[no-untyped-call]
        self._waiting: list[Metric] = []  # any thread appends, the one that sends removes from the front
        self._warned = False

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Queue numbers at a step; they are sent every few seconds, and when the run ends."""
        if self.id is not None:
            now = time.time_ns() // 1_000_000
            self._waiting += [Metric(key, float(value), now, step) for key, value in values.items()]

    def set_tags(self, tags: Mapping[str, Any]) -> None:
        """Set tags of the run."""
        self._send(lambda client, run_id: client.log_batch(run_id, tags=_tags(tags)))

    def log_artifact(self, path: Path) -> None:
        """Keep a copy of a file."""
        self._send(lambda client, run_id: client.log_artifact(run_id, str(path)))

    def log_json(self, value: Any, name: str) -> None:
        """Keep a JSON-able value as the artifact `name`."""
        self._send(lambda client, run_id: client.log_text(run_id, json.dumps(value, indent=2), name))

    def warn(self, error: Exception) -> None:
        """Say once in a run's life that the store fails, and what is lost by it."""
        if self._warned:
            return
        self._warned = True
        if self.id is None:
            lost = "this run is not tracked and its policy cannot be registered"
        else:
            lost = "what is logged meanwhile is lost there, except metrics if it recovers before the run ends"
        logger.warning("%s: %s. Files under data/ are complete.", failure(self.tracking_uri, error), lost)

    def _send(self, request: Callable[[MlflowClient, str], object]) -> bool:
        """Make a request; whether the store took it. Whatever breaks, the stage goes on."""
        if self._client is None or self.id is None:
            return False
        try:
            request(self._client, self.id)
        except Exception as error:
            self.warn(error)
            return False
        return True

    def _send_waiting(self) -> bool:
        while batch := self._waiting[:BATCH]:
            if not self._send(partial(MlflowClient.log_batch, metrics=batch)):
                return False
            del self._waiting[: len(batch)]
        return True

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Sample the machine and send what waits: in a thread, more and more rarely while the store is away, and at the end."""
        if self._info is None:
            yield
            return
        started, ended, system = self._info.start_time / 1000, threading.Event(), self._system

        def sample() -> None:
            with suppress(Exception):  # a GPU that cannot be read is no reason to stop
                for monitor in system.monitors:
                    monitor.clear_metrics()
                system.collect_metrics()
                values = {f"system/{key}": value for key, value in system.aggregate_metrics().items()}
                self.log_metrics(int(time.time() - started), values)

        def work() -> None:
            pause = system.sampling_interval
            while not ended.wait(pause):
                sample()
                pause = system.sampling_interval if self._send_waiting() else min(2 * pause, 300)

        thread = threading.Thread(target=work, name="tracking", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            sample()
            self._send_waiting()


@contextmanager
def start_run(
    stage: str, *, name: str, params: Mapping[str, Any], tags: Mapping[str, Any], tracking_uri: str, resume: str | None = None
) -> Iterator[Run]:
    """Track one stage: FINISHED at the end, FAILED on an exception, KILLED on Ctrl-C or SIGTERM (which then raises SystemExit).

    `params` are nested, and logged flat with dots. `tags` name dataset, seed, scale and dataset_digest; stage, dvc_stage,
    git_commit and git_dirty are added. `resume` is the id of an earlier run to go on with, if the store still has it.
    """
    assert {"dataset", "seed", "scale", "dataset_digest"} <= tags.keys()
    commit, dirty = git_state()
    key = "-".join(str(tags[part]) for part in ("dataset", "seed", "ablation") if part in tags)
    tags = {"stage": stage, "dvc_stage": f"{stage}@{key}", "git_commit": commit, "git_dirty": dirty, **tags}
    with _sigterm_raises():
        run = Run(tracking_uri)
        try:
            client = connect(tracking_uri)
            info = _existing_run(client, resume) if resume else None
            if info is None:
                info = client.create_run(_experiment(client).experiment_id, run_name=name).info
                flat = [Param(key, str(value)) for key, value in _leaves(params)]
                for start in range(0, len(flat), 100):  # MLflow's limit for one request
                    client.log_batch(info.run_id, params=flat[start : start + 100])
            else:
                client.update_run(info.run_id, status="RUNNING")
            client.log_batch(info.run_id, tags=_tags(tags))
            run = Run(tracking_uri, client, info)
        except Exception as error:
            run.warn(error)
        status = "FINISHED"
        try:
            with run._running():
                yield run
        except Exception:
            status = "FAILED"
            raise
        except BaseException:
            status = "KILLED"
            raise
        finally:
            run._send(lambda client, run_id: client.set_terminated(run_id, status))


def lineage(stage: str, run: Run, dataset_digest: str) -> dict[str, Any]:
    """What run.json holds beside the weights, so that it survives a restore from DVC's cache."""
    packages = {"torch": "torch", "numpy": "numpy", "gymnasium": "gymnasium", "mujoco": "mujoco", "tap": "tap-planner"}
    return {
        "run_id": run.id,
        "git_commit": git_state()[0],
        "dataset_digest": dataset_digest,
        "versions": {name: importlib.metadata.version(package) for name, package in packages.items()},
        "stage": stage,
    }


def git_state() -> tuple[str, bool]:
    """The commit checked out, "unknown" outside a git repository, and whether code or params differ from it."""

    def git(*arguments: str) -> str:
        try:
            return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return ""

    # A running pipeline changes metrics and dvc.lock, which says nothing about the code.
    return git("rev-parse", "HEAD") or "unknown", bool(git("status", "--porcelain", "--", "tap", "pipelines", "params.yaml"))


def connect(tracking_uri: str) -> MlflowClient:
    """A client of the store, which from now on is MLflow's default in this process; makes store and experiment if new."""
    mlflow.set_tracking_uri(tracking_uri)
    file = _sqlite_file(tracking_uri)
    if file is None:
        return MlflowClient()
    # Processes that make the tables of one new file at the same time break each other.
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        client = MlflowClient()
        _experiment(client, artifacts=(file.parent / "mlartifacts").as_uri())
        return client
    finally:
        os.close(folder)


def _existing_run(client: MlflowClient, run_id: str) -> RunInfo | None:
    run = unless_missing(lambda: client.get_run(run_id))
    return run.info if run and run.info.lifecycle_stage == "active" else None


def _experiment(client: MlflowClient, artifacts: str | None = None) -> Experiment:
    found = client.get_experiment_by_name(EXPERIMENT)
    if found is None:
        try:
            client.create_experiment(EXPERIMENT, artifact_location=artifacts)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":  # another process was faster
                raise
        found = client.get_experiment_by_name(EXPERIMENT)
    assert found is not None
    return found


def unless_missing(request: Callable[[], T]) -> T | None:
    try:
        return request()
    except MlflowException as error:
        if error.error_code in MISSING:
            return None
        raise


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Turn SIGTERM into SystemExit, so that the run can be closed; a handler that someone else has set is left alone."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _tags(tags: Mapping[str, Any]) -> list[RunTag]:
    return [RunTag(key, str(value)) for key, value in tags.items()]


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _sqlite_file(tracking_uri: str) -> Path | None:
    scheme, _, file = tracking_uri.partition(":///")
    return Path(file.split("?")[0]).resolve() if scheme == "sqlite" else None


def failure(tracking_uri: str, error: Exception) -> str:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return public(f"MLflow at {tracking_uri} failed ({reason})")


def public(text: str) -> str:
    """A text without the users and passwords in its URIs."""
    return re.sub(r"//[^/@\s]*@", "//", text)
