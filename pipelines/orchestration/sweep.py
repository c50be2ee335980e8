"""Sweeps: each dataset and seed of params.yaml as a separate run, by workers on any number of machines.

A worker runs `train_evaluate` in its clone (worker.py). `sweep` starts one for each combination, shows their progress, returns
the runs of lost workers to their pool (reap.py), and at the end restores all results here from the DVC remote.
"""

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

from httpx import TransportError
from prefect import flow, get_client, get_run_logger, runtime, task
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.deployments import run_deployment
from prefect.settings import PREFECT_UI_URL
from prefect.states import Cancelled, Cancelling, Completed, Failed
from pydantic import PositiveInt

from pipelines.orchestration import gpus as slots
from pipelines.orchestration.flow import DATA, conclude, run_stage
from pipelines.orchestration.reap import AFTER, TRAIN_EVALUATE, reap_lost_runs
from pipelines.orchestration.repro import PARAMS, Instance, dvc, instances, terminal_or_log
from pipelines.orchestration.worker import COMMIT, end_with_worker, require_remote, require_server, require_workers, use_remote
from tap.reporting.rows import Row, table_rows
from tap.results import Evaluation, TrainingMetrics, instance_key, metrics_path
from tap.settings import RunKey, Runtime, load_params
from tap.tracking import run as tracking

POLL, POLL_WHEN_DOWN = 5, 30  # seconds between two requests to Prefect's server, and while it is down
CANCEL_WAIT = 60  # seconds for workers to end the runs of a cancelled sweep
TAG = "tap-sweep"
Pool = Literal["cpu", "gpu"]
UNDER_WAY = [StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING]


class StageFailed(Exception):
    """A stage of a combination failed; its log has the reason."""


@flow(name=TRAIN_EVALUATE, flow_run_name="{dataset}-{seed}")
def train_evaluate(dataset: str, seed: int, gpus: PositiveInt = 1, parent_run: RunKey | None = None) -> State[Any]:
    """One dataset and seed on a worker: results in the DVC remote are restored, all others computed and pushed there.

    Its training shares `gpus` GPUs, if the worker has any. `parent_run` is the id of the sweep's run.
    """
    end_with_worker()
    flow_run, params = str(runtime.flow_run.id), load_params(PARAMS, dataset)
    here = Runtime().model_copy(update={"parent_run": parent_run, "flow_run": flow_run})
    tracked_run = tracking.start_run(
        "train_evaluate",
        name=f"{dataset} seed {seed}",
        params=params.model_dump(mode="json"),
        tags={"dataset": dataset, "seed": seed, "scale": params.scale},
        runtime=here,
    )
    try:
        with slots.take(gpus) as environment, tracked_run as tracked:
            _run_stages(dataset, seed, tracked, here, environment)
    except StageFailed as error:
        return Failed(message=str(error))
    with suppress(ValueError):  # MLflow is still down
        list(tracking.sync(here))  # earlier runs of this clone that MLflow missed
    row = _row(dataset, seed)
    return Completed(message=f"score {_score(row)}, decision {row.latency.median:.0f} ms")


def _run_stages(dataset: str, seed: int, tracked: tracking.Run, here: Runtime, environment: Mapping[str, str]) -> None:
    """Run a combination's stages; the flow run is labelled with the MLflow page and the score as soon as they exist."""
    assert here.flow_run is not None
    environment = {**environment, "TAP_PARENT_RUN": tracked.id, "TAP_FLOW_RUN": here.flow_run}
    for instance in instances([dataset], [seed])[:-1]:  # the last is the report, which the sweep makes
        state = run_stage(instance, shared=True, environment=environment, return_state=True)
        if not state.is_completed():
            raise StageFailed(f"stage {instance} failed: {state.message}")
        if instance.stage == "fetch" and (page := tracking.page(here.tracking_uri, tracked.id)):
            _label(here.flow_run, {"mlflow": page})
        if instance.stage == "evaluate":
            row = _row(dataset, seed)
            tracked.log_metrics(0, _headline(row))
            _label(here.flow_run, {"score": _score(row)})


def _row(dataset: str, seed: int) -> Row:
    """The result of the stage evaluate for one seed."""
    (row,) = table_rows([Evaluation.read(metrics_path(DATA, "evaluate", instance_key(dataset, seed)))])
    return row


def _score(row: Row) -> str:
    return str(row.score) if row.normalized else f"{row.score} (return)"


def _headline(row: Row) -> dict[str, float]:
    """The metrics by which combinations are compared first."""
    result = row.first
    vqvae = TrainingMetrics.read(metrics_path(DATA, "train_vqvae", instance_key(result.dataset, result.seed)))
    values = {
        "normalized_score": result.normalized_score,
        "normalized_score_standard_error": result.normalized_score_standard_error,
        "return_mean": result.return_mean,
        "latency_ms_median": result.latency_ms.median,
        "latency_ms_p95": result.latency_ms.p95,
        "codebook_perplexity": vqvae.codebook_perplexity,
        "vqvae_held_out_loss": vqvae.held_out_loss,
    }
    return {key: value for key, value in values.items() if value is not None}


