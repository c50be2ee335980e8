"""Runs in real stores: a new sqlite file, a server, a server that dies, a port without a server."""

import errno
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT
from mlflow import MlflowClient
from mlflow.entities import Run as StoredRun
from typer.testing import CliRunner
from werkzeug.serving import BaseWSGIServer, make_server

from pipelines.cli import app
from tap.settings import Runtime
from tap.tracking import run as tracking
from tap.tracking.mlflow_store import connect
from tap.tracking.registry import log_policy, open_registry
from tap.tracking.run import Run, start_run

TAGS = {"dataset": "hopper-medium-replay", "seed": 0, "scale": "cpu", "dataset_digest": "abc"}
PARAMS = {"fit": {"updates": 20, "betas": [0.9, 0.95]}, "latent_step": 3}
OUTBOX = Path(".tracking")
# A run in a process of its own, in which something happens.
PROGRAM = (
    "import os, signal, sys\nfrom tap.settings import Runtime\nfrom tap.tracking.run import start_run\n"
    f"arguments = dict(name='fetch', params={{}}, tags={TAGS!r}, runtime=Runtime(), resume=sys.argv[1] or None)\n"
    "with start_run('fetch', **arguments) as run:\n"
    "    print(run.id, flush=True)\n"
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with the outbox."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def terminated(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[tuple[str, int]]]:
    """A store that two processes made at the same time; each one's run, in which it got SIGTERM, and exit code."""
    folder = tmp_path_factory.mktemp("store")
    program = PROGRAM + "    os.kill(os.getpid(), signal.SIGTERM)\n    print('still alive')\n"
    command, environment = [sys.executable, "-c", program, ""], os.environ | {"MLFLOW_TRACKING_URI": "sqlite:///mlflow.db"}
    processes = [subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    ends = [(process.communicate(timeout=120)[0].strip(), process.returncode) for process in processes]
    return f"sqlite:///{folder}/mlflow.db", ends


@pytest.fixture(scope="module")
def store(terminated: tuple[str, list[tuple[str, int]]]) -> str:
    return terminated[0]


def run(uri: str, stage: str = "train_prior", runtime: dict[str, str] | None = None, **changes: Any) -> Any:
    settings = {"name": "prior", "params": PARAMS, "tags": TAGS, "runtime": Runtime(tracking_uri=uri, **(runtime or {}))}
    return start_run(stage, **(settings | changes))


def stored(uri: str, key: str) -> StoredRun:
    """The one run that a store has under a key."""
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("tap")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id], f"tags.run_key = '{key}'")
    return found


def history(uri: str, key: str, metric: str) -> list[tuple[int, float]]:
    """All steps and values of a metric, duplicates included."""
    return [(each.step, each.value) for each in MlflowClient(uri).get_metric_history(stored(uri, key).info.run_id, metric)]


def wait_until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def records() -> list[str]:
    """The keys of the runs that wait for delivery."""
    return sorted(path.parent.name for path in OUTBOX.glob("*/events.jsonl"))


def sync(uri: str) -> list[tuple[str, str]]:
    """The outcome for each run in the outbox, by the run's name."""
    return [(each.run.split(" (")[0], each.outcome) for each in tracking.sync(Runtime(tracking_uri=uri))]


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a server that is down."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
    return f"http://user:secret@127.0.0.1:{free_port()}"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture(params=["file", "server"])
def any_store(request: pytest.FixtureRequest) -> str:
    """The address of a store, as a file and as a server before it."""
    return str(request.getfixturevalue("store")) if request.param == "file" else request.getfixturevalue("server").uri


