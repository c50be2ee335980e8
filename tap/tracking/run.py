"""Runs: one for each training, evaluation, diagnosis and sweep, tracked in MLflow.

An outage of the tracking server never stops or slows a stage: a run writes to a record in the outbox (outbox.py), a thread
delivers the record to MLflow (mlflow_store.py), and what is not delivered when the run ends waits for `tap sync`.

A run is identified by a key made by this project, the tag `run_key` in MLflow.
"""

import importlib.metadata
import json
import logging
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mlflow.environment_variables import MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL
from mlflow.exceptions import MlflowException
from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor
from mlflow.system_metrics.metrics.rocm_monitor import ROCMMonitor

from tap.results import Lineage
from tap.settings import Runtime
from tap.tracking.mlflow_store import Delivery, connect, failure, find_runs, redact_credentials, remedy
from tap.tracking.outbox import Record, record_folders, start_of

DATA_TAGS = {"dataset", "seed", "scale", "dataset_digest"}
PARENTS = ("sweep", "train_evaluate")  # runs with child runs, not necessarily of one dataset
CODE = ("tap", "pipelines", "params.yaml", "dvc.yaml")  # a running pipeline also changes metrics and dvc.lock
MAX_PAUSE = 300  # seconds between two attempts to deliver during an outage

logger = logging.getLogger(__name__)


