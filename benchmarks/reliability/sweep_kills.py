"""kill -9 of random processes of a team during sweeps; each sweep, repeated until it succeeds, must end as if undisturbed.

The team is Prefect's and MLflow's server, two workers and `tap sweep`, with everything that they start, on a tiny project.
Servers and workers that end are started again, as a machine's service manager would, and a sweep that failed is run again, as
its message says. Sweeps of new seeds follow each other until enough was killed. After each, metrics and weights must be those
of `dvc repro` in a clone that shares nothing with the team. At the end each stage must have a finished run in MLflow, none may
be RUNNING there or wait in an outbox, and no process, lock or temporary file may be left. Prints JSON; exits with 1 if anything
was wrong.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml
from tqdm import tqdm

from benchmarks.measure import Result
from benchmarks.reliability.kills import PATIENCE, left_in, unfinished_runs
from tap.files import sha256
from tap.results import weights_folder

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))  # as pytest does

from conftest import IDENTITY, metrics, run
from team import DATASET, Team, wait_until

SERVICE = "TAP_KILLS_SERVICE"  # an environment variable: which service a process belongs to
SERVERS, WORKERS = ("prefect", "mlflow"), ("one", "two")
STAGES = ("train_vqvae", "train_prior", "train_critic", "train_actor", "evaluate")
SEEDS = 3  # of a sweep
PAUSE = 40  # seconds from a kill to the next, at most
RESTART = 5  # seconds until a service that ended, or a sweep that failed, is started again


@dataclass
class Services:
    """The servers and workers of a team, by name their `python -m` commands, each started again when it ends."""

    team: Team
    commands: dict[str, list[str]]
    stack: ExitStack
    started: dict[str, tuple[psutil.Popen, float]] = field(default_factory=dict)
    restarts: Counter[str] = field(default_factory=Counter)

    def keep_up(self) -> None:
        for name, command in self.commands.items():
            process, since = self.started.get(name, (None, 0.0))
            if process is None or (process.poll() is not None and time.monotonic() > since + RESTART):
                if process is not None:
                    self.restarts[name] += 1
                if name in SERVERS:
                    self._end_rest(name)  # it would keep the port
                restarted = self.stack.enter_context(self.team.process(*command, **{SERVICE: name}))
                self.started[name] = restarted, time.monotonic()

    def _end_rest(self, name: str) -> None:
        for process in self.team.processes():
            with suppress(psutil.Error):
                if process.environ().get(SERVICE) == name:
                    process.kill()


@contextmanager
def services(team: Team) -> Iterator[Services]:
    """All services of a team, once the servers answer and both workers wait for work."""
    with ExitStack() as stack:
        workers = {name: team.worker_command(name) for name in WORKERS}
        found = Services(team, {"prefect": team.prefect_command, "mlflow": team.mlflow_command} | workers, stack)

        def ready() -> bool:
            found.keep_up()
            return team.servers_answer() and team.log.read_text(errors="replace").count("started!") == len(WORKERS)

        wait_until(ready, 300)
        yield found


def kind(process: psutil.Process) -> str:
    """What a process of the team is, in a word or two; raises psutil.Error if it has ended."""
    service, line = process.environ().get(SERVICE), " ".join(process.cmdline())
    if service in SERVERS:
        return f"{service} server"
    names = {
        "pipelines.cli sweep": "sweep",
        "pipelines.cli worker": "tap worker",
        "worker start": "prefect worker",
        "watchdog": "watchdog",
        "/bin/sh -c": "shell",
        "-m pipelines.stages.": "stage",
        "-m dvc": "dvc",
        "prefect.engine": "flow run",
        "_workspace_runtime_bootstrap": "flow run",
        "git": "git",
    }
    return next((name for part, name in names.items() if part in line), "other")


def kill_one(team: Team, rng: random.Random) -> str:
    """kill -9 one process of the team: each kind of process is as likely; returns the kind."""
    kinds: dict[str, list[psutil.Process]] = {}
    for process in team.processes():
        with suppress(psutil.Error):
            kinds.setdefault(kind(process), []).append(process)
    chosen = rng.choice(sorted(kinds))
    with suppress(psutil.Error):
        rng.choice(kinds[chosen]).kill()
    return chosen


def sweep(services: Services, rng: random.Random, most: int) -> tuple[list[str], list[int]]:
    """Repeat `tap sweep` until it succeeds, and kill up to `most` processes meanwhile; gives their kinds, and the exit codes.

    Raises ValueError if it does not succeed in PATIENCE seconds.
    """
    killed, codes, deadline = list[str](), list[int](), time.monotonic() + PATIENCE
    next_kill = time.monotonic() + rng.uniform(5, PAUSE)
    while not codes or codes[-1]:
        with services.team.process("pipelines.cli", "sweep") as process:
            while process.poll() is None:
                services.keep_up()
                if len(killed) < most and time.monotonic() > next_kill:
                    killed.append(kill_one(services.team, rng))
                    next_kill = time.monotonic() + rng.uniform(0, PAUSE)
                if time.monotonic() > deadline:
                    raise ValueError(f"the sweep has not ended after {PATIENCE} s; killed: {killed}, exit codes: {codes}")
                time.sleep(0.1)
        codes.append(process.returncode)
        time.sleep(RESTART if codes[-1] else 0)
        services.keep_up()
    return killed, codes


def set_seeds(team: Team, seeds: list[int]) -> None:
    """Commit other seeds to the launcher's params.yaml."""
    path = team.launcher / "params.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"seeds": seeds}))
    run(team.launcher, "git", *IDENTITY, "commit", "-qam", f"seeds {seeds}")


