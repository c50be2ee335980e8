"""The Prefect flow of `tap run`: DVC determines what is stale; Prefect runs it, shows it and stops it.

`pipeline` brings everything in this folder up to date. `promote` does on a worker what `tap promote` does; sweep.py has the
other flows of a team.
"""

import io
import os
import queue
import signal
import threading
from collections.abc import Mapping, Sequence, Set
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import psutil
from httpx import TransportError
from prefect import flow, get_client, get_run_logger, task
from prefect.artifacts import create_markdown_artifact
from prefect.client.schemas.objects import State
from prefect.futures import PrefectFuture
from prefect.states import Completed, Failed
from pydantic import PositiveInt
from rich import box
from rich.console import Console
from rich.table import Table

from pipelines.orchestration import process
from pipelines.orchestration.repro import PARAMS, Instance, dvc, instances, stale, terminal_or_log
from tap.settings import Runtime, load_params

DATA = Path("data")
REPORT = Path("data/report/index.html")
MOST_JOBS = 4  # each needs up to a gigabyte


# Without retries, Prefect would log a traceback, although a returned Failed state has none.
@task(task_run_name="{instance}", retries=1, retry_condition_fn=lambda *_: False)
def run_stage(
    instance: Instance, fresh: bool = False, shared: bool = False, environment: Mapping[str, str] | None = None
) -> State[Any]:
    """Run one stage instance by `dvc repro`, in a process group that ends with this task, with the variables of `environment`.

    If `shared`, results that the DVC remote has are restored instead, and results that it lacks are pushed to it.
    """
    if fresh:
        return Completed(name="UpToDate")
    show = terminal_or_log(get_run_logger().info, str(instance))
    if dvc("repro", *(["--pull"] if shared else []), "--single-item", str(instance), show=show, environment=environment):
        return Failed(message="for the reason above")
    if shared and dvc("push", "--run-cache", str(instance), show=show):
        return Failed(message="its results are in this clone, but could not be pushed to the DVC remote")
    return Completed()


@flow(name="tap-pipeline")
def pipeline(
    datasets: list[str] | None = None, seeds: list[int] | None = None, promote: bool = True, jobs: PositiveInt | None = None
) -> State[Any]:
    """Bring every stage of `datasets` and `seeds` (None: all of params.yaml) up to date, promote, and attach the results.

    `jobs` stages run at a time, which share the processor's cores; by default, see `default_jobs`.
    """
    chosen = instances(datasets, seeds)
    if failed := _run_stages(chosen, stale(chosen), jobs or default_jobs()):
        alone = f"`dvc repro --single-item {failed}` runs it alone; the next `tap run` continues from it"
        return Failed(message=f"stage {failed} failed, for the reason above. {alone}")
    summary = conclude(chosen, promote)
    print(summary)
    create_markdown_artifact(summary, key="results", description="Scores, promotions, and the path of the report")
    return Completed()


