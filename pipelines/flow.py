"""The Prefect flow: DVC says what is stale, Prefect runs it, shows it and stops it. The only module that imports prefect."""

import io
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
from rich import box
from rich.console import Console
from rich.table import Table

# Read where prefect is imported: no usage data leaves this machine, and a log line begins with the stage it comes from.
os.environ.setdefault("DO_NOT_TRACK", "1")
os.environ.setdefault("PREFECT_LOGGING_FORMATTERS_STANDARD_FLOW_RUN_FMT", "%(asctime)s | %(message)s")
os.environ.setdefault("PREFECT_LOGGING_FORMATTERS_STANDARD_TASK_RUN_FMT", "%(asctime)s | %(task_run_name)s | %(message)s")

from prefect import flow, get_client, get_run_logger, task
from prefect.artifacts import create_markdown_artifact
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from pipelines import process
from tap.settings import STAGES, read_params_file

PARAMS = Path("params.yaml")
METRICS = Path("data/metrics")
REPORT = Path("data/report/index.html")
DVC_FOLDER = Path(".dvc/tmp")
# What DVC says after each stage: repeated advice about git and its remotes.
ADVICE = re.compile(
    r"(Generating|Updating) lock file|To (track the changes|enable auto staging)|\t(git add|dvc config)|Use `dvc push`"
)
T = TypeVar("T")
LOG_PROGRESS_EVERY = 30  # seconds; a terminal shows every step of a progress bar instead


@dataclass(frozen=True)
class Instance:
    """One stage of dvc.yaml for one value of its matrix."""

    stage: str
    dataset: str | None = None
    seed: int | None = None
    ablation: str | None = None

    @property
    def _key(self) -> tuple[str | int | None, ...]:
        return (self.dataset, self.seed, self.ablation)

    def __str__(self) -> str:
        """DVC's name of it: STAGE@DATASET-SEED-ABLATION."""
        key = "-".join(str(part) for part in self._key if part is not None)
        return f"{self.stage}@{key}" if key else self.stage

    def builds_on(self, earlier: "Instance") -> bool:
        """Whether this one may read what an earlier one writes: the report reads everything, others what shares their key."""
        shared = zip(earlier._key, self._key, strict=True)
        return self.stage == "report" or all(theirs in (None, mine) for theirs, mine in shared)


def instances(datasets: Sequence[str] | None, seeds: Sequence[int] | None) -> list[Instance]:
    """Every stage to run for `datasets` and `seeds` (None: all of params.yaml), each after what it builds on.

    Raises ValueError where params.yaml does not list one of them, since DVC knows only what stands there.
    """
    file = read_params_file(PARAMS)
    chosen = []
    for dataset in _listed("datasets", datasets, list(file.datasets)):
        chosen.append(Instance("fetch", dataset))
        for seed in _listed("seeds", seeds, file.seeds):
            chosen += [Instance(stage, dataset, seed) for stage in STAGES[1:]]
            if seed == file.seeds[0]:
                chosen.append(Instance("diagnose", dataset, seed))
            if dataset in file.ablate.datasets:
                for stage, ablations in (("ablations", file.ablate.planners), ("model_ablations", file.ablate.models)):
                    chosen += [Instance(stage, dataset, seed, ablation) for ablation in ablations]
    return [*chosen, Instance("report")]


def _listed(key: str, wanted: Sequence[T] | None, listed: list[T]) -> list[T]:
    for value in wanted or ():
        if value not in listed:
            raise ValueError(
                f"{PARAMS}: {key}: {value!r} is not listed; add it there, or choose from {', '.join(map(str, listed))}"
            )
    return list(dict.fromkeys(wanted)) if wanted else listed


def stale(chosen: Sequence[Instance]) -> set[Instance]:
    """Those whose command, params, inputs or outputs changed since their last run, and all that build on them.

    One `dvc status` for all takes as long as the `dvc repro` of a single fresh stage. Raises ValueError where DVC refuses.
    """
    lines: list[str] = []
    if dvc("status", "--json", *map(str, chosen), show=lambda line, _: lines.append(line)):
        raise ValueError("\n".join(["`dvc status` failed:", *lines]))
    changed = json.loads(next(line for line in lines if line.startswith("{")))
    found: set[Instance] = set()
    for instance in chosen:
        if str(instance) in changed or any(instance.builds_on(earlier) for earlier in found):
            found.add(instance)
    return found


def dvc(*arguments: str, show: Callable[[str, bool], None]) -> int:
    """Run one `dvc` command, when no other flow in this folder runs one; see `process.run`."""
    rwlock = DVC_FOLDER / "rwlock"
    # DVC takes a killed run's lock for a live one when another process got its id, as in a container started again.
    if rwlock.exists() and not any(_is_dvc(int(pid)) for pid in re.findall(r'"pid": (\d+)', rwlock.read_text())):
        rwlock.unlink(missing_ok=True)
    return process.run([sys.executable, "-m", "dvc", *arguments], show, DVC_FOLDER / "tap.lock")


