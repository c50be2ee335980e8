"""Lost workers: without `reap` the run of a machine that is gone would stay Running in Prefect forever.

A run's process sends Prefect a heartbeat every 30 seconds. A run without one for `after` seconds is returned to its work pool,
where another worker takes it. The new worker continues from the results in the DVC remote, and from the last checkpoint if
TAP_CHECKPOINTS is a folder that both workers can read.
"""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated
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
from pydantic import Field

from tap.settings import Runtime
from tap.tracking import run as tracking

TRAIN_EVALUATE = "tap-train-evaluate"
HEARTBEAT = "prefect.flow-run.heartbeat"
AFTER = 90  # seconds without a heartbeat: three were missed
STARTING = 600  # seconds from a run's submission by its worker to its first heartbeat, at most
ATTEMPTS = 3  # a run that has lost that many workers may be the cause


@flow(name="tap-reap")
def reap(after: Annotated[float, Field(ge=60, allow_inf_nan=False)] = AFTER) -> list[str]:
    """Return the runs of lost workers to their work pool; the result has one line for each."""
    with get_client(sync_client=True) as client:
        return reap_lost_runs(client, after)


def reap_lost_runs(client: SyncPrefectClient, after: float) -> list[str]:
    """Reschedule each run of `train_evaluate` without a heartbeat for `after` seconds, and end its runs in MLflow.

    A run that was being cancelled becomes Cancelled, one that has lost three workers Crashed.
    """
    lines = []
    for run in _lost(client, after):
        assert run.state is not None
        if run.state.type == StateType.CANCELLING:
            state: State = Cancelled(message="its worker was lost")
        elif run.run_count < ATTEMPTS:
            state = AwaitingRetry(scheduled_time=datetime.now(UTC), message="its worker was lost; any worker continues it")
        else:
            state = Crashed(message=f"it has lost {run.run_count} workers; `tap sweep` starts it again")
        client.set_flow_run_state(run.id, state, force=True)
        try:
            ended = f"runs ended in MLflow: {tracking.end_runs(Runtime().tracking_uri, str(run.id))}"
        except ValueError as error:  # the store is down, and will still show them as running
            ended = str(error)
        lines.append(f"{run.name}: no heartbeat for {after:.0f} s, now {state.name}; {ended}")
    return lines


def _lost(client: SyncPrefectClient, after: float) -> list[FlowRun]:
    running = FlowRunFilterStateType(any_=[StateType.PENDING, StateType.RUNNING, StateType.CANCELLING])
    runs = client.read_flow_runs(
        flow_filter=FlowFilter(name=FlowFilterName(any_=[TRAIN_EVALUATE])),
        flow_run_filter=FlowRunFilter(state=FlowRunFilterState(type=running)),
    )
    now = datetime.now(UTC)
    alive = runs_with_heartbeat(client, [run.id for run in runs], now - timedelta(seconds=after))
    lost = []
    for run in runs:
        assert run.state is not None
        timeout = STARTING if run.state.type == StateType.PENDING else after
        if run.id not in alive and run.state.timestamp < now - timedelta(seconds=timeout):
            lost.append(run)
    return lost


def runs_with_heartbeat(client: SyncPrefectClient, runs: Sequence[UUID], since: datetime) -> set[UUID]:
    """Those of the flow runs that have sent a heartbeat since then."""
    names = {f"prefect.flow-run.{run}": run for run in runs}
    if not names:
        return set()
    page = client.read_events(
        EventFilter(
            occurred=EventOccurredFilter(since=since),
            event=EventNameFilter(name=[HEARTBEAT]),
            resource=EventResourceFilter(id=list(names)),
        ),
        limit=50,  # Prefect's maximum for one request
    )
    found: set[UUID] = set()
    while True:
        found |= {names[event.resource.id] for event in page.events}
        if not page.next_page:
            return found
        page = client.read_events_page(str(page.next_page))
