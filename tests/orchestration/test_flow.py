"""The flow on a small project: the real dvc and Prefect, with stages that only write down that they ran."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import ROOT
from prefect.settings import PREFECT_API_URL
from stub_project import make_stub_project, ran
from team import wait_until

from pipelines.orchestration import flow, process, repro
from pipelines.orchestration.repro import Instance

pytestmark = pytest.mark.xdist_group("flow")  # one Prefect server for all

CHAIN = [
    *("params", "fetch@a", "train_vqvae@a-0", "train_prior@a-0", "train_critic@a-0", "train_actor@a-0", "evaluate@a-0"),
    *("teacher@a-0", "train_methods@a-0-bc", "methods@a-0-bc", "diagnose@a-0", "ablations@a-0-no-search", "report"),
]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a project whose stages only write down that they ran."""
    make_stub_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def start(project: Path, api_url: str | None) -> subprocess.Popen[bytes]:
    """`tap run --dataset a --no-promote --jobs 2` in another process, at the moment when two of its stages sleep."""
    (project / "sleep").write_text("train_vqvae@a-0 train_vqvae@a-1")
    code = "from pipelines.orchestration import flow; flow.run(['a'], None, promote=False, jobs=2)"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
    environment |= {"PYTHONPATH": str(ROOT)} | ({"PREFECT_API_URL": api_url} if api_url else {})
    # A shell's background job, as these tests may be, ignores SIGINT, and so would all that it starts.
    code = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler); {code}"
    running = subprocess.Popen(
        [sys.executable, "-c", code], cwd=project, env=environment, stderr=subprocess.PIPE, start_new_session=True
    )
    wait_until(lambda: len(sleeping(project)) == 2, 120)
    return running


def sleeping(project: Path) -> dict[int, str]:
    """The sleeping stages' process ids, and the number of threads that each may use."""
    pids = project / "pids"
    return {int(pid): threads for pid, threads in map(str.split, pids.read_text().splitlines())} if pids.exists() else {}


def gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_instances_run_after_what_they_build_on(project: Path) -> None:
    every = repro.instances(None, None)
    assert len(every) == len(set(every)) == 2 * (1 + 2 * 9 + 1) + 2  # diagnose is for the first seed only
    assert [str(each) for each in every if each.dataset != "b-c" and each.seed != 1] == CHAIN
    assert Instance("train_vqvae", "a", 0).builds_on(Instance("fetch", "a"))
    assert not Instance("evaluate", "a", 0).builds_on(Instance("train_prior", "a", 1))


@pytest.mark.parametrize("damaged", ["", "schema: '2.0'\nstages:\n  par"], ids=["empty", "cut off"])
def test_a_lock_file_that_a_full_disk_has_damaged_is_made_again_and_nothing_runs_twice(project: Path, damaged: str) -> None:
    chain = repro.instances(["a"], [0])[:3]
    repro.dvc("repro", *map(str, chain), show=lambda line, passing: None)
    assert sorted(ran(project)) == sorted(CHAIN[:3]) and repro.stale(chain) == set()
    (project / "dvc.lock").write_text(damaged)
    repro.stale(chain)
    assert repro.dvc("repro", *map(str, chain), show=lambda line, passing: None) == 0
    assert ran(project) == [] and repro.stale(chain) == set()


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("params.yaml", "keep one version, and remove the markers"),
        ("dvc.yaml", "keep one version, and remove the markers"),
        ("dvc.lock", "run `git checkout --ours dvc.lock`, or delete it"),
    ],
)
def test_a_conflict_of_a_merge_is_named_before_anything_runs(project: Path, name: str, remedy: str) -> None:
    repro.dvc("repro", "params", show=lambda line, passing: None)
    text = (project / name).read_text()
    first, rest = text.split("\n", 1)
    (project / name).write_text(f"{first}\n<<<<<<< HEAD\n=======\n# other\n>>>>>>> other\n{rest}")
    with pytest.raises(ValueError, match=rf"^{name}, line 2: two versions conflict since a merge: {remedy}"):
        repro.instances(None, None)


def test_what_params_yaml_does_not_list_is_refused(project: Path) -> None:
    with pytest.raises(ValueError, match=r"params.yaml: datasets: 'd' is not listed.*a, b-c"):
        repro.instances(["a", "d"], None)
    with pytest.raises(ValueError, match=r"params.yaml: seeds: 7 is not listed"):
        repro.instances(None, [7])