def _is_dvc(pid: int) -> bool:
    try:
        return any(Path(part).name == "dvc" for part in psutil.Process(pid).cmdline())
    except psutil.Error:
        return False


def terminal_or_log(log: Callable[[str], None]) -> Callable[[str, bool], None]:
    """A `show` for `process.run`: lines go to `log`; passing ones show in place on a terminal, now and then in a log."""
    terminal = sys.stderr.isatty() and "CI" not in os.environ
    logged = time.monotonic()

    def show(line: str, passing: bool) -> None:
        nonlocal logged
        if terminal:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\033[K{line[:width] if passing else ''}", end="", file=sys.stderr, flush=True)
        elif passing:
            passing = time.monotonic() < logged + LOG_PROGRESS_EVERY
            logged = logged if passing else time.monotonic()
        if line.strip() and not passing and not ADVICE.match(line):
            log(line)

    return show


# With no retries at all, Prefect logs the traceback that a returned Failed state does not have.
@task(task_run_name="{instance}", retries=1, retry_condition_fn=lambda *_: False)
def run_stage(instance: Instance, fresh: bool) -> State[Any]:
    """One stage instance by `dvc repro`, in a process group that ends with this task."""
    if fresh:
        return Completed(name="UpToDate")
    command = ("repro", "--single-item", str(instance))
    if dvc(*command, show=terminal_or_log(get_run_logger().info)):
        return Failed(message="for the reason above")
    return Completed()


@flow(name="tap-pipeline")
def pipeline(datasets: list[str] | None = None, seeds: list[int] | None = None, promote: bool = True) -> State[Any]:
    """Bring every stage of `datasets` and `seeds` (None: all of params.yaml) up to date, promote, and attach the results."""
    chosen = instances(datasets, seeds)
    to_run = stale(chosen)
    for instance in chosen:
        state = run_stage(instance, fresh=instance not in to_run, return_state=True)
        if not state.is_completed():
            alone = f"`dvc repro --single-item {instance}` runs it alone"
            return Failed(message=f"stage {instance} failed, for the reason above. {alone}; the next `tap run` goes on from it")
    summary = conclude(chosen, promote)
    print(summary)
    create_markdown_artifact(summary, key="results", description="Scores, promotions, and where the report lies")
    return Completed()


def conclude(chosen: Sequence[Instance], promote: bool) -> str:
    """Promote each dataset's best policy if asked, and tell all results in Markdown. The instances must be up to date."""
    from pipelines import promote as promotion  # loads MLflow
    from tap.results import load_results, table_rows

    runs = {(instance.dataset, instance.seed) for instance in chosen}
    rows = table_rows([result for result in load_results(METRICS) if (result.dataset, result.seed) in runs])
    table = Table("dataset", "score", "without search", "behaviour data", "decision", "evaluated", box=box.MARKDOWN)
    for row in rows:
        behaviour, ablation = row.first.behaviour, row.ablation("no-search")
        table.add_row(
            row.first.dataset,
            str(row.score) if row.normalized else f"{row.score} (return)",
            str(ablation.score) if ablation else "",
            f"{behaviour.mean_normalized_score if row.normalized else behaviour.mean_return:.1f}",
            f"{row.latency.median:.0f} ms",
            f"{row.extent}, ± over {row.over}",
        )
    lines = [f"- report: {REPORT}", "- MLflow's and Prefect's pages: `make ui`"]
    for dataset in dict.fromkeys(row.first.dataset for row in rows) if promote else ():
        try:
            decision = promotion.promote(dataset, PARAMS)
            lines.append(f"- {decision.model} version {decision.version}: {decision.outcome} ({decision.reason})")
        except ValueError as error:  # the results hold nevertheless
            lines.append(f"- {dataset}: not promoted: {error}")
    text = io.StringIO()
    Console(file=text, width=160).print(table)
    return "\n".join([text.getvalue().strip(), "", *lines])


def run(datasets: list[str] | None, seeds: list[int] | None, promote: bool) -> None:
    """What `tap run` does: the flow, unless everything is up to date. Raises ValueError where a stage fails."""
    chosen = instances(datasets, seeds)
    if not stale(chosen):
        print(f"All {len(chosen)} stages are up to date.\n\n{conclude(chosen, promote)}")
        return
    start_server()
    state = pipeline(datasets, seeds, promote, return_state=True)
    if not state.is_completed():
        raise ValueError(state.message)


def start_server() -> None:
    """Start Prefect's temporary server, unless PREFECT_API_URL names another, so that it lasts just as long as this process.

    A terminal's Ctrl-C would reach it as well, and the flow could not report its end: it inherits a mask that blocks SIGINT.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        get_client(sync_client=True)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    for server in psutil.Process().children():
        process.watch(server.pid)  # it would outlive a kill -9
