"""kill -9 of a random process of `tap run` at a random moment; then the same command again, which must end as if undisturbed.

The project is tiny. Each case starts with one stage to run; the results of the others are those of an undisturbed run, which
DVC restores from its cache if the stage's results are the same, to the bit. After the second command, metrics, curves and
weights must be those of the undisturbed run, no run may be RUNNING in MLflow or wait in the outbox, and no process, lock or
temporary file may be left. Prints JSON; exits with 1 if a case failed.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml
from mlflow import MlflowClient
from tqdm import tqdm

from benchmarks.measure import Result
from tap.files import sha256
from tap.planning.policy import Policy
from tap.results import weights_folder
from tap.settings import PlannerParams

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))  # as pytest does

from conftest import copy_project, metrics, tiny_tree  # noqa: E402

DATASET, SEED = "my-hopper", 0
STAGES = ("train_vqvae", "train_prior", "train_critic", "train_actor", "evaluate", "diagnose", "report")
METRICS = STAGES[:-1]
CASE = "TAP_KILLS_CASE"  # an environment variable: which case a process belongs to
PATIENCE = 1800  # seconds for a command, after which it counts as hanging; the machine may be busy


@dataclass(frozen=True)
class Kill:
    """What a case kills, and when."""

    case: int
    stage: str  # the one that is not up to date
    moment: float  # as a share of the undisturbed command's CPU time, which does not depend on what else the machine does
    draw: float  # selects one of the processes of that moment

    @classmethod
    def draw_case(cls, case: int) -> "Kill":
        rng = random.Random(case)
        return cls(case, rng.choice(STAGES), rng.random(), rng.random())


def make_project(folder: Path) -> None:
    """A project with one dataset and seed in `folder`, finished by an undisturbed `tap run`."""
    nothing = {"datasets": [], "planners": [], "models": []}
    copy_project(folder, {DATASET: tiny_tree()}, seeds=[SEED], methods=[], ablate=nothing)
    shutil.copy(ROOT / "prefect.toml", folder)
    with tap_run(folder, case="undisturbed") as process:
        assert process.wait(PATIENCE) == 0, (folder / "log.txt").read_text()


@contextmanager
def tap_run(folder: Path, case: str) -> Iterator[subprocess.Popen[bytes]]:
    """`tap run` in `folder`, which logs to log.txt there."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "MLFLOW_", "TAP_"))}
    own = {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", CASE: case}
    with (folder / "log.txt").open("wb") as log:
        command = [sys.executable, "-m", "pipelines.cli", "run", "--jobs", "2"]
        process = subprocess.Popen(command, cwd=folder, env=inherited | own, stdout=log, stderr=log, start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def make_stale(folder: Path, stage: str) -> None:
    """Forget one stage: its entry in dvc.lock, its outputs, its checkpoint, and its results in DVC's run cache."""
    lock = yaml.safe_load((folder / "dvc.lock").read_text())
    name = stage if stage == "report" else f"{stage}@{DATASET}-{SEED}"
    forgotten = lock["stages"].pop(name)
    (folder / "dvc.lock").write_text(yaml.safe_dump(lock, sort_keys=False))
    for out in forgotten["outs"]:
        path = folder / out["path"]
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for checkpoints in (folder / ".checkpoints").glob(f"{stage}-*"):
        shutil.rmtree(checkpoints)
    for cached in (folder / ".dvc/cache/runs").glob("*/*/*"):
        if yaml.safe_load(cached.read_text())["cmd"] == forgotten["cmd"]:
            shutil.rmtree(cached.parent)


def results(folder: Path) -> dict[str, Any]:
    """All that must not depend on a kill: metrics, curves, and the weights, which must also load."""
    key = f"{DATASET}-{SEED}"
    found: dict[str, Any] = {stage: metrics(folder, stage) for stage in METRICS}
    found["curves"] = {
        str(path.relative_to(folder)): path.read_text() for path in sorted(folder.glob("data/plots/train_*/*.csv"))
    }
    found["report"] = (folder / "data/report/index.html").exists()
    folders = [folder / weights_folder(stage, key) for stage in ("train_vqvae", "train_prior", "train_critic", "train_actor")]
    found["weights"] = {str(path.relative_to(folder)): sha256(path) for each in folders for path in sorted(each.iterdir())}
    planner = json.loads((folder / f"data/params/{DATASET}/evaluate.json").read_text())["params"]["planner"]
    planner |= {"search": "critic_weighted", "actor": True}  # so that all are loaded
    Policy.join(*folders, PlannerParams.model_validate(planner), torch.device("cpu"))
    return found


def left_behind(folder: Path, case: str, patience: float = 40) -> list[str]:
    """What a finished case may not leave: processes, runs that are RUNNING or undelivered, locks, temporary files.

    Processes have `patience` seconds to end: watchdogs need up to 30.
    """
    deadline = time.monotonic() + patience
    while (alive := _processes(case)) and time.monotonic() < deadline:
        time.sleep(0.5)
    found = [f"process: {' '.join(each)}" for each in alive]
    return found + unfinished_runs(f"sqlite:///{folder}/mlflow.db") + left_in(folder)


def unfinished_runs(tracking_uri: str) -> list[str]:
    """MLflow's runs that have no end."""
    client = MlflowClient(tracking_uri)
    experiments = [each.experiment_id for each in client.search_experiments()]
    runs = client.search_runs(experiments, "attributes.status != 'FINISHED'", max_results=1000)
    return [f"run: {run.info.run_name} is {run.info.status}" for run in runs if run.info.status not in ("KILLED", "FAILED")]


def left_in(folder: Path) -> list[str]:
    """The undelivered records, locks and temporary files of one clone."""
    found = [f"record: {path.name}" for path in (folder / ".tracking").glob("*")]
    rwlock = folder / ".dvc/tmp/rwlock"
    if rwlock.exists() and "pid" in rwlock.read_text():
        found.append(f"lock: {rwlock.read_text()}")
    temporary = [path for pattern in ("*.tmp", "*.delivered") for path in folder.rglob(pattern)]
    return found + [f"file: {path.relative_to(folder)}" for path in temporary]


def _processes(case: str) -> list[list[str]]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, or is another user's
            if process.environ().get(CASE) == case and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.cmdline())
    return found


def kind(process: psutil.Process) -> str:
    """What a process of the tree is, in one word; raises psutil.Error if it has ended."""
    line = " ".join(process.cmdline())
    names = {
        "pipelines.cli run": "flow",
        "uvicorn": "Prefect server",
        "watchdog": "watchdog",
        "/bin/sh -c": "shell",
        "-m pipelines.stages.": "stage",
        "-m dvc": "dvc",
        "git": "git",
    }
    return next((name for part, name in names.items() if part in line), "other")


def kill_one(root: psutil.Process, draw: float) -> str | None:
    """kill -9 one process of a tree: each kind of process is as likely; returns the kind, None if all have ended."""
    kinds: dict[str, list[psutil.Process]] = {}
    with suppress(psutil.Error):
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE:
                    kinds.setdefault(kind(process), []).append(process)
    if not kinds:
        return None
    chosen = sorted(kinds)[int(draw * len(kinds))]
    random.Random(draw).choice(kinds[chosen]).send_signal(signal.SIGKILL)
    return chosen


def cpu_seconds(root: psutil.Process) -> float:
    """CPU time of a tree of processes, with that of its ended ones."""
    total = 0.0
    with suppress(psutil.Error):
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
    return total


def run_case(finished: Path, folder: Path, kill: Kill, seconds: float, expected: dict[str, Any]) -> Result:
    """One case in `folder`, a copy of the `finished` project, whose `tap run` with one stage to run takes `seconds` of CPU."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(finished, folder, symlinks=True)
    make_stale(folder, kill.stage)
    case, started = f"{os.getpid()}-{kill.case}", time.monotonic()
    with tap_run(folder, case) as process:
        root = psutil.Process(process.pid)
        while process.poll() is None and cpu_seconds(root) < kill.moment * seconds:
            time.sleep(0.1)
        victim = kill_one(root, kill.draw)
        at = time.monotonic() - started
        faults = [] if _ends(process) else ["the killed command hangs"]
        first = process.returncode
        log = (folder / "log.txt").read_text(errors="replace")
    with tap_run(folder, case) as process:
        faults += [] if _ends(process) else ["the second command hangs"]
        if process.returncode:
            faults.append(f"the second command failed: {(folder / 'log.txt').read_text(errors='replace')[-2000:]}")
        else:
            found = results(folder)
            faults += [f"{key} differ" for key in expected if found[key] != expected[key]]
    faults += left_behind(folder, case)
    outcome = {"case": kill.case, "stage": kill.stage, "killed": victim, "after_seconds": round(at, 1), "exit_code": first}
    return (
        outcome | {"seconds": round(time.monotonic() - started, 1)} | ({"faults": faults, "log": log[-2000:]} if faults else {})
    )


def _ends(process: subprocess.Popen[bytes]) -> bool:
    with suppress(subprocess.TimeoutExpired):
        process.wait(PATIENCE)
    return process.poll() is not None


def undisturbed(finished: Path, folder: Path) -> tuple[float, dict[str, Any]]:
    """The CPU seconds of `tap run` with one stage to run, and the results that every case must end with."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(finished, folder, symlinks=True)
    make_stale(folder, STAGES[0])
    seconds = 0.0
    with tap_run(folder, "undisturbed") as process:
        while process.poll() is None:
            seconds = max(seconds, cpu_seconds(psutil.Process(process.pid)))
            time.sleep(0.1)
        assert process.returncode == 0, (folder / "log.txt").read_text()
    expected = results(finished)
    assert results(folder) == expected  # two undisturbed runs agree, or the campaign would compare with chance
    return seconds, expected


def campaign(cases: list[int], folder: Path, budget: float, show: Callable[[Result], None]) -> Result:
    """Run cases in turn, none after `budget` seconds."""
    started = time.monotonic()
    finished = folder / "finished"
    finished.mkdir(parents=True)
    make_project(finished)
    seconds, expected = undisturbed(finished, folder / "case")
    outcomes: list[Result] = []
    for case in tqdm(cases, desc="kills", unit="case"):
        if time.monotonic() - started > budget:
            break
        outcomes.append(run_case(finished, folder / "case", Kill.draw_case(case), seconds, expected))
        show(outcomes[-1])
    failed = [each for each in outcomes if "faults" in each]
    return {
        "cases": len(outcomes),
        "killed": dict(Counter(str(each["killed"]) for each in outcomes)),
        "stages": dict(Counter(each["stage"] for each in outcomes)),
        "first_command_succeeded": sum(each["exit_code"] == 0 for each in outcomes),
        "undisturbed_cpu_seconds": round(seconds, 1),
        "failed": failed,
        "wall_seconds": round(time.monotonic() - started),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=50, help="cases FIRST to COUNT - 1 (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="to continue a campaign (default: %(default)s)")
    parser.add_argument("--case", type=int, help="only this case: the same stage, moment and draw as in a campaign")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no case after this time (default: no limit)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tap-kills-") as temporary:
        chosen = list(range(options.first, options.count)) if options.case is None else [options.case]
        result = campaign(chosen, Path(temporary), 60 * options.minutes, lambda each: tqdm.write(json.dumps(each), sys.stderr))
    print(json.dumps(result, indent=2))
    sys.exit(bool(result["failed"]))