def undisturbed(team: Team, seeds: list[int]) -> dict[str, Any]:
    """The results of the launcher's commit in a clone that shares nothing with the team."""
    alone = team.folder / "alone"
    if not alone.exists():
        run(team.folder, "git", "clone", "-q", "launcher", "alone")
    run(alone, "git", "checkout", "-q", "--", "dvc.lock", check=False)
    run(alone, "git", "pull", "-q")
    run(alone, sys.executable, "-m", "dvc", "repro", *(f"evaluate@{DATASET}-{seed}" for seed in seeds))
    return results(alone, seeds)


def results(folder: Path, seeds: list[int]) -> dict[str, Any]:
    """All that must not depend on a kill: metrics, and the weights' digests."""
    keys = [f"{DATASET}-{seed}" for seed in seeds]
    found: dict[str, Any] = {}
    for stage in STAGES:
        every = metrics(folder, stage)
        found[stage] = {key: every.get(f"{key}.json") for key in keys}
    folders = [folder / weights_folder(stage, key) for stage in STAGES[:-1] for key in keys]
    found["weights"] = {str(path.relative_to(folder)): sha256(path) for each in folders for path in sorted(each.glob("*"))}
    assert None not in found["evaluate"].values() and found["weights"]
    return found


def campaign(count: int, seed: int, folder: Path, show: Callable[[Result], None]) -> Result:
    """Sweeps of new seeds until `count` processes were killed; what is killed and when is drawn from `seed`."""
    started, rng = time.monotonic(), random.Random(seed)
    team = Team.make(folder / "team", [])
    sweeps, faults = list[Result](), list[str]()
    killed = Counter[str]()
    with services(team) as running, tqdm(total=count, desc="kills", unit="kill") as progress:
        while killed.total() < count:
            seeds = [SEEDS * len(sweeps) + index for index in range(SEEDS)]
            set_seeds(team, seeds)
            since = time.monotonic()
            kinds, codes = sweep(running, rng, count - killed.total())
            seconds = round(time.monotonic() - since)
            found, expected = results(team.launcher, seeds), undisturbed(team, seeds)
            wrong = [f"{key} differ" for key in expected if found[key] != expected[key]]
            sweeps.append({"seeds": seeds, "killed": kinds, "exit_codes": codes, "seconds": seconds, "faults": wrong})
            faults += [f"seeds {seeds}: {each}" for each in wrong]
            killed.update(kinds)
            progress.update(len(kinds))
            show(sweeps[-1])
        faults += _left_behind(team, list(range(SEEDS * len(sweeps))))
    with suppress(AssertionError):
        wait_until(lambda: not team.left(), 60)
    faults += [f"process: {line}" for line in team.left()]
    return {
        "kills": killed.total(),
        "killed": dict(killed),
        "sweeps": len(sweeps),
        "combinations": SEEDS * len(sweeps),
        "commands": sum(len(each["exit_codes"]) for each in sweeps),
        "restarts": dict(running.restarts),
        "faults": faults,
        "wall_seconds": round(time.monotonic() - started),
    }


def _left_behind(team: Team, seeds: list[int]) -> list[str]:
    """What is wrong in MLflow and in the clones, once `tap sync` has delivered what a killed process did not."""
    clones = [team.launcher, *(team.folder / name for name in WORKERS)]
    for clone in clones:
        command = [sys.executable, "-m", "pipelines.cli", "sync"]
        subprocess.run(command, cwd=clone, env=team.environment, stdout=sys.stderr, check=True)
    found = unfinished_runs(team.environment["MLFLOW_TRACKING_URI"])
    tags = [run.data.tags for run in team.runs() if run.info.status == "FINISHED"]
    finished = {(each.get("stage"), each.get("seed")) for each in tags}
    found += [
        f"run: no finished {stage} of seed {seed}" for stage in STAGES for seed in seeds if (stage, str(seed)) not in finished
    ]
    return found + [f"{clone.name}: {each}" for clone in clones for each in left_in(clone)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20, help="processes to kill (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of what is killed, and when (default: %(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tap-sweep-kills-") as temporary:
        result = campaign(options.count, options.seed, Path(temporary), lambda each: tqdm.write(json.dumps(each), sys.stderr))
    print(json.dumps(result, indent=2))
    sys.exit(bool(result["faults"]))
