"""Runs of lost workers, on a real Prefect server: a run with a heartbeat is not reaped."""

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import State
from prefect.events import emit_event
from prefect.states import Cancelling, Completed, Pending, Running

from pipelines.orchestration.reap import ATTEMPTS, HEARTBEAT, TRAIN_EVALUATE, reap_lost_runs, runs_with_heartbeat
from tap.settings import Runtime
from tap.tracking import run as tracking

pytestmark = [pytest.mark.xdist_group("flow"), pytest.mark.usefixtures("prefect_server")]
TAGS = {"dataset": "a", "seed": 0, "scale": "cpu", "dataset_digest": "abc"}


@flow(name=TRAIN_EVALUATE)
def stand_in(dataset: str, seed: int) -> None: ...


@pytest.fixture
def client() -> Iterator[SyncPrefectClient]:
    with get_client(sync_client=True) as client:
        yield client


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    return uri


def start(client: SyncPrefectClient, *states: State) -> UUID:
    """A flow run that goes through these states."""
    run = client.create_flow_run(stand_in, parameters={"dataset": "a", "seed": 0})
    for state in states:
        client.set_flow_run_state(run.id, state, force=True)
    return run.id


def state(client: SyncPrefectClient, run: UUID) -> str:
    found = client.read_flow_run(run).state
    assert found is not None and found.name is not None
    return found.name


def test_only_runs_without_a_heartbeat_are_reaped(client: SyncPrefectClient, store: str) -> None:
    lost, alive, cancelling, done = (
        start(client, *states) for states in ([Running()], [Running()], [Running(), Cancelling()], [Running(), Completed()])
    )
    hopeless = start(client, *[Running() for _ in range(ATTEMPTS)])
    starting = start(client, Pending())
    here = Runtime(tracking_uri=store, flow_run=str(lost))
    with tracking.start_run("train_evaluate", name="a", params={}, tags=TAGS, runtime=here):
        time.sleep(2)
        emit_event(event=HEARTBEAT, resource={"prefect.resource.id": f"prefect.flow-run.{alive}"})
        emitted = datetime.now(UTC)
        wait_until(lambda: alive in runs_with_heartbeat(client, [alive], emitted - timedelta(seconds=1)))
        wait_until(lambda: tracking.find_runs(tracking.connect(store), f"tags.flow_run = '{lost}'"))
        lines = reap_lost_runs(client, after=(datetime.now(UTC) - emitted).total_seconds() + 1)
        (found,) = tracking.find_runs(tracking.connect(store), f"tags.flow_run = '{lost}'")
        assert found.info.status == "KILLED"
    assert state(client, lost) == "AwaitingRetry" and state(client, alive) == "Running"
    assert state(client, cancelling) == "Cancelled" and state(client, hopeless) == "Crashed"
    assert state(client, done) == "Completed" and state(client, starting) == "Pending"
    assert len(lines) == 3 and any("runs ended in MLflow: 1" in line for line in lines)


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)
