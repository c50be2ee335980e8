"""A team at work: real Prefect and MLflow servers, a DVC remote, two workers with their own clones, one of which is lost."""

import re
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress

import psutil
import pytest
import yaml
from conftest import IDENTITY, metrics, run
from team import DATASET, Team, wait_until

pytestmark = pytest.mark.sweep
SEEDS = [0, 1, 2]
STAGES = ("train_vqvae", "train_prior", "train_critic", "train_actor", "evaluate")


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    team = Team.make(tmp_path_factory.mktemp("team"), SEEDS)
    with team.servers():
        yield team


def at_work(worker: psutil.Process, stage: str) -> str | None:
    """What a worker does a stage for: DATASET-SEED."""
    for child in worker.children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
            match child.cmdline():
                case [_, "-m", module, dataset, seed] if module == f"pipelines.stages.{stage}":
                    return f"{dataset}-{seed}"
    return None


def kill_hard(process: psutil.Process) -> None:
    """As a machine that loses power: everything at once, watchdogs too."""
    family = [*process.children(recursive=True), process]
    for member in family:
        member.suspend()
    for member in family:
        member.kill()


def test_a_sweep_survives_the_loss_of_a_worker(team: Team) -> None:
    with team.worker("one"), team.worker("two") as lost, team.sweep() as sweep:

        def caught() -> str | None:
            """The combination that the worker trains, as soon as there is a checkpoint of it."""
            name = at_work(lost, "train_vqvae")
            return name if name and list(team.folder.glob(f"checkpoints/train_vqvae-{name}*/checkpoint.pt")) else None

        name = wait_until(caught, 240)
        kill_hard(lost)
        # Meanwhile, the same on one machine, which shares nothing with the team.
        run(team.folder, "git", "clone", "-q", "launcher", "alone")
        alone = team.folder / "alone"
        run(alone, sys.executable, "-m", "dvc", "repro", *(f"evaluate@{DATASET}-{seed}" for seed in SEEDS))
        output, _ = sweep.communicate(timeout=400)
        assert sweep.returncode == 0, output
    assert set(re.findall(r"Running stage '(\S+)'", output)) == {"params", f"fetch@{DATASET}", "report"}  # the rest is restored

    combinations = team.combinations()
    assert set(combinations) == {f"{DATASET}-{seed}" for seed in SEEDS}
    assert {each.state and each.state.name for each in combinations.values()} == {"Completed"}
    assert {key: each.run_count for key, each in combinations.items()} == {key: 1 + (key == name) for key in combinations}

    for stage in STAGES:
        assert metrics(team.launcher, stage) == metrics(alone, stage)
    assert "Data and pipelines are up to date." in run(team.launcher, sys.executable, "-m", "dvc", "status").stdout

    runs = team.runs()
    assert {each.info.status for each in runs} <= {"FINISHED", "KILLED"}
    finished = [each for each in runs if each.info.status == "FINISHED"]
    stages = [each.data.tags["stage"] for each in finished]
    counts = {stage: stages.count(stage) for stage in ("sweep", "train_evaluate", *STAGES)}
    # Nothing was computed twice: the lost training was resumed, and goes on in its run.
    assert counts == {"sweep": 1} | dict.fromkeys(("train_evaluate", *STAGES), len(SEEDS))
    (parent,) = (each for each in finished if each.data.tags["stage"] == "sweep")
    for each in finished:
        if each.data.tags["stage"] == "train_evaluate":
            assert each.data.tags["mlflow.parentRunId"] == parent.info.run_id
            assert {"normalized_score", "codebook_perplexity", "latency_ms_median"} <= set(each.data.metrics)


def test_a_cancelled_sweep_leaves_nothing_running_and_the_next_goes_on(team: Team) -> None:
    content = yaml.safe_load((team.launcher / "params.yaml").read_text())
    (team.launcher / "params.yaml").write_text(yaml.safe_dump(content | {"seeds": [4]}))
    run(team.launcher, "git", *IDENTITY, "commit", "-qam", "another seed")
    name = f"{DATASET}-4"
    with team.worker("one") as worker:
        with team.sweep() as sweep:
            wait_until(lambda: at_work(worker, "train_prior"), 240)
            sweep.send_signal(signal.SIGINT)
            output, _ = sweep.communicate(timeout=120)
        assert sweep.returncode != 0 and not at_work(worker, "train_prior"), output
        state = team.combinations()[name].state
        assert state and state.name == "Cancelled"

        with team.sweep() as sweep:
            output, _ = sweep.communicate(timeout=300)
        assert sweep.returncode == 0, output
    assert f"{name}.json" in metrics(team.launcher)
    runs = [each for each in team.runs() if each.data.tags.get("seed") == "4"]
    assert [each.data.tags["stage"] for each in runs].count("train_vqvae") == 1  # it was done
    assert "RUNNING" not in {each.info.status for each in team.runs()}