def _label(flow_run: str, labels: Mapping[str, str]) -> None:
    """Set labels of a flow run, which the sweep reads."""
    with get_client(sync_client=True) as client:
        client.update_flow_run_labels(UUID(flow_run), dict(labels))


@dataclass(frozen=True)
class Combination:
    """One dataset and seed of a sweep, and its flow run."""

    dataset: str
    seed: int
    run: FlowRun
    stage: str = ""  # that is running

    @property
    def ended(self) -> bool:
        return self.run.state is not None and self.run.state.is_final()

    @property
    def done(self) -> bool:
        return self.run.state is not None and self.run.state.is_completed()

    @property
    def status(self) -> str:
        assert self.run.state is not None
        return self.run.state.name or self.run.state.type.value

    @property
    def message(self) -> str:
        return (self.run.state and self.run.state.message) or ""

    def row(self) -> dict[str, str]:
        """A line of the table on Prefect's page."""
        page, tracked = PREFECT_UI_URL.value(), self.run.labels.get("mlflow")
        return {
            "dataset": self.dataset,
            "seed": str(self.seed),
            "status": self.status,
            "stage": "" if self.ended else self.stage,
            "score": str(self.run.labels.get("score", "")),
            "run": f"[{self.run.name}]({page}/runs/flow-run/{self.run.id})",
            "MLflow": f"[metrics]({tracked})" if tracked else "",
            "message": self.message if self.ended and not self.done else "",
        }


@flow(name="tap-sweep")
def sweep(
    datasets: list[str] | None = None,
    seeds: list[int] | None = None,
    pool: Pool = "cpu",
    gpus: PositiveInt = 1,
    promote: bool = True,
) -> State[Any]:
    """Run every one of `datasets` and `seeds` (None: all of params.yaml) on the workers of `pool`, at the commit checked out.

    Combinations that an earlier sweep of this commit has started are taken over; completed ones are restored.
    """
    end_with_worker()
    require_remote()
    commit, chosen = _commit(), instances(datasets, seeds)
    for instance in chosen:  # here, since a user's file may exist on this machine only
        if instance.stage in ("params", "fetch") and not run_stage(instance, shared=True, return_state=True).is_completed():
            return Failed(message=f"stage {instance} failed, for the reason above")
    name = str(runtime.flow_run.name)
    params = {"datasets": [i.dataset for i in chosen if i.stage == "fetch"], "commit": commit, "pool": pool}
    tracked_run = tracking.start_run("sweep", name=f"sweep {name}", params=params, tags={}, runtime=Runtime())
    with get_client(sync_client=True) as client, tracked_run as tracked:
        started = _under_way(client, commit)
        combinations: list[Combination] = []
        try:
            for dataset, seed in [(i.dataset, i.seed) for i in chosen if i.stage == "evaluate"]:
                assert dataset is not None and seed is not None
                flow_run = started.get((dataset, seed)) or _start(dataset, seed, commit, pool, gpus, parent_run=tracked.id)
                combinations.append(Combination(dataset, seed, flow_run))
            combinations = _wait(client, combinations, key=f"sweep-{name}")
        except BaseException:  # cancelled: by Ctrl-C, on Prefect's page, or with its worker
            _cancel(client, combinations)
            raise
        if not _collect(chosen, combinations, promote):
            return Failed(message="the results are in the DVC remote, but could not be restored here, for the reason above")
    failed = [f"{each.dataset}-{each.seed}: {each.status} ({each.message})" for each in combinations if not each.done]
    if failed:
        return Failed(message=f"{len(failed)} of {len(combinations)} failed, `tap sweep` continues them: {'; '.join(failed)}")
    return Completed(message=f"{len(combinations)} done")


def _start(dataset: str, seed: int, commit: str, pool: Pool, gpus: int, parent_run: str) -> FlowRun:
    """Schedule a run of train_evaluate at `commit` for the workers of `pool`."""
    flow_run = run_deployment(
        f"{TRAIN_EVALUATE}/train-evaluate-{pool}",
        parameters={"dataset": dataset, "seed": seed, "gpus": gpus, "parent_run": parent_run},
        job_variables={"env": {COMMIT: commit}},
        flow_run_name=f"{dataset}-{seed}",
        tags=[TAG, commit],
        timeout=0,
    )
    assert isinstance(flow_run, FlowRun)  # not a coroutine, as in an async flow
    return flow_run


def _collect(chosen: Sequence[Instance], combinations: Sequence[Combination], promote: bool) -> bool:
    """Restore the results of the completed combinations here, promote and summarize them; False if the restore failed."""
    done = {(each.dataset, each.seed) for each in combinations if each.done}
    restored = [i for i in chosen if i.stage in ("fetch", "report") or (i.dataset, i.seed) in done] if done else []
    if restored and not restore(restored, return_state=True).is_completed():
        return False
    summary = conclude(restored, promote) if restored else ""
    print(summary)
    create_markdown_artifact(summary, key="results", description="Scores, promotions, and the path of the report")
    return True


