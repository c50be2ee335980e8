"""The campaign of kills within sweeps: what it kills, and that it starts services again; `make test-sweep` runs a sweep."""

import random
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from team import Team, wait_until

from benchmarks.reliability.sweep_kills import SERVICE, Services, kill_one, kind

SLEEP = "import time; time.sleep(60)"


@pytest.mark.parametrize(
    ("arguments", "service", "expected"),
    [
        (["-m", "uvicorn"], "prefect", "prefect server"),
        (["multiprocessing.spawn"], "mlflow", "mlflow server"),
        (["pipelines.cli", "worker"], "one", "tap worker"),
        (["-m", "pipelines.stages.train_prior"], "two", "stage"),
        (["pipelines.cli", "sweep"], None, "sweep"),
    ],
)
def test_each_kind_of_process_is_known(arguments: list[str], service: str | None, expected: str) -> None:
    environment = {SERVICE: service} if service else {}
    process = psutil.Popen([sys.executable, "-c", SLEEP, " ".join(arguments)], env=environment)
    try:
        wait_until(process.cmdline, 10)  # for a moment it has none
        assert kind(process) == expected
    finally:
        process.kill()
        process.wait()


def test_only_processes_of_the_team_are_killed_and_services_start_again(tmp_path: Path) -> None:
    team = Team(tmp_path, 1, 2)
    team.launcher.mkdir()
    with (
        subprocess.Popen([sys.executable, "-c", SLEEP], env={"TAP_REMOTE": "another team's"}) as bystander,
        ExitStack() as stack,
    ):
        sleep = ["timeit", "-n1", "-r1", SLEEP]
        running = Services(team, dict.fromkeys(("prefect", "mlflow", "one"), sleep), stack)
        running.keep_up()
        first = {name: process for name, (process, _) in running.started.items()}
        wait_until(lambda: {each.pid for each in team.processes()} == {each.pid for each in first.values()}, 10)

        assert kill_one(team, random.Random(0)) in ("prefect server", "mlflow server", "other")
        wait_until(lambda: len(team.processes()) == 2, 30)
        wait_until(lambda: running.keep_up() or len(team.processes()) == 3, 30)
        (restarted,) = (name for name in first if running.started[name][0].pid != first[name].pid)
        assert running.restarts == {restarted: 1}
        assert bystander.poll() is None
        bystander.kill()
    assert not team.left()