class Run:
    """A run, created by `start_run`. Its methods never wait for the store, and never raise because of it.

    If the outbox cannot be written, `log_model` and `register` raise OSError: a policy is a result, and without it the stage is
    not complete. The other methods warn once.
    """

    def __init__(self, record: Record, killed: Sequence[Record], tracking_uri: str) -> None:
        self.id = record.key
        self._record, self._tracking_uri = record, tracking_uri
        # This run's record comes first: a fault in another record must not delay it.
        self._deliveries = [Delivery(each, tracking_uri) for each in (record, *killed)]
        self._warned = False

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Log numbers at a step."""
        metrics = {key: float(value) for key, value in values.items()}
        self._write(lambda record: record.append("metrics", step=step, metrics=metrics))

    def set_tags(self, tags: Mapping[str, Any]) -> None:
        """Set tags of the run."""
        self._write(lambda record: record.append("tags", tags=_texts(tags)))

    def log_json(self, value: Any, name: str) -> None:
        """Log a value that JSON can represent as the artifact `name`."""
        self._write(lambda record: record.add_artifact(name, json.dumps(value, indent=2)))

    def log_model(self, save: Callable[[Path], None]) -> None:
        """Log the model that `save` writes, in MLflow's format, into a folder that does not exist yet. Raises OSError."""
        self._record.add_model(save)

    def register(self, name: str, tags: Mapping[str, Any], description: str = "") -> None:
        """Register the logged model as the next version of `name`; `description` is Markdown. Raises OSError."""
        self._record.append("version", name=name, tags=_texts(tags), description=description)

    def _write(self, write: Callable[[Record], None]) -> None:
        try:
            write(self._record)
        except OSError as error:
            self._warn(f"{self._record.folder} cannot be written ({error}): what this run logs will be missing in MLflow.")

    def _warn(self, message: str) -> None:
        if not self._warned:
            logger.warning(message)
        self._warned = True

    def _send(self) -> bool:
        """Deliver what is not stored yet, and remove the records that are stored completely; False if the store failed."""
        for delivery in list(self._deliveries):
            try:
                if delivery.send():
                    delivery.record.remove()
                    self._deliveries.remove(delivery)
            except Exception as error:  # MLflow's, the network's, a database's, a disk's
                self._warn(
                    f"{failure(self._tracking_uri, error)}: {remedy(error)}. What is not delivered when this run ends stays in "
                    f"{delivery.record.folder}: run `tap sync` then. Files under data/ are complete."
                )
                return False
        return True

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Sample the machine's metrics and deliver, in a thread; each failed delivery doubles the pause before the next."""
        interval = float(MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL.get() or 10)  # type: ignore[no-untyped-call]
        started, ended = time.monotonic(), threading.Event()
        monitors = _monitors()

        def sample() -> None:
            self.log_metrics(int(time.monotonic() - started), _sample(monitors))

        def work() -> None:
            pause, next_attempt = interval, started
            while True:
                if time.monotonic() >= next_attempt:
                    pause = interval if self._send() else min(2 * pause, MAX_PAUSE)
                    next_attempt = time.monotonic() + pause
                if ended.wait(interval):
                    return
                sample()
                self._write(Record.flush)

        thread = threading.Thread(target=work, name="tracking", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            sample()

    def _end(self, status: str) -> None:
        """Write the end and deliver for the last time; what fails is left to `tap sync`."""
        self._write(lambda record: record.append("end", status=status))
        self._write(Record.flush)
        self._send()
        for delivery in self._deliveries:
            delivery.record.close()


def _monitors() -> list[Any]:
    """MLflow's monitors of this machine's parts. SystemMetricsMonitor, which combines them, stops permanently in an outage."""
    monitors: list[Any] = []
    for monitor in (CPUMonitor, DiskMonitor, NetworkMonitor, GPUMonitor, ROCMMonitor):
        with suppress(Exception):  # this machine has no such part
            monitors.append(monitor())
    return monitors


def _sample(monitors: Sequence[Any]) -> dict[str, float]:
    values: dict[str, float] = {}
    for monitor in monitors:
        with suppress(Exception):  # a GPU that cannot be read does not stop the run
            monitor.clear_metrics()
            monitor.collect_metrics()
            values |= {f"system/{key}": value for key, value in monitor.aggregate_metrics().items()}
    return values


@contextmanager
def start_run(
    stage: str,
    *,
    name: str,
    params: Mapping[str, Any],
    tags: Mapping[str, Any],
    runtime: Runtime,
    resume: str | None = None,
) -> Iterator[Run]:
    """Track one stage: FINISHED at the end, FAILED on an exception, KILLED on Ctrl-C or SIGTERM (which then raises SystemExit).

    `params` are nested, and logged flat with dots. `tags` have dataset, seed, scale and dataset_digest, which only the parents
    "sweep" and "train_evaluate" may omit; stage, dvc_stage, git_commit and git_dirty are added. `runtime` has the store, the
    outbox, and the parent and flow run that this run belongs to. `resume` is the id of an earlier run to continue. Earlier runs
    of the same dvc_stage whose process was killed are ended as KILLED.
    Raises ValueError if the outbox cannot be written.
    """
    assert stage in PARENTS or tags.keys() >= DATA_TAGS
    all_tags = _all_tags(stage, tags, runtime)
    with _sigterm_raises():
        try:
            record = Record.create(runtime.outbox, resume or uuid.uuid4().hex)
            flat = {param: str(value) for param, value in _leaves(params)}
            record.append("start", name=name, parent=runtime.parent_run, params=flat, tags=all_tags)
            record.flush()
        except OSError as error:
            remedy = "free some space and allow writing there, or set TAP_OUTBOX to another folder; then run again"
            raise ValueError(f"{runtime.outbox} cannot be written ({error.strerror}): {remedy}") from None
        run = Run(record, _killed(runtime.outbox, all_tags["dvc_stage"], record.key), runtime.tracking_uri)
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
            run._end(status)


def _all_tags(stage: str, tags: Mapping[str, Any], runtime: Runtime) -> dict[str, str]:
    commit, dirty = git_state()
    key = "-".join(str(tags[part]) for part in ("dataset", "seed", "ablation", "method") if part in tags)
    dvc_stage = f"{stage}@{key}" if key else stage
    all_tags = {"stage": stage, "dvc_stage": dvc_stage, "git_commit": commit, "git_dirty": dirty, **tags}
    all_tags |= {tag: value for tag in ("parent_run", "flow_run") if (value := getattr(runtime, tag))}
    return _texts(all_tags)


def _killed(outbox: Path, dvc_stage: str, except_key: str) -> list[Record]:
    """The records of a stage's killed runs, locked by this process and with an end."""
    found = []
    for folder in record_folders(outbox):
        record = None
        try:
            start = start_of(folder)
            if folder.name == except_key or start is None or start["tags"]["dvc_stage"] != dvc_stage:
                continue
            if record := Record.take(folder):
                record.end_if_killed()
                found.append(record)
        except (ValueError, OSError) as error:  # an error of `tap sync`, but only a warning of a stage
            logger.warning("%s", error)
            if record:
                record.close()
    return found


@dataclass(frozen=True)
class Delivered:
    """The outcome of `sync` for one record; `reason` says why it was not delivered."""

    run: str
    outcome: Literal["delivered", "in use", "failed"]
    reason: str = ""


def sync(runtime: Runtime) -> Iterator[Delivered]:
    """Deliver the records of all runs in the outbox that have ended or were killed, in the order in which they started.

    Records locked by another process, whose run continues or which delivers them, are skipped. Raises ValueError if the
    store is down; the records stay in the outbox.
    """
    for folder in record_folders(runtime.outbox):
        record, run = None, folder.name
        try:
            record = Record.take(folder)
            start = start_of(folder)
            run = f"{start['name']} ({folder.name})" if start else folder.name
            if record is None:
                if start:
                    yield Delivered(run, "in use", "its run continues, or another process delivers it")
            elif start is None:  # the process died before it logged anything
                record.remove()
            else:
                record.end_if_killed()
                Delivery(record, runtime.tracking_uri).send()
                record.remove()
                yield Delivered(run, "delivered")
        except Exception as error:  # MLflow's, the network's, a database's, a disk's, a damaged record's
            try:
                connect(runtime.tracking_uri)
            except Exception as outage:
                raise ValueError(
                    f"{failure(runtime.tracking_uri, outage)}: nothing is lost, the rest stays in {runtime.outbox}; "
                    f"{remedy(outage)}, then run `tap sync` again"
                ) from None
            yield Delivered(run, "failed", str(error))
        finally:
            if record:
                record.close()


def end_runs(tracking_uri: str, flow_run: str, status: str = "KILLED") -> int:
    """End all runs of a flow run that are RUNNING in MLflow, as after the loss of their machine; returns their number.

    Raises ValueError if the store is down.
    """
    try:
        client = connect(tracking_uri)
        running = find_runs(client, f"tags.flow_run = '{flow_run}' and attributes.status = 'RUNNING'")
        for run in running:
            client.set_terminated(run.info.run_id, status)
    except MlflowException as error:
        raise ValueError(f"{failure(tracking_uri, error)}: {remedy(error)}") from error
    return len(running)


def page(tracking_uri: str, key: str) -> str | None:
    """The URL of a run's page in MLflow; None if the store is not a server, is down, or does not have the run yet."""
    if not tracking_uri.startswith("http"):
        return None
    try:
        (run,) = find_runs(connect(tracking_uri), f"tags.run_key = '{key}'")
    except (MlflowException, ValueError):
        return None
    return f"{redact_credentials(tracking_uri)}/#/experiments/{run.info.experiment_id}/runs/{run.info.run_id}"


def lineage(stage: str, run: Run, dataset_digest: str, minutes: float | None) -> Lineage:
    """Where the weights that a run trained in so many minutes come from."""
    packages = {"torch": "torch", "numpy": "numpy", "gymnasium": "gymnasium", "mujoco": "mujoco", "tap": "tap-planner"}
    versions = {name: importlib.metadata.version(package) for name, package in packages.items()}
    return Lineage(
        run_id=run.id,
        git_commit=git_state()[0],
        dataset_digest=dataset_digest,
        versions=versions,
        stage=stage,
        minutes=minutes,
    )


def git_state() -> tuple[str, bool | Literal["unknown"]]:
    """The commit checked out, and whether code or params differ from it.

    Both are "unknown" where git cannot tell: without a repository, in another user's, or in one that does not contain the code.
    """

    def git(*arguments: str) -> str | None:
        try:
            return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return None

    commit, tracked = git("rev-parse", "--verify", "HEAD"), git("ls-files", "--", *CODE)
    changes = git("status", "--porcelain", "--", *CODE)
    if not commit or not tracked or changes is None:
        return "unknown", "unknown"
    return commit, bool(changes)


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Turn SIGTERM into SystemExit, so that the run can be ended. A handler that is set already is kept."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _texts(tags: Mapping[str, Any]) -> dict[str, str]:
    return {key: str(value) for key, value in tags.items()}


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