def test_flow_runs_what_is_stale_and_shows_its_output(
    project: Path, prefect_server: None, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    flow.run(["a"], [0], promote=False, jobs=1)
    assert ran(project) == CHAIN
    lines = [record.message for record in caplog.records]
    assert "this is train_prior@a-0" in lines and "100%" in lines
    assert "10%" not in lines  # a log gets one line of a quick progress bar
    assert not any("git add" in line for line in lines)
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("| a "))
    assert [cell.strip() for cell in line.split("|")[1:-1]] == [
        *(
            "a",
            "50.0 ± 1.0",
            "30.0 ± 1.0",
            "20.0 ± 1.0",
            "25.0",
            "12 ms",
            "1 seed \N{MULTIPLICATION SIGN} 2 episodes, ± over episodes",
        )
    ]

    flow.run(["a"], [0], promote=False)
    assert ran(project) == []
    assert "All 13 stages are up to date" in capsys.readouterr().out

    (project / "fail").write_text("train_prior@a-1")
    with pytest.raises(ValueError, match=r"stage train_prior@a-1 failed.*dvc repro --single-item train_prior@a-1"):
        flow.run(["a"], None, promote=False, jobs=1)
    assert ran(project) == ["train_vqvae@a-1", "train_prior@a-1"]
    assert "no more memory" in [record.message for record in caplog.records]

    (project / "seeds/0").write_text("changed")
    chosen = repro.instances(["a"], [0])
    assert {str(instance) for instance in repro.stale(chosen)} == set(CHAIN[2:])


