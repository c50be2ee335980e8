"""MLflow's store: the connection to it, and the delivery of records to it.

In an outage of the tracking server a delivery raises what MLflow raises, and the next attempt continues where it failed.
"""

import re
import shutil
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar

import mlflow
from mlflow import MlflowClient
from mlflow.entities import Experiment, LoggedModelOutput, LoggedModelStatus, Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException
from mlflow.store.db.utils import _initialize_tables, create_sqlalchemy_engine

from tap.files import locked
from tap.tracking.outbox import Record

EXPERIMENT = "tap"
ARTIFACTS = "mlartifacts"  # the folder beside an SQLite database
ARTIFACT_COLUMNS = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "storage_location"),
    ("model_versions", "source"),
)
MAX_METRICS, MAX_PARAMS = 1000, 100  # MLflow's limits for one request
MISSING = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")  # MLflow's error codes; the second for a missing alias

T = TypeVar("T")


def connect(tracking_uri: str) -> MlflowClient:
    """A client of the store, which also becomes MLflow's default in this process; creates store and experiment if missing."""
    mlflow.set_tracking_uri(tracking_uri)
    file = _sqlite_file(tracking_uri)
    if file is None:
        client = MlflowClient(tracking_uri)
        experiment(client)
        return client
    # Two processes that create the tables of one new file at the same time both fail.
    with locked(file.parent):
        if not file.exists():
            _create(file)
        client, artifacts = MlflowClient(tracking_uri), (file.parent / ARTIFACTS).as_uri()
        stored = experiment(client, artifacts).artifact_location
        if stored != artifacts and stored.startswith("file:") and stored.endswith(f"/{ARTIFACTS}"):
            _move_artifacts(file, stored, artifacts)
        return client


def _create(file: Path) -> None:
    """A new store with all its tables. MLflow creates them in hundreds of steps, and cannot go on if one fails."""
    folder = file.with_name(f".{file.name}.tmp")
    shutil.rmtree(folder, ignore_errors=True)  # what a killed process has left
    folder.mkdir()
    try:
        engine = create_sqlalchemy_engine(f"sqlite:///{folder / file.name}")  # type: ignore[no-untyped-call]
        try:
            _initialize_tables(engine)  # type: ignore[no-untyped-call]
        finally:
            engine.dispose()
        (folder / file.name).rename(file)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _move_artifacts(file: Path, old: str, new: str) -> None:
    """Replace the artifacts' place in a database whose folder was moved: MLflow stores it with every run and model."""
    with closing(sqlite3.connect(file)) as database, database:
        for table, column in ARTIFACT_COLUMNS:
            database.execute(
                f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE substr({column}, 1, ?) = ?",
                (new, len(old) + 1, len(old), old),
            )


def experiment(client: MlflowClient, artifacts: str | None = None) -> Experiment:
    """The experiment of all runs, created if missing."""
    found = client.get_experiment_by_name(EXPERIMENT)
    if found is None:
        unless(("RESOURCE_ALREADY_EXISTS",), lambda: client.create_experiment(EXPERIMENT, artifact_location=artifacts))
        found = client.get_experiment_by_name(EXPERIMENT)
    assert found is not None
    return found


def find_runs(client: MlflowClient, condition: str) -> list[Run]:
    """All runs, except deleted ones, that match a condition in MLflow's search syntax."""
    return list(client.search_runs([experiment(client).experiment_id], condition, max_results=50_000))