def test_run_keeps_params_tags_metrics_artifacts_and_system_metrics(store: str) -> None:
    with run(store) as tracked:
        for step in range(1500):  # more than one request takes
            tracked.log_metrics(step, {"loss": 1 / (step + 1)})
        tracked.set_tags({"note": 7})
        tracked.log_json({"a": [1]}, "report.json")
    client, found = MlflowClient(store), stored(store, tracked.id)
    assert found.info.status == "FINISHED" and found.info.run_name == "prior"
    assert found.data.params == {"fit.updates": "20", "fit.betas": "[0.9, 0.95]", "latent_step": "3"}
    expected = {key: str(value) for key, value in TAGS.items()}
    expected |= {"stage": "train_prior", "dvc_stage": "train_prior@hopper-medium-replay-0", "note": "7", "run_key": tracked.id}
    assert expected.items() <= found.data.tags.items()
    assert {"git_commit", "git_dirty"} <= found.data.tags.keys()
    assert sorted(history(store, tracked.id, "loss")) == [(step, 1 / (step + 1)) for step in range(1500)]
    assert {file.path for file in client.list_artifacts(found.info.run_id)} == {"report.json"}
    artifacts = Path(store.removeprefix("sqlite:///")).parent / "mlartifacts"
    assert json.loads((artifacts / found.info.run_id / "artifacts/report.json").read_text()) == {"a": [1]}
    # A run of a second has its reading of the machine too.
    assert found.data.metrics["system/system_memory_usage_megabytes"] > 0
    assert "system/cpu_utilization_percentage" in found.data.metrics
    assert records() == []