def test_stages_run_together_once_what_they_build_on_is_done(
    project: Path, prefect_server: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not the order in which they run: DVC's lock is not a queue, and the last to ask may get it first.
    submitted, submit = list[str](), flow.run_stage.submit

    def submit_and_note(instance: Instance, **arguments: Any) -> Any:
        submitted.append(str(instance))
        return submit(instance, **arguments)

    monkeypatch.setattr(flow.run_stage, "submit", submit_and_note)
    flow.run(["a"], None, promote=False, jobs=3)
    order, every = ran(project), repro.instances(["a"], None)
    assert sorted(order) == sorted(submitted) == sorted(map(str, every))
    for instance in every:
        earlier = [order.index(str(other)) for other in every if instance.builds_on(other)]
        assert all(place < order.index(str(instance)) for place in earlier)
    assert submitted[:2] == ["params", "fetch@a"]
    assert set(submitted[2:4]) == {"train_vqvae@a-0", "train_vqvae@a-1"}  # both seeds, before any seed's other stages


def test_nothing_is_built_on_a_failed_stage(project: Path, prefect_server: None) -> None:
    (project / "fail").write_text("train_vqvae@a-0")
    with pytest.raises(ValueError, match=r"stage train_vqvae@a-0 failed"):
        flow.run(["a"], None, promote=False, jobs=2)
    tap = ("train_prior", "train_critic", "train_actor", "evaluate", "ablations", "diagnose")
    assert not [name for name in ran(project) if name == "report" or (name.startswith(tap) and "a-0" in name)]


def test_ctrl_c_ends_the_flow_and_its_stages(project: Path) -> None:
    running = start(project, None)
    family = psutil.Process(running.pid).children(recursive=True)
    assert set(sleeping(project).values()) == {str(max(1, len(os.sched_getaffinity(0)) // 2))}
    os.killpg(running.pid, signal.SIGINT)  # as a terminal does: to Prefect's temporary server as well
    _, errors = running.communicate(timeout=60)
    assert b"KeyboardInterrupt" in errors and b"Finished in state Crashed" in errors
    wait_until(lambda: all(map(gone, family)), 5)


def test_sigterm_ends_the_flow_and_its_stages(project: Path, prefect_server: None) -> None:
    running = start(project, PREFECT_API_URL.value())
    stages = [psutil.Process(pid) for pid in sleeping(project)]
    running.terminate()
    _, errors = running.communicate(timeout=60)
    assert running.returncode == -signal.SIGTERM and b"Finished in state Crashed" in errors
    assert all(map(gone, stages))


def test_a_server_that_does_not_respond_ends_the_flow_with_one_sentence(project: Path) -> None:
    code = "from pipelines.orchestration import flow; flow.run(['a'], [0], promote=False)"
    dead = {"PREFECT_API_URL": "http://127.0.0.1:9/api", "PREFECT_CLIENT_MAX_RETRIES": "0", "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", code], env=os.environ | dead, capture_output=True, text=True)
    expected = (
        "ValueError: Prefect's server does not respond (Failed to reach API at http://127.0.0.1:9/api/): the next `tap run`"
    )
    assert expected in result.stderr
    assert ran(project) == ["params"]


def test_a_flow_that_is_killed_while_its_server_starts_leaves_no_process(project: Path) -> None:
    code = "from pipelines.orchestration import flow; flow.run(['a'], [0], promote=False)"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")} | {
        "PYTHONPATH": str(ROOT)
    }
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE) as running:

        def watched() -> psutil.Process | None:
            """Prefect's server, once it has a watchdog."""
            with suppress(psutil.NoSuchProcess):
                family = psutil.Process(running.pid).children(recursive=True)
                guarded = [each.cmdline()[-1] for each in family if "watchdog" in each.cmdline()]
                return next((each for each in family if "uvicorn" in each.cmdline() and str(each.pid) in guarded), None)
            return None

        server = wait_until(watched, 120)
        port = int(server.cmdline()[server.cmdline().index("--port") + 1])
        with socket.socket() as client:
            assert client.connect_ex(("127.0.0.1", port))  # it does not answer yet
        running.kill()
    wait_until(lambda: gone(server), 60)


def test_a_killed_flow_leaves_no_process_and_no_lock(project: Path) -> None:
    running = start(project, None)
    family = psutil.Process(running.pid).children(recursive=True)
    names = [" ".join(member.cmdline()) for member in family]
    assert any("uvicorn" in name for name in names) and sum("stage.py train_vqvae" in name for name in names) >= 2
    running.kill()
    running.communicate()
    (project / "sleep").unlink()
    # Another process with the id of the killed dvc, in DVC's eyes still at work.
    lock = {"pid": os.getpid(), "cmd": "dvc repro"}
    (project / ".dvc/tmp/rwlock").write_text(json.dumps({"write": {str(project / "data/vqvae/a-0"): lock}}))
    assert repro.dvc("repro", "--single-item", "train_vqvae@a-0", show=lambda line, _: print(line)) == 0
    wait_until(lambda: all(map(gone, family)), 30)


def test_one_process_at_a_time_has_its_turn(tmp_path: Path) -> None:
    lines: list[tuple[str, bool]] = []

    def show(line: str, passing: bool) -> None:
        lines.append((line, passing))
        if line == "begun":
            other.append(subprocess.Popen([sys.executable, "-c", second], cwd=ROOT, stdout=subprocess.PIPE))
            time.sleep(1)

    def taken_over() -> None:
        lines.append(("taken over", False))

    other: list[subprocess.Popen[bytes]] = []
    turn = process.Turn(tmp_path / "lock", taken_over)
    second = f"""
from pathlib import Path
from pipelines.orchestration.process import Turn
with Turn(Path({str(turn.path)!r}), lambda: None).taken(print):
    print('second')
"""
    command = r"echo begun; printf '1%%\r2%%\r'; printf '3%%\n' >&2; sleep 1; exit 3"
    with turn.taken(show), turn.taken(show) as lock:
        assert process.run(["sh", "-c", command], show, keep_open=[lock]) == 3
    assert lines == [("taken over", False), ("begun", False), ("1%", True), ("2%", True), ("3%", False)]
    output = other[0].communicate(timeout=10)[0].decode().splitlines()
    assert output == ["another run is active in this folder: waiting for it to end False", "second"]
    with turn.taken(show):
        assert lines[-1] == ("taken over", False)


def test_a_command_sees_the_variables_that_it_is_given() -> None:
    lines: list[str] = []
    command = ["sh", "-c", "echo gpus $CUDA_VISIBLE_DEVICES"]
    process.run(command, lambda line, _: lines.append(line), {"CUDA_VISIBLE_DEVICES": "0,3"})
    assert lines == ["gpus 0,3"]
