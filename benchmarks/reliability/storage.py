"""Faults of storage: a run in which one write fails must end with one sentence, and the next run with the undisturbed result.

A preloaded library (storage.c, compiled with `cc`) fails the n-th call below a tiny project's folder that opens a file for
writing, writes, flushes or renames: with EIO, with ENOSPC, and with ENOSPC at all later calls that need space, as on a full
disk. Each stage from `params` to `report` has as many faults, evenly over its calls. Each faulty run is followed by an
undisturbed one of the same stage. Stages run one at a time in forks of a process that has loaded their modules. The faults of
`--trees` are of a `dvc repro` of the stages up to `train_vqvae`, started as `tap run` does, and so also of DVC's own calls.

A run is as it must be if it ends with exit code 0 and the undisturbed results, or else with one line that begins with "error:",
names a file and the cause, and no traceback; if the run after it ends with the undisturbed results, and then no temporary file
is left, `tap sync` leaves no run undelivered, and MLflow has no run that is RUNNING. Results are metrics without times and ids,
and the bytes of episodes, weights, curves and plots. The exit code is 1 if a run was not.
"""

import argparse
import errno
import importlib
import json
import mmap
import multiprocessing
import os
import re
import shutil
import sqlite3
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import yaml
from tqdm import tqdm

from pipelines.command_line import main
from pipelines.orchestration import repro

ROOT = Path(__file__).parents[2]
DATASET, SEED = "my-hopper", "0"
ALL = (
    "params",
    "fetch",
    "train_vqvae",
    "train_prior",
    "train_critic",
    "train_actor",
    "train_bc",
    "evaluate",
    "methods",
    "diagnose",
    "report",
)
ARGUMENTS = {"params": [], "report": [], "fetch": [DATASET], "methods": [DATASET, SEED, "bc"]}  # of others: dataset and seed
TREE = "dvc repro"
VARIABLE = ("latency_ms", "runs", "training_minutes", "run_id", "minutes", "model_digest")  # of equal runs
CAUSES = {errno.ENOSPC: "No space left on device", errno.EIO: "Input/output error"}

# What stages after `fetch` import only while they run, which takes longer than the tiny trainings.
LATE_IMPORTS = (
    "pipelines.cli",
    "torch._dynamo",
    "alembic.command",
    "mlflow.store.tracking.sqlalchemy_store",
    "mlflow.store.model_registry.sqlalchemy_store",
)


class Control:
    """What the preloaded library reads and counts, in a file that all processes map: see `struct control` in storage.c."""

    LAYOUT = struct.Struct("4q1024s1024s")

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(self.LAYOUT.size))
        with path.open("r+b") as file:
            self._mapped = mmap.mmap(file.fileno(), self.LAYOUT.size)

    @contextmanager
    def watching(self, root: Path, at: int = 0, error: int = 0, full: bool = False) -> Iterator[None]:
        """Count calls below `root`, and fail number `at` with `error`; if `full`, also all later ones that need space."""
        self._mapped[:] = self.LAYOUT.pack(at, error, full, 0, str(root).encode(), b"")
        try:
            yield
        finally:
            self._mapped[32 : 32 + 1024] = bytes(1024)  # the root

    @property
    def count(self) -> int:
        """The calls of the last watch."""
        return int(self.LAYOUT.unpack(self._mapped)[3])

    @property
    def where(self) -> str:
        """The call that failed, and its file; empty if none has."""
        return str(self.LAYOUT.unpack(self._mapped)[5].rstrip(b"\0").decode())


def compile_library(folder: Path) -> Path:
    """Compile storage.c into `folder`. Raises ValueError if there is no C compiler."""
    if (compiler := shutil.which("cc")) is None:
        raise ValueError("there is no C compiler `cc` here: install one, for example gcc")
    library = folder / "storage.so"
    source = Path(__file__).with_suffix(".c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", library, source, "-ldl"], check=True)
    return library