def test_metrics_are_sent_while_the_run_goes_on(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.1")
    with run(store) as tracked:
        wait_until(lambda: MlflowClient(store).search_runs(["1"], f"tags.run_key = '{tracked.id}'"))
        tracked.log_metrics(3, {"loss": 0.5})
        wait_until(lambda: "loss" in stored(store, tracked.id).data.metrics)
        assert stored(store, tracked.id).info.status == "RUNNING"
        assert sync(store) == [("prior", "in use")]


@pytest.mark.parametrize(("error", "status"), [(RuntimeError, "FAILED"), (KeyboardInterrupt, "KILLED"), (SystemExit, "KILLED")])
def test_how_a_run_ends(store: str, error: type[BaseException], status: str) -> None:
    with pytest.raises(error), run(store) as tracked:
        tracked.log_metrics(1, {"loss": 2.0})
        raise error
    found = stored(store, tracked.id)
    assert found.info.status == status and found.data.metrics["loss"] == 2.0


def test_processes_share_a_new_store_and_sigterm_kills_their_runs(terminated: tuple[str, list[tuple[str, int]]]) -> None:
    uri, ends = terminated
    assert len({key for key, _ in ends}) == 2
    for key, exit_code in ends:
        assert exit_code == 128 + signal.SIGTERM
        assert stored(uri, key).info.status == "KILLED"


def test_resume_goes_on_with_a_run(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.1")
    with pytest.raises(KeyboardInterrupt), run(store) as first:
        first.log_metrics(1, {"loss": 3.0})
        raise KeyboardInterrupt
    with run(store, resume=first.id) as second:
        wait_until(lambda: stored(store, first.id).info.status == "RUNNING")
        second.log_metrics(2, {"loss": 2.0})
    assert second.id == first.id and stored(store, first.id).info.status == "FINISHED"
    assert history(store, first.id, "loss") == [(1, 3.0), (2, 2.0)]

    MlflowClient(store).delete_run(stored(store, first.id).info.run_id)
    with run(store, resume=first.id) as third:
        pass
    assert third.id == first.id and stored(store, first.id).info.status == "FINISHED"


def test_lineage_names_run_code_data_and_versions(store: str) -> None:
    with run(store) as tracked:
        lineage = tracking.lineage("train_prior", tracked, "abc", 1.5)
    assert (lineage.run_id, lineage.dataset_digest, lineage.stage) == (tracked.id, "abc", "train_prior")
    assert lineage.versions.keys() == {"torch", "numpy", "gymnasium", "mujoco", "tap"}
    assert lineage.versions["numpy"] == np.__version__


def test_git_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert tracking.git_state() == ("unknown", "unknown")

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(["git", *identity, *arguments], check=True, capture_output=True, text=True).stdout.strip()

    (tmp_path / "tap").mkdir()
    (tmp_path / "tap/a.py").write_text("")
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    (tmp_path / "metrics.json").write_text("{}")  # what a pipeline writes is not the code
    assert tracking.git_state() == (git("rev-parse", "HEAD"), False)
    (tmp_path / "tap/a.py").write_text("changed = True\n")
    assert tracking.git_state()[1]


# A store that is down. Every test also runs what a stage would call.


def use(tracked: Run, policy_folder: Path) -> None:
    tracked.log_metrics(5, {"loss": 1.0})
    tracked.set_tags({"note": "late"})
    tracked.log_json({}, "late.json")
    log_policy(tracked, policy_folder, np.zeros((1, 11)), 3)
    tracked.register(f"tap-{tracked.id}", {"score": 1.5}, "# A policy")


def assert_used_once(uri: str, key: str) -> None:
    client, found = MlflowClient(uri), stored(uri, key)
    assert found.info.status == "FINISHED" and found.data.tags["note"] == "late"
    assert history(uri, key, "loss").count((5, 1.0)) == 1
    assert [file.path for file in client.list_artifacts(found.info.run_id)] == ["late.json"]
    (model,) = client.search_logged_models([found.info.experiment_id], f"source_run_id = '{found.info.run_id}'")
    assert found.outputs is not None and [output.model_id for output in found.outputs.model_outputs] == [model.model_id]
    with open_registry(uri) as registry:
        version = registry.version_of_run(f"tap-{key}", key)
        assert version is not None and version.version == "1" and version.tags == {"score": "1.5", "run_key": key}
        assert registry.load_test(version).actions.shape == (1, 3)
    (only,) = client.search_model_versions(f"name = 'tap-{key}'")
    assert only.description == "# A policy" and only.run_id == found.info.run_id


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_server_that_is_down_costs_one_warning_and_sync_delivers(
    nowhere: str, store: str, caplog: pytest.LogCaptureFixture, tiny_policy_folder: Path
) -> None:
    start = time.monotonic()
    with run(nowhere) as tracked:
        for step in range(100, 200):
            tracked.log_metrics(step, {"later": 1.0})
        assert time.monotonic() - start < 2  # training does not wait for the server
        use(tracked, tiny_policy_folder)
    assert time.monotonic() - start < 15
    (warning,) = warnings(caplog)
    assert nowhere.replace("user:secret@", "") in warning and "secret" not in warning
    assert f".tracking/{tracked.id}: run `tap sync`" in warning and records() == [tracked.id]

    with pytest.raises(ValueError, match=r"nothing is lost.*`tap sync` again"):
        sync(nowhere)
    assert records() == [tracked.id]
    ended = time.time()
    assert sync(store) == [("prior", "delivered")]
    assert_used_once(store, tracked.id)
    assert stored(store, tracked.id).info.end_time < 1000 * ended
    assert sync(store) == [] and not list(OUTBOX.iterdir())


def test_a_file_that_is_not_a_store_costs_one_warning(
    caplog: pytest.LogCaptureFixture, store: str, tiny_policy_folder: Path
) -> None:
    file = tiny_policy_folder / "mlflow.db"
    file.write_text("not a database, not even a short one" * 50)
    with run(f"sqlite:///{file}") as tracked:
        tracked.log_metrics(1, {"loss": 1.0})
    assert records() == [tracked.id] and len(warnings(caplog)) == 1


@pytest.fixture
def server(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator["Server"]:
    monkeypatch.setenv("_MLFLOW_SERVER_FILE_STORE", store)
    monkeypatch.setenv("_MLFLOW_SERVER_SERVE_ARTIFACTS", "true")
    monkeypatch.setenv("_MLFLOW_SERVER_ARTIFACT_DESTINATION", str(tmp_path / "served"))
    monkeypatch.setenv("_MLFLOW_SERVER_ARTIFACT_ROOT", "mlflow-artifacts:/")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.2")
    server = Server(free_port())
    server.start()
    yield server
    server.stop()


class Server:
    """MLflow's own web application, in a thread."""

    def __init__(self, port: int) -> None:
        self.port, self.uri = port, f"http://127.0.0.1:{port}"
        self.web: BaseWSGIServer | None = None

    def start(self) -> None:
        from mlflow.server import app

        self.web = make_server("127.0.0.1", self.port, app, threaded=True)
        threading.Thread(target=self.web.serve_forever, daemon=True).start()

    def stop(self) -> None:
        if self.web:
            self.web.shutdown()
            self.web.server_close()
            self.web = None


@pytest.mark.parametrize("when", ["middle", "end"])
def test_what_a_server_misses_is_delivered_once(
    server: Server, store: str, caplog: pytest.LogCaptureFixture, tiny_policy_folder: Path, when: str
) -> None:
    with run(server.uri) as tracked:
        wait_until(lambda: MlflowClient(store).search_runs(["1"], f"tags.run_key = '{tracked.id}'"))
        tracked.log_metrics(1, {"loss": 9.0})
        if when == "middle":
            server.stop()
        use(tracked, tiny_policy_folder)
        wait_until(lambda: warnings(caplog) or MlflowClient(store).search_model_versions(f"name = 'tap-{tracked.id}'"))
        server.stop()
    (warning,) = warnings(caplog)
    assert server.uri in warning and stored(store, tracked.id).info.status == "RUNNING"  # its end was not delivered
    server.start()
    assert sync(server.uri) == [("prior", "delivered")]
    assert_used_once(store, tracked.id)
    assert history(store, tracked.id, "loss") == [(1, 9.0), (5, 1.0)]


def test_a_server_that_is_up_again_misses_nothing(server: Server, store: str, caplog: pytest.LogCaptureFixture) -> None:
    with run(server.uri) as tracked:
        server.stop()
        tracked.log_metrics(1, {"loss": 9.0})
        wait_until(lambda: warnings(caplog))
        tracked.log_metrics(2, {"loss": 8.0})
        server.start()
    assert stored(store, tracked.id).info.status == "FINISHED" and records() == []
    assert history(store, tracked.id, "loss") == [(1, 9.0), (2, 8.0)]
    assert len(warnings(caplog)) == 1


def test_a_record_delivered_again_is_stored_once(any_store: str, nowhere: str, tiny_policy_folder: Path) -> None:
    """As after a kill between a request and its answer, at the worst moments."""
    with run(nowhere) as tracked:
        tracked.log_metrics(1, {"nan": float("nan"), "loss": 2.0})
        use(tracked, tiny_policy_folder)
    shutil.copytree(OUTBOX / tracked.id, "copy")
    client = connect(any_store)
    tags = {"run_key": tracked.id}
    made = [client.create_run("1", tags=tags).info.run_id for _ in range(2)]  # by a request that was sent twice
    client.create_logged_model("1", "policy", made[0], tags)  # and its upload broke off
    for _ in range(2):
        assert sync(any_store) == [("prior", "delivered")]
        assert_used_once(any_store, tracked.id)
        assert history(any_store, tracked.id, "loss") == [(1, 2.0), (5, 1.0)]
        assert len(history(any_store, tracked.id, "nan")) == 1
        shutil.copytree("copy", OUTBOX / tracked.id)


def test_two_processes_sync_at_once(nowhere: str, store: str) -> None:
    keys = []
    for step in range(3):
        with run(nowhere, name=f"prior {step}") as tracked:
            tracked.log_metrics(step, {"loss": 1.0})
        keys.append(tracked.id)
    command, environment = [sys.executable, "-m", "pipelines.cli", "sync"], os.environ | {"MLFLOW_TRACKING_URI": store}
    processes = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    lines = [line for process in processes for line in process.communicate(timeout=120)[0].splitlines()]
    assert [process.returncode for process in processes] == [0, 0] and records() == []
    assert sorted(line.split(" (")[0] for line in lines if "delivered" in line and "in use" not in line) == [
        "prior 0", "prior 1", "prior 2"
    ]  # fmt: skip
    for step, key in enumerate(keys):
        assert stored(store, key).info.status == "FINISHED" and history(store, key, "loss") == [(step, 1.0)]


def test_sync_as_a_command(store: str, nowhere: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with run(nowhere) as tracked:
        pass
    monkeypatch.setenv("MLFLOW_TRACKING_URI", nowhere)
    with pytest.raises(SystemExit, match=r"^error: MLflow at .* failed .*nothing is lost"):
        app(["sync"])
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    answers = [CliRunner().invoke(app, ["sync"], catch_exceptions=False).stdout for _ in range(2)]
    assert answers[0].strip() == f"prior ({tracked.id}): delivered"
    assert answers[1].strip() == "all runs are delivered"


# Processes that die by kill -9.


def kill_a_run(uri: str, resume: str = "") -> str:
    """The key of a run whose process was killed after it had logged a metric."""
    program = PROGRAM + "    run.log_metrics(1, {'loss': 4.0})\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    environment = os.environ | {"MLFLOW_TRACKING_URI": uri}
    process = subprocess.run(
        [sys.executable, "-c", program, resume], env=environment, capture_output=True, text=True, timeout=120
    )
    assert process.returncode == -signal.SIGKILL
    return process.stdout.strip()


def test_the_next_run_of_a_stage_ends_one_that_was_killed(store: str) -> None:
    key = kill_a_run(store)
    with run(store, "train_prior"):  # another stage leaves it
        assert key in records()
    before = time.time()
    with run(store, "fetch") as tracked:
        pass
    found = stored(store, key)
    assert found.info.status == "KILLED" and found.info.end_time < 1000 * before
    assert history(store, key, "loss") == [(1, 4.0)]
    assert stored(store, tracked.id).info.status == "FINISHED" and records() == []


def test_sync_ends_a_run_that_was_killed(store: str) -> None:
    key = kill_a_run(store)
    assert sync(store) == [("fetch", "delivered")]
    assert stored(store, key).info.status == "KILLED" and history(store, key, "loss") == [(1, 4.0)]


@pytest.mark.parametrize("synced", [False, True])
def test_a_killed_run_that_is_resumed_goes_on_as_one(store: str, synced: bool) -> None:
    key = kill_a_run(store)
    if synced:
        sync(store)
    with run(store, "fetch", resume=key) as tracked:
        tracked.log_metrics(2, {"loss": 3.0})
    assert tracked.id == key and stored(store, key).info.status == "FINISHED" and records() == []
    assert history(store, key, "loss") == [(1, 4.0), (2, 3.0)]


def test_a_line_cut_off_by_a_kill_is_no_loss_and_a_damaged_one_is_named(
    store: str, nowhere: str, caplog: pytest.LogCaptureFixture
) -> None:
    key = kill_a_run(nowhere)
    events = OUTBOX / key / "events.jsonl"
    with events.open("a") as file:
        file.write('{"event": "metrics", "ti')
    with run(nowhere, "fetch", resume=key) as tracked:
        tracked.log_metrics(2, {"loss": 3.0})
    whole = events.read_text()
    lines = whole.splitlines(keepends=True)
    events.write_text("".join([lines[0], lines[1][:20] + "\n", *lines[2:]]))
    (outcome,) = tracking.sync(Runtime(tracking_uri=store))
    assert outcome.outcome == "failed" and f"{events}, line 2 is damaged" in outcome.reason
    with run(store, "fetch"):  # which would end a killed run of its stage
        pass
    events.write_text(whole)
    assert sync(store) == [("fetch", "delivered")]
    assert history(store, key, "loss") == [(1, 4.0), (2, 3.0)]


def test_an_outbox_that_cannot_be_written_is_named(store: str, folder: Path) -> None:
    (folder / "file").write_text("")
    with (
        pytest.raises(ValueError, match=r"file/outbox cannot be written .*TAP_OUTBOX"),
        run(store, runtime={"outbox": "file/outbox"}),
    ):
        pass


def test_a_policy_that_cannot_be_kept_ends_the_stage_but_metrics_that_cannot_only_warn(
    store: str, caplog: pytest.LogCaptureFixture
) -> None:
    def full(folder: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match=r"No space left on device: '\.tracking/\w+/model'"), run(store) as tracked:
        tracked.log_model(full)
    assert stored(store, tracked.id).info.status == "FAILED"
    with run(store) as tracked:
        (outbox := Path(tracked._record.folder) / "artifacts").write_text("a file where a folder belongs")
        tracked.log_json({}, "metrics.json")
    assert f"{outbox.parent} cannot be written" in caplog.text and stored(store, tracked.id).info.status == "FINISHED"


# Runs that belong together.


@pytest.mark.parametrize("first", ["parent", "child"])
def test_a_child_lies_under_its_parent_whichever_is_delivered_first(store: str, nowhere: str, first: str) -> None:
    with run(nowhere if first == "child" else store, "sweep", name="sweep", tags={"note": "all"}) as parent:
        belongs = {"parent_run": parent.id, "flow_run": "a-flow"}
        with run(nowhere if first == "parent" else store, runtime=belongs) as child:
            pass
    assert len(sync(store)) == 1
    above, below = stored(store, parent.id), stored(store, child.id)
    assert below.data.tags["mlflow.parentRunId"] == above.info.run_id
    assert below.data.tags["flow_run"] == "a-flow" and below.data.tags["parent_run"] == parent.id
    assert above.data.tags["stage"] == above.data.tags["dvc_stage"] == "sweep" and "mlflow.parentRunId" not in above.data.tags


def test_runs_of_a_lost_machine_are_ended(store: str, nowhere: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.1")
    with run(store, runtime={"flow_run": "lost"}) as lost, run(store, "evaluate", runtime={"flow_run": "other"}) as other:
        for key in (lost.id, other.id):
            wait_until(
                lambda key=key: MlflowClient(store).search_runs(["1"], f"tags.run_key = '{key}' and tags.flow_run != ''")
            )
        assert tracking.end_runs(store, "lost") == 1
        assert [stored(store, key).info.status for key in (lost.id, other.id)] == ["KILLED", "RUNNING"]
        assert tracking.end_runs(store, "lost") == 0
    with pytest.raises(ValueError, match="check MLFLOW_TRACKING_URI"):
        tracking.end_runs(nowhere, "lost")


SETTINGS = """
import os
import {package}
from mlflow.environment_variables import MLFLOW_HTTP_REQUEST_MAX_RETRIES, MLFLOW_HTTP_REQUEST_TIMEOUT
print(MLFLOW_HTTP_REQUEST_MAX_RETRIES.get(), MLFLOW_HTTP_REQUEST_TIMEOUT.get(), os.environ.get("OMP_WAIT_POLICY"))
"""


@pytest.mark.parametrize(
    ("package", "settings"), [("pipelines", ["2", "20", "PASSIVE"]), ("tap.tracking.registry", ["7", "120", "None"])]
)
def test_programs_configure_their_process_and_the_library_leaves_mlflows_defaults(package: str, settings: list[str]) -> None:
    prefixes = ("MLFLOW_HTTP_", "OMP_WAIT_")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(prefixes)}
    command = [sys.executable, "-c", SETTINGS.format(package=package)]
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.split() == settings