class Delivery:
    """The delivery of one record to a store.

    A record may be delivered again, in part or as a whole, since a process can die between a request and its response. This
    stores nothing twice: run, model and version are tagged with the run's key and looked up by it before they are created;
    params, tags, artifacts and end are overwritten with equal ones; MLflow drops a metric of equal name, time, step and value.
    """

    def __init__(self, record: Record, tracking_uri: str) -> None:
        self.record, self._tracking_uri = record, tracking_uri
        self._client: MlflowClient | None = None
        self._run_id = ""  # in MLflow
        self._position, self._ended = 0, False  # in the record: all before this is stored; whether its last event is an end

    def send(self) -> bool:
        """Send the events that are not stored yet; True once the run's end is stored.

        Raises whatever MLflow raises; the next call continues from there.
        """
        self._client = self._client or connect(self._tracking_uri)
        waiting: list[Metric] = []
        position = self._position
        for after, event in self.record.events(position):
            if event["event"] != "metrics" or len(waiting) >= MAX_METRICS:
                self._send_metrics(self._client, waiting, position)
                waiting = []
            if event["event"] == "metrics":
                waiting += [Metric(key, value, event["time"], event["step"]) for key, value in event["metrics"].items()]
            else:
                self._send_event(self._client, event)
                self._position, self._ended = after, event["event"] == "end"
            position = after
        self._send_metrics(self._client, waiting, position)
        return self._ended

    def _send_metrics(self, client: MlflowClient, metrics: list[Metric], position: int) -> None:
        for start in range(0, len(metrics), MAX_METRICS):
            client.log_batch(self._run_id, metrics=metrics[start : start + MAX_METRICS])
        self._position = position

    def _send_event(self, client: MlflowClient, event: Mapping[str, Any]) -> None:
        match event["event"]:
            case "start":
                self._begin(client, event)
            case "tags":
                client.log_batch(self._run_id, tags=_tags(event["tags"]))
            case "artifact":
                client.log_artifact(self._run_id, str(self.record.folder / "artifacts" / event["name"]))
            case "model":
                self._log_model(client)
            case "version":
                self._register(client, event)
            case "end":
                if not self._ended_after(client.get_run(self._run_id), event):
                    client.set_terminated(self._run_id, event["status"], event["time"])
            case unknown:
                raise ValueError(f"{self.record.folder}: unknown event {unknown!r}: was it written by a newer version of tap?")

    def _begin(self, client: MlflowClient, event: Mapping[str, Any]) -> None:
        run = self._find_or_create_run(client, event)
        self._run_id = run.info.run_id
        params = [Param(name, value) for name, value in event["params"].items()]
        for start in range(0, len(params), MAX_PARAMS):
            client.log_batch(self._run_id, params=params[start : start + MAX_PARAMS])
        client.log_batch(self._run_id, tags=_tags(event["tags"]))
        if run.info.status != "RUNNING" and not self._ended_after(run, event):
            client.update_run(self._run_id, status="RUNNING")
        self._link_family(client, event["parent"])

    def _find_or_create_run(self, client: MlflowClient, event: Mapping[str, Any]) -> Run:
        key, parent = self.record.key, event["parent"]
        same_key = f"tags.run_key = '{key}'"
        found = find_runs(client, same_key)
        if not found:
            tags = {"run_key": key} | ({"parent_run": parent} if parent else {})
            client.create_run(experiment(client).experiment_id, event["time"], tags, event["name"])
            found = find_runs(client, same_key)
        run, *duplicates = found
        for duplicate in duplicates:  # created by a request that MLflow's client sent again
            client.delete_run(duplicate.info.run_id)
        return run

    def _link_family(self, client: MlflowClient, parent: str | None) -> None:
        """Link the run to its parent and children. They are delivered in any order, so the later of two makes the link."""
        for found_parent in find_runs(client, f"tags.run_key = '{parent}'") if parent else ():
            client.set_tag(self._run_id, "mlflow.parentRunId", found_parent.info.run_id)
        for child in find_runs(client, f"tags.parent_run = '{self.record.key}'"):
            client.set_tag(child.info.run_id, "mlflow.parentRunId", self._run_id)

    @staticmethod
    def _ended_after(run: Run, event: Mapping[str, Any]) -> bool:
        """Whether the stored end is later, as when another machine took the run over from a lost one."""
        return run.info.end_time is not None and run.info.end_time > event["time"]

    def _log_model(self, client: MlflowClient) -> None:
        if self._model_id(client) is None:
            created = client.create_logged_model(
                experiment(client).experiment_id, "policy", self._run_id, {"run_key": self.record.key}
            )
            client.log_model_artifacts(created.model_id, str(self.record.folder / "model"))
            client.finalize_logged_model(created.model_id, LoggedModelStatus.READY)
        model_id = self._model_id(client)
        assert model_id is not None
        if not self._is_output(client, model_id):
            try:
                client.log_outputs(self._run_id, [LoggedModelOutput(model_id, step=0)])
            except MlflowException:  # as when MLflow's client sent the request again: the second one is refused
                if not self._is_output(client, model_id):
                    raise

    def _is_output(self, client: MlflowClient, model_id: str) -> bool:
        outputs = client.get_run(self._run_id).outputs
        return outputs is not None and model_id in [output.model_id for output in outputs.model_outputs]

    def _model_id(self, client: MlflowClient) -> str | None:
        """The id of this run's delivered model; deletes the remains of failed attempts."""
        found = client.search_logged_models([experiment(client).experiment_id], f"tags.run_key = '{self.record.key}'")
        ready = sorted(model.model_id for model in found if model.status == LoggedModelStatus.READY)
        for model in found:
            if model.model_id not in ready[:1]:
                client.delete_logged_model(model.model_id)
        return ready[0] if ready else None

    def _register(self, client: MlflowClient, event: Mapping[str, Any]) -> None:
        name, model_id = event["name"], self._model_id(client)
        if not self._versions(client, name):
            unless(("RESOURCE_ALREADY_EXISTS",), lambda: client.create_registered_model(name))
            client.create_model_version(
                name,
                f"models:/{model_id}",
                self._run_id,
                tags={"run_key": self.record.key} | event["tags"],
                description=event["description"],
                model_id=model_id,
            )
        for duplicate in self._versions(client, name)[1:]:  # created by a request that MLflow's client sent again
            unless_missing(partial(client.delete_model_version, name, duplicate))

    def _versions(self, client: MlflowClient, name: str) -> list[str]:
        """The numbers of this run's versions of a registered model, oldest first."""
        found = client.search_model_versions(f"name = '{name}' and tags.run_key = '{self.record.key}'")
        return sorted((str(version.version) for version in found), key=int)