def make_project(folder: Path) -> None:
    """A project in git, with the code, of random episodes of Hopper and models that train in a second."""
    transformer, fit = {"layers": 1, "width": 16, "heads": 2}, {"updates": 20, "batch_size": 16, "log_every": 5}
    fit |= {"warmup_updates": 0, "checkpoint_every": 10}
    planner = {"search": "beam", "horizon": 6, "beam_width": 4, "expansion_factor": 2, "samples": 8}
    dataset = {
        "fetch": {"source": "file", "path": f"{DATASET}.hdf5", "environment": "Hopper-v4", "max_episode_steps": 100}
        | {"reference_min_score": 0.0, "reference_max_score": 100.0},
        "train_vqvae": {"windows": {"length": 6}, "codebook": {"size": 8, "dim": 4}, "transformer": transformer, "fit": fit},
        "train_prior": {"transformer": transformer, "fit": fit},
        "train_critic": {"members": 5, "width": 16, "fit": fit},
        "train_actor": {"members": 2, "width": 16, "fit": fit},
        "train_bc": {"network": {"layers": 1, "width": 8}, "fit": fit},
        "evaluate": {"episodes": 2, "planner": planner},
    }
    params = yaml.safe_load((ROOT / "params.yaml").read_text()) | {"datasets": {DATASET: dataset}, "seeds": [int(SEED)]}
    params |= {"scale": "cpu", "methods": ["bc"], "ablate": {"datasets": [], "planners": [], "models": []}}
    for name in (".dvc/config", ".dvcignore", ".gitignore", "dvc.yaml", "tap", "pipelines", "data/bundled"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    subprocess.run(["git", "init", "-q", folder], check=True)
    (folder / "params.yaml").write_text(yaml.safe_dump(params))
    rng, lengths = np.random.default_rng(0), [25, 3, 40, 12, 60, 8, 31, 22]
    with h5py.File(folder / f"{DATASET}.hdf5", "w") as file:
        file["observations"] = rng.normal(size=(sum(lengths), 11))
        file["actions"] = rng.uniform(-1, 1, (sum(lengths), 3))
        file["rewards"] = rng.normal(1, 0.1, sum(lengths))
        file["terminals"] = np.isin(np.arange(sum(lengths)), np.cumsum(lengths) - 1)
        file["timeouts"] = np.zeros(sum(lengths), bool)


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    code: int
    output: str


class Stages:
    """Runs stages of a project in forks of a process that has loaded their modules and the library; one for each process."""

    def __init__(self, stages: Sequence[str], scratch: Path) -> None:
        self.control = Control(scratch / "control")
        self._log = scratch / "output"
        self.environment = {
            "LD_PRELOAD": str(compile_library(scratch)),
            "STORAGE_FAULTS": str(scratch / "control"),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "MLFLOW_TRACKING_URI": "",  # the project's own store
            "TQDM_DISABLE": "1",
        }
        self._context = multiprocessing.get_context("forkserver")
        late = LATE_IMPORTS if set(stages) - {"params", "fetch", TREE} else ()
        self._context.set_forkserver_preload([*(f"pipelines.stages.{stage}" for stage in stages if stage in ALL), *late])
        before = os.environ.copy()
        os.environ |= self.environment  # which the server inherits
        try:
            self._context.Process(target=len, args=((),)).start()
        finally:
            os.environ.clear()
            os.environ |= before

    def run(self, stage: str, project: Path) -> Outcome:
        """Run one stage in the folder `project`."""
        process = self._context.Process(target=_run_stage, args=(stage, project, self._log))
        process.start()
        process.join()
        assert process.exitcode is not None
        return Outcome(process.exitcode, self._log.read_text())


def _run_stage(stage: str, project: Path, log: Path) -> None:
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(project)
    Path("tmp").mkdir(exist_ok=True)
    os.environ["TMPDIR"] = str(project / "tmp")
    if stage == TREE:
        os.environ |= {"MLFLOW_TRACKING_URI": f"sqlite:///{project.parent}/mlflow.db", "PYTHONPATH": str(project)}
        sys.argv = [stage]
        main(_reproduce)
    os.environ["DVC_STAGE"] = stage  # the stage `params` has run
    if stage == "sync":
        sys.argv = ["tap", "sync"]
        importlib.import_module("pipelines.cli").app()
    sys.argv = [stage, *ARGUMENTS.get(stage, [DATASET, SEED])]
    main(importlib.import_module(f"pipelines.stages.{stage}").run)


def _reproduce() -> None:
    """What `tap run` does for the first stages, less Prefect."""
    repro.stale(repro.instances(None, None))
    sys.exit(repro.dvc("repro", f"train_vqvae@{DATASET}-{SEED}", show=lambda line, passing: print(line, flush=True)))


def results(project: Path) -> dict[str, Any]:
    """What equal runs have in common, by path."""
    found: dict[str, Any] = {}
    for file in sorted((project / "data").rglob("*.*")):
        name = str(file.relative_to(project))
        if file.is_file() and not name.startswith(("data/report", "data/scores")):  # they show times
            found[name] = _without_variable(json.loads(file.read_text())) if file.suffix == ".json" else file.read_bytes()
    return found


def _without_variable(value: Any) -> Any:
    return {key: part for key, part in value.items() if key not in VARIABLE} if isinstance(value, dict) else value


@dataclass(frozen=True)
class Fault:
    """Call number `at` of a stage fails with `error`; if `full`, also all later ones that need space."""

    stage: str
    at: int
    error: int
    full: bool


def spread(count: int, calls: dict[str, int]) -> list[Fault]:
    """About `count` faults: equally many of each stage, evenly over its calls."""
    faults: list[Fault] = []
    for stage, number in calls.items():
        places = np.linspace(1, number, min(count // len(calls), number)).round().astype(int)
        for at in map(int, places):
            kind = len(faults) % 3
            faults.append(Fault(stage, at, errno.EIO if kind == 1 else errno.ENOSPC, full=kind == 2))
    return faults


def campaign(count: int, stages: Sequence[str], trees: int = 0) -> dict[str, Any]:
    """Run `stages` with `count` faults, and `dvc repro` with `trees`, one a run; returns what happened, and what is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder).resolve()
        runner, project, started = Stages(stages, scratch), scratch / "project", time.monotonic()
        calls, expected = _undisturbed(runner, [*stages, *([TREE] if trees else [])], project, scratch)
        of_stages = {stage: number for stage, number in calls.items() if stage != TREE}
        of_tree = spread(trees, {TREE: calls[TREE]}) if trees else []
        wrong, outcomes, failed_calls = [], Counter[str](), Counter[str]()
        for fault in tqdm([*spread(count, of_stages), *of_tree], desc="faults", unit="fault"):
            _restore(scratch / fault.stage, project)
            with runner.control.watching(project, fault.at, fault.error, fault.full):
                faulty = runner.run(fault.stage, project)
            failed_calls[runner.control.where.partition(" ")[0] or "none"] += 1
            outcomes["succeeded" if faulty.code == 0 else "one sentence"] += 1
            faults = problems(faulty, fault, project, expected[fault.stage])
            again = runner.run(fault.stage, project)
            faults += [f"afterwards: {each}" for each in after(again, runner, project, expected[fault.stage])]
            if faults:
                wrong.append({"fault": str(fault), "call": runner.control.where, "problems": faults})
    return {
        "calls": calls,
        "faults": sum(outcomes.values()),
        "outcomes": dict(outcomes),
        "failed_calls": dict(failed_calls),
        "wrong": wrong,
        "seconds": round(time.monotonic() - started),
    }


def _undisturbed(
    runner: Stages, stages: Sequence[str], project: Path, scratch: Path
) -> tuple[dict[str, int], dict[str, dict[str, Any]]]:
    """Run the stages; returns their calls and results so far. The project before each is kept in the folder of its name."""
    calls, expected = {}, {}
    for stage in tqdm(stages, desc="undisturbed", unit="stage"):
        if not calls or stage == TREE:  # begins with nothing
            shutil.rmtree(project, ignore_errors=True)
            make_project(project)
        shutil.copytree(project, scratch / stage)
        with runner.control.watching(project):
            outcome = runner.run(stage, project)
        assert outcome.code == 0 and runner.control.count, outcome.output
        calls[stage], expected[stage] = runner.control.count, results(project)
    return calls, expected


def _restore(kept: Path, project: Path) -> None:
    shutil.rmtree(project)
    shutil.copytree(kept, project)


def problems(faulty: Outcome, fault: Fault, project: Path, expected: dict[str, Any]) -> list[str]:
    """What is wrong with the end of a faulty run."""
    found = []
    if "Traceback" in faulty.output:
        found.append(f"traceback: {faulty.output[-2000:]}")
    if faulty.code == 0:
        found += differences(results(project), expected)
    else:
        sentences = re.findall(r"^error: .*", faulty.output, re.MULTILINE | (re.IGNORECASE if fault.stage == TREE else 0))
        explained = [each for each in sentences if re.search(rf": \S+.*{CAUSES[fault.error]}", each)]
        if not explained or (len(sentences) > 1 and fault.stage != TREE):  # DVC adds its own
            found.append(f"exit code {faulty.code} with {faulty.output[-2000:]!r}")
    return found


def after(again: Outcome, runner: Stages, project: Path, expected: dict[str, Any]) -> list[str]:
    """What is wrong after an undisturbed run that follows a faulty one."""
    if again.code:
        return [f"exit code {again.code} with {again.output[-2000:]!r}"]
    found = differences(results(project), expected)
    if any((project / ".tracking").glob("*")) and (synced := runner.run("sync", project)).code:
        found.append(f"tap sync failed: {synced.output[-2000:]!r}")
    temporary = [*project.rglob(".*.tmp"), *project.rglob("*.part"), *(project / "tmp").iterdir(), *project.glob(".tracking/*")]
    found += [f"{path} is left" for path in temporary]
    if (project / "mlflow.db").exists():
        with closing(sqlite3.connect(project / "mlflow.db")) as store:
            (running,) = store.execute("SELECT count(*) FROM runs WHERE status = 'RUNNING'").fetchone()
            found += [f"{running} runs are RUNNING in MLflow"] if running else []
    return found


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """The paths whose content differs."""
    return [f"{name} differs" for name in sorted(found.keys() | expected.keys()) if found.get(name) != expected.get(name)]


def command() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="faults of single stages")
    parser.add_argument("--trees", type=int, default=6, help="faults of `dvc repro`")
    options = parser.parse_args()
    result = campaign(options.count, ALL, options.trees)
    print(json.dumps(result, indent=2))
    sys.exit(1 if result["wrong"] else 0)


if __name__ == "__main__":
    command()
