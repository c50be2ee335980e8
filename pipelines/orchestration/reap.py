"""Runs whose worker was lost: a machine that is gone says nothing, so its run would stay Running for ever.

A run's process tells Prefect every 30 seconds that it lives. One that has not for `after` seconds goes back to its work pool,
where another worker takes it. That goes on from what the DVC remote has, and from the last checkpoint where TAP_CHECKPOINTS
names a folder that both reach.
"""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from uuid import UUID

from prefect import flow, get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.events.filters import EventFilter, EventNameFilter, EventOccurredFilter, EventResourceFilter
from prefect.states import AwaitingRetry, Cancelled, Crashed

from tap.settings import Runtime
from tap.tracking import run as tracking

TRAIN_EVALUATE = "tap-train-evaluate"
HEARTBEAT = "prefect.flow-run.heartbeat"
AFTER = 90  # seconds without a sign of life: three heartbeats missed
STARTING = 600  # seconds that a run may take from a worker's hand to its first heartbeat
ATTEMPTS = 3  # a run that loses so many workers may be why


@flow(name="tap-reap")
def reap(after: float = AFTER) -> list[str]:
    """Give runs of lost workers back to their work pool; what was done, a line for each."""
    with get_client(sync_client=True) as client:
        return reap_lost_runs(client, after)


def reap_lost_runs(client: SyncPrefectClient, after: float) -> list[str]:
    """Reschedule each run of `train_evaluate` that has given no sign of life for `after` seconds, and end its runs in MLflow.

    One that was being cancelled is cancelled, one that loses its worker for the third time has crashed.
    """
    lines = []
    for run in _lost(client, after):
        assert run.state is not None
        if run.state.type == StateType.CANCELLING:
            state: State = Cancelled(message="its worker was lost")
        elif run.run_count < ATTEMPTS:
            state = AwaitingRetry(scheduled_time=datetime.now(UTC), message="its worker was lost; any worker goes on with it")
        else:
            state = Crashed(message=f"it has lost {run.run_count} workers; `tap sweep` starts it again")
        client.set_flow_run_state(run.id, state, force=True)
        try:
            ended = f"runs ended in MLflow: {tracking.end_runs(Runtime().tracking_uri, str(run.id))}"
        except ValueError as error:  # the store is away, and shows them as running for longer
            ended = str(error)
        lines.append(f"{run.name}: no sign of life for {after:.0f} s, now {state.name}; {ended}")
    return lines


def _lost(client: SyncPrefectClient, after: float) -> list[FlowRun]:
    running = FlowRunFilterStateType(any_=[StateType.PENDING, StateType.RUNNING, StateType.CANCELLING])
    runs = client.read_flow_runs(
        flow_filter=FlowFilter(name=FlowFilterName(any_=[TRAIN_EVALUATE])),
        flow_run_filter=FlowRunFilter(state=FlowRunFilterState(type=running)),
    )
    now = datetime.now(UTC)
    alive = signs_of_life(client, [run.id for run in runs], now - timedelta(seconds=after))
    lost = []
    for run in runs:
        assert run.state is not None
        patience = STARTING if run.state.type == StateType.PENDING else after
        if run.id not in alive and run.state.timestamp < now - timedelta(seconds=patience):
            lost.append(run)
    return lost


def signs_of_life(client: SyncPrefectClient, runs: Sequence[UUID], since: datetime) -> set[UUID]:
    """Which of these flow runs have told since then that they live."""
    names = {f"prefect.flow-run.{run}": run for run in runs}
    if not names:
        return set()
    page = client.read_events(
        EventFilter(
            occurred=EventOccurredFilter(since=since),
            event=EventNameFilter(name=[HEARTBEAT]),
            resource=EventResourceFilter(id=list(names)),
        ),
        limit=50,  # the most that a server may give at once
    )
    found: set[UUID] = set()
    while True:
        found |= {names[event.resource.id] for event in page.events}
        if not page.next_page:
            return found
        page = client.read_events_page(str(page.next_page))