def unless(error_codes: tuple[str, ...], request: Callable[[], T]) -> T | None:
    """The response to a request; None if it fails with one of these MLflow error codes."""
    try:
        return request()
    except MlflowException as error:
        if error.error_code in error_codes:
            return None
        raise


def unless_missing(request: Callable[[], T]) -> T | None:
    """The response to a request; None if the requested object does not exist."""
    return unless(MISSING, request)


def failure(tracking_uri: str, error: Exception) -> str:
    """A sentence about an error of the store, without its full stop."""
    match _http_status(error):
        case HTTPStatus.UNAUTHORIZED:
            return redact_credentials(f"MLflow at {tracking_uri} refused the login")
        case HTTPStatus.FORBIDDEN:
            return redact_credentials(f"MLflow at {tracking_uri} does not permit this to the user that is logged in")
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return redact_credentials(f"MLflow at {tracking_uri} failed ({reason})")


def remedy(error: Exception) -> str:
    """What to do about an error of the store, to follow a colon."""
    match _http_status(error):
        case HTTPStatus.UNAUTHORIZED:
            return "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
        case HTTPStatus.FORBIDDEN:
            return "ask who runs the server for the permission"
    return "check MLFLOW_TRACKING_URI, and that the server runs"


def _http_status(error: Exception) -> int | None:
    """The status of a server's response: MLflow's client raises errors of its own, and for artifacts those of requests."""
    if isinstance(error, MlflowException):
        return int(error.get_http_status_code())  # type: ignore[no-untyped-call]
    return getattr(getattr(error, "response", None), "status_code", None)


def redact_credentials(text: str) -> str:
    """A text without the users and passwords in its URIs."""
    return re.sub(r"//[^/@\s]*@", "//", text)


def _tags(tags: Mapping[str, str]) -> list[RunTag]:
    return [RunTag(key, value) for key, value in tags.items()]


def _sqlite_file(tracking_uri: str) -> Path | None:
    scheme, _, file = tracking_uri.partition(":///")
    return Path(file.split("?")[0]).resolve() if scheme == "sqlite" else None