def default_jobs() -> int:
    """How many stages run at a time: one with a GPU, which it takes for itself; without, one for each core, up to MOST_JOBS.

    A model that trains in minutes without a GPU is too small for two cores.
    """
    import torch  # slow to load

    with_gpu = Runtime().device != "cpu" and torch.cuda.is_available()
    return 1 if with_gpu else min(MOST_JOBS, _cores())


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _run_stages(chosen: Sequence[Instance], to_run: Set[Instance], jobs: int) -> Instance | None:
    """Run `jobs` instances at a time, each after those it builds on; gives the first that failed, after which none is started.

    A single job goes seed by seed. Several advance all seeds of a dataset alike, so that the last to end have company.
    """
    environment = {"OMP_NUM_THREADS": str(max(1, _cores() // jobs))} if jobs > 1 else {}
    order: list[Any] = [(each.dataset, each.stage) if jobs > 1 else each for each in chosen]
    place = dict(zip(chosen, map(order.index, order), strict=True))
    sorter = TopologicalSorter({each: [other for other in chosen if each.builds_on(other)] for each in chosen})
    sorter.prepare()
    ready, running, failed = list[Instance](), dict[PrefectFuture[Any], Instance](), None
    ended: queue.Queue[PrefectFuture[Any]] = queue.Queue()
    try:
        while running or (sorter.is_active() and not failed):
            ready += sorter.get_ready()
            if ready and len(running) < jobs and not failed:
                instance = min(ready, key=place.__getitem__)
                ready.remove(instance)
                future = run_stage.submit(instance, fresh=instance not in to_run, environment=environment)
                running[future] = instance
                future.add_done_callback(ended.put)
            else:
                future = ended.get()
                future.wait()  # until its state is known here
                instance = running.pop(future)
                failed = failed or (None if future.state.is_completed() else instance)
                sorter.done(instance)
    except BaseException:  # stopped: by Ctrl-C, by a signal, or on Prefect's page
        process.end_all()
        raise
    return failed


@flow(name="tap-promote", flow_run_name="promote {dataset}")
def promote(dataset: str, rollback: bool = False) -> str:
    """Do on a worker what `tap promote` does, with the DVC remote's evaluations of all seeds of params.yaml."""
    from pipelines import promote as promotion  # loads MLflow

    load_params(PARAMS, dataset)  # raises ValueError if the dataset is not listed
    if rollback:
        return str(promotion.rollback(dataset))
    evaluations = [str(instance) for instance in instances([dataset], None) if instance.stage == "evaluate"]
    if dvc("repro", "--pull", *evaluations, show=terminal_or_log(get_run_logger().info)):
        raise ValueError(f"{dataset} is not evaluated for all seeds of {PARAMS}: run `tap sweep` first")
    return str(promotion.promote(dataset, PARAMS))


def conclude(chosen: Sequence[Instance], promote: bool) -> str:
    """Promote each dataset's best policy if asked, and summarize all results in Markdown. The instances must be up to date."""
    from pipelines import promote as promotion  # loads MLflow
    from tap.reporting.held_out import held_out_rows, held_out_table
    from tap.reporting.rows import load_evaluations, methods_run, table_rows
    from tap.reporting.tables import markdown

    runs = {(instance.dataset, instance.seed) for instance in chosen}
    evaluations = [each for each in load_evaluations(DATA) if (each.dataset, each.seed) in runs]
    rows, errors = table_rows(evaluations), held_out_table(held_out_rows(evaluations))
    methods = methods_run(rows)
    head = ("dataset", "score", "without search", *methods.values(), "data: mean", "decision time", "evaluated")
    table = Table(*head, box=box.MARKDOWN)
    for row in rows:
        ablation = row.ablation("no-search")
        table.add_row(
            row.first.dataset,
            str(row.score) if row.normalized else f"{row.score} (return)",
            str(ablation.score) if ablation else "",
            *(str(found.score) if (found := row.method(name)) else "" for name in methods),
            "" if (data := row.first.behaviour.mean_score) is None else f"{data:.1f}",
            f"{row.latency.median:.0f} ms",
            f"{row.extent}, ± over {row.over}",
        )
    lines = [f"- report: {REPORT}", "- MLflow's and Prefect's pages: `make ui`"]
    for dataset in dict.fromkeys(each.dataset for each in evaluations) if promote else ():
        try:
            decision = promotion.promote(dataset, PARAMS)
            lines.append(f"- {decision.model} version {decision.version}: {decision.outcome} ({decision.reason})")
        except ValueError as error:  # the results are valid all the same
            lines.append(f"- {dataset}: not promoted: {error}")
    text = io.StringIO()
    Console(file=text, width=160).print(table)
    tables = [text.getvalue().strip()] * bool(rows) + ([markdown(errors)] if errors else [])
    return "\n".join([*tables, "", *lines])


def run(datasets: list[str] | None, seeds: list[int] | None, promote: bool, jobs: int | None = None) -> None:
    """The command `tap run`: run the flow, unless everything is up to date. Raises ValueError if a stage fails."""
    chosen = instances(datasets, seeds)
    if not stale(chosen):
        print(f"All {len(chosen)} stages are up to date.\n\n{conclude(chosen, promote)}")
        return
    start_server()
    try:
        state = pipeline(datasets, seeds, promote, jobs, return_state=True)
    except (TransportError, RuntimeError) as error:  # RuntimeError: while the flow starts
        if isinstance(error, RuntimeError) and not str(error).startswith("Failed to reach API"):
            raise
        raise ValueError(
            f"Prefect's server does not respond ({error}): the next `tap run` continues from what is done; if PREFECT_API_URL "
            "names a server of your own, start that first"
        ) from error
    if not state.is_completed():
        raise ValueError(state.message)


def start_server() -> None:
    """Start Prefect's temporary server, unless PREFECT_API_URL names another, and end it with this process.

    The server inherits a mask that blocks SIGINT: a terminal's Ctrl-C would stop it too, and the flow could not report its end.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    answers = threading.Event()
    guard = threading.Thread(target=_watch_children, args=(answers,), daemon=True)
    guard.start()
    try:
        get_client(sync_client=True)  # for seconds, until the server answers
    finally:
        answers.set()
        guard.join()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _watch_children(last: threading.Event) -> None:
    """Until `last` is set, let each new child end with this process: it would outlive a kill -9, also while it starts."""
    known, ended = set[int](), False
    while not ended:
        ended = last.wait(0.05)
        for child in psutil.Process().children():
            if child.pid not in known:
                known |= {child.pid, process.watch(child.pid).pid}
