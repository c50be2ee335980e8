"""The campaign of kills: what it draws and kills, and that it would see what a kill leaves. One whole case is a slow test."""

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from mlflow import MlflowClient

from benchmarks.reliability.kills import CASE, STAGES, Kill, campaign, cpu_seconds, kill_one, left_behind

TREE = """
import subprocess, sys, time
shell = subprocess.Popen(["/bin/sh", "-c", "sleep 60; true"])
code = "import time; print('ready', flush=True); time.sleep(60)"  # only a started process has a command line to tell it by
stage = subprocess.Popen([sys.executable, "-c", code, "-m pipelines.stages.train_prior"])
time.sleep(60)
"""


def test_a_case_is_the_same_each_time_and_cases_differ() -> None:
    cases = [Kill.draw_case(case) for case in range(50)]
    assert cases == [Kill.draw_case(case) for case in range(50)]
    assert {each.stage for each in cases} == set(STAGES)
    assert len({each.moment for each in cases}) == 50 and all(0 <= each.moment < 1 for each in cases)


@pytest.mark.parametrize(("draw", "expected"), [(0.0, "flow"), (0.5, "shell"), (0.99, "stage")])
def test_one_process_of_the_tree_is_killed(draw: float, expected: str) -> None:
    command = [sys.executable, "-c", TREE, "pipelines.cli run"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        process.stdout.readline()
        root = psutil.Process(process.pid)
        family = {"flow": root} | {"stage" if "stages" in str(each.cmdline()) else "shell": each for each in root.children()}
        others = root.children(recursive=True)
        assert cpu_seconds(root) > 0
        assert kill_one(root, draw) == expected
        deadline = time.monotonic() + 30
        while family[expected].is_running() and family[expected].status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        for each in (*others, root):
            if each.is_running():
                each.kill()
    assert kill_one(root, draw) is None


def test_what_a_kill_leaves_is_found(tmp_path: Path) -> None:
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.create_experiment("tap", artifact_location=(tmp_path / "mlartifacts").as_uri())
    client.set_terminated(client.create_run(experiment, run_name="done").info.run_id)
    for folder in (".tracking", ".dvc/tmp", "data"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / ".dvc/tmp/rwlock").write_text("{}")
    assert left_behind(tmp_path, "no such case") == []

    client.create_run(experiment, run_name="train_prior")
    (tmp_path / ".tracking/0123").mkdir()
    (tmp_path / ".dvc/tmp/rwlock").write_text(json.dumps({"write": {"/a": {"pid": 1, "cmd": "dvc repro"}}}))
    (tmp_path / "data/.metrics.json.1.tmp").write_text("")
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(command, env={CASE: "left"}) as process:
        found = left_behind(tmp_path, "left", patience=0.5)
        process.kill()
    assert [each.partition(":")[0] for each in found] == ["process", "run", "record", "lock", "file"]


@pytest.mark.slow
def test_a_killed_run_continues_as_if_undisturbed(tmp_path: Path) -> None:
    result = campaign([0], tmp_path, budget=float("inf"), show=lambda _: None)
    assert (result["cases"], result["failed"]) == (1, [])