@task(task_run_name="restore")
def restore(chosen: Sequence[Instance]) -> State[Any]:
    """Bring the workers' results into this clone; only the report is computed here."""
    show = terminal_or_log(get_run_logger().info)
    results = [str(instance) for instance in chosen if instance.stage != "report"]
    # The report depends on every result of params.yaml; without --single-item, DVC would also compute those that are missing.
    if dvc("repro", "--pull", *results, show=show) or dvc("repro", "--single-item", "report", show=show):
        return Failed(message="for the reason above")
    return Completed()


def _commit() -> str:
    """The commit for the workers. Raises ValueError if this folder has uncommitted changes, or its commit is unknown."""
    commit, dirty = tracking.git_state()
    if dirty == "unknown":
        raise ValueError(
            "git does not tell this folder's commit (`git status` says why), and workers run commits: correct that first"
        )
    if dirty:
        raise ValueError(
            "tap/, pipelines/, params.yaml or dvc.yaml have uncommitted changes: workers run commits, so commit first"
        )
    return commit


def _under_way(client: SyncPrefectClient, commit: str) -> dict[tuple[str, int], FlowRun]:
    """The runs of this commit that have not ended, by dataset and seed."""
    runs = client.read_flow_runs(
        flow_filter=FlowFilter(name=FlowFilterName(any_=[TRAIN_EVALUATE])),
        flow_run_filter=FlowRunFilter(
            tags=FlowRunFilterTags(all_=[TAG, commit]),
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=UNDER_WAY)),
        ),
    )
    return {(run.parameters["dataset"], run.parameters["seed"]): run for run in runs}


def _wait(client: SyncPrefectClient, combinations: Sequence[Combination], key: str) -> list[Combination]:
    """Wait until all have ended; meanwhile reap lost runs, and show changes in the log and in the artifact `key`."""
    log, table, shown = get_run_logger().info, None, [dict[str, str]()] * len(combinations)
    while True:
        try:
            for line in reap_lost_runs(client, AFTER):
                log(line)
            combinations = _refreshed(client, combinations)
            rows = [each.row() for each in combinations]
            done = f"{sum(each.done for each in combinations)} of {len(rows)} done"
            if table is None:
                created = create_table_artifact(rows, key=key, description=done)
                assert isinstance(created, UUID)  # not a coroutine, as in an async flow
                table = created
                log(f"A table of all runs is at {PREFECT_UI_URL.value()}/artifacts/artifact/{table}")
            elif rows != shown:
                client.update_artifact(table, ArtifactUpdate(data=json.dumps(rows), description=done))
        except TransportError as error:
            log(f"Prefect's server does not respond ({error}): trying again in {POLL_WHEN_DOWN} seconds")
            time.sleep(POLL_WHEN_DOWN)
            continue
        for each, row, before in zip(combinations, rows, shown, strict=True):
            if row != before:
                words = (each.status, row["stage"], each.message if each.ended else "")
                log(f"{each.dataset}-{each.seed}: {' '.join(filter(None, words))}")
        shown = rows
        if all(each.ended for each in combinations):
            return list(combinations)
        time.sleep(POLL)


def _refreshed(client: SyncPrefectClient, combinations: Sequence[Combination]) -> list[Combination]:
    ids = FlowRunFilter(id=FlowRunFilterId(any_=[each.run.id for each in combinations]))
    runs = {run.id: run for run in client.read_flow_runs(flow_run_filter=ids)}
    running = TaskRunFilter(state=TaskRunFilterState(type=TaskRunFilterStateType(any_=[StateType.RUNNING])))
    stages = {each.flow_run_id: each.name for each in client.read_task_runs(flow_run_filter=ids, task_run_filter=running)}
    return [replace(each, run=runs[each.run.id], stage=stages.get(each.run.id, "").split("@")[0]) for each in combinations]


def _cancel(client: SyncPrefectClient, combinations: Sequence[Combination]) -> None:
    """Cancel all runs that have not ended, and wait for the workers to end them."""
    for each in _refreshed(client, combinations):
        if not each.ended:
            scheduled = each.run.state is not None and each.run.state.is_scheduled()
            client.set_flow_run_state(each.run.id, Cancelled() if scheduled else Cancelling(), force=True)
    deadline = time.monotonic() + CANCEL_WAIT
    while not all(each.ended for each in _refreshed(client, combinations)) and time.monotonic() < deadline:
        time.sleep(1)


def run(
    datasets: list[str] | None,
    seeds: list[int] | None,
    pool: Literal["cpu", "gpu"],
    gpus: int,
    promote: bool,
    remote: str | None,
) -> None:
    """The command `tap sweep`. Raises ValueError if a combination fails."""
    require_server()
    if remote:
        use_remote(Path(), remote)
    # The flow makes the same checks, but its errors come with a traceback.
    require_remote()
    instances(datasets, seeds)
    _commit()
    require_workers(f"{TRAIN_EVALUATE}/train-evaluate-{pool}", pool)
    state = sweep(datasets, seeds, pool, gpus, promote, return_state=True)
    if not state.is_completed():
        raise ValueError(state.message)
