"""Runs in real stores: a new sqlite file, a server, a server that dies, a port where nobody listens."""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlflow import MlflowClient
from mlflow.entities import Run as StoredRun
from werkzeug.serving import BaseWSGIServer, make_server

from tap import tracking
from tap.registry import log_policy
from tap.tracking import Run, start_run

TAGS = {"dataset": "hopper-medium-replay", "seed": 0, "scale": "cpu", "dataset_digest": "abc"}
PARAMS = {"fit": {"updates": 20, "betas": [0.9, 0.95]}, "latent_step": 3}


@pytest.fixture(scope="module")
def terminated(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[tuple[str, int]]]:
    """A store that two processes made at the same time; each one's run, in which it got SIGTERM, and exit code."""
    folder = tmp_path_factory.mktemp("store")
    program = (
        "import os, signal\nfrom tap.tracking import start_run\n"
        f"with start_run('fetch', name='fetch', params={{}}, tags={TAGS!r}, tracking_uri='sqlite:///mlflow.db') as run:\n"
        "    print(run.id, flush=True)\n    os.kill(os.getpid(), signal.SIGTERM)\n    print('still alive')\n"
    )
    command = [sys.executable, "-c", program]
    processes = [subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    ends = [(process.communicate(timeout=120)[0].strip(), process.returncode) for process in processes]
    return f"sqlite:///{folder}/mlflow.db", ends


@pytest.fixture(scope="module")
def store(terminated: tuple[str, list[tuple[str, int]]]) -> str:
    return terminated[0]


def run(uri: str, **changes: Any) -> Any:
    return start_run("train_prior", **({"name": "prior", "params": PARAMS, "tags": TAGS, "tracking_uri": uri} | changes))


def stored(uri: str, run_id: str | None) -> StoredRun:
    assert run_id is not None
    return MlflowClient(uri).get_run(run_id)


def test_run_keeps_params_tags_metrics_artifacts_and_system_metrics(store: str, tmp_path: Path) -> None:
    (tmp_path / "curve.csv").write_text("step,loss\n")
    with run(store) as tracked:
        for step in range(1500):  # more than one request takes
            tracked.log_metrics(step, {"loss": 1 / (step + 1)})
        tracked.set_tags({"note": 7})
        tracked.log_artifact(tmp_path / "curve.csv")
        tracked.log_json({"a": [1]}, "report.json")
    client, found = MlflowClient(store), stored(store, tracked.id)
    assert found.info.status == "FINISHED" and found.info.run_name == "prior"
    assert client.get_experiment(found.info.experiment_id).name == "tap"
    assert found.data.params == {"fit.updates": "20", "fit.betas": "[0.9, 0.95]", "latent_step": "3"}
    expected = {key: str(value) for key, value in TAGS.items()}
    expected |= {"stage": "train_prior", "dvc_stage": "train_prior@hopper-medium-replay-0", "note": "7"}
    assert expected.items() <= found.data.tags.items()
    assert {"git_commit", "git_dirty"} <= found.data.tags.keys()
    history = client.get_metric_history(tracked.id, "loss")
    assert {metric.step: metric.value for metric in history} == {step: 1 / (step + 1) for step in range(1500)}
    assert {file.path for file in client.list_artifacts(tracked.id)} == {"curve.csv", "report.json"}
    artifacts = Path(store.removeprefix("sqlite:///")).parent / "mlartifacts"
    assert (artifacts / tracked.id / "artifacts/report.json").exists()
    # A run of a second has its reading of the machine too.
    assert found.data.metrics["system/system_memory_usage_megabytes"] > 0
    assert "system/cpu_utilization_percentage" in found.data.metrics


def test_metrics_are_sent_while_the_run_goes_on(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.1")
    with run(store) as tracked:
        tracked.log_metrics(3, {"loss": 0.5})
        deadline = time.monotonic() + 10
        while "loss" not in stored(store, tracked.id).data.metrics:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert stored(store, tracked.id).info.status == "RUNNING"


@pytest.mark.parametrize(("error", "status"), [(RuntimeError, "FAILED"), (KeyboardInterrupt, "KILLED"), (SystemExit, "KILLED")])
def test_how_a_run_ends(store: str, error: type[BaseException], status: str) -> None:
    with pytest.raises(error), run(store) as tracked:
        tracked.log_metrics(1, {"loss": 2.0})
        raise error
    found = stored(store, tracked.id)
    assert found.info.status == status and found.data.metrics["loss"] == 2.0


def test_processes_share_a_new_store_and_sigterm_kills_their_runs(terminated: tuple[str, list[tuple[str, int]]]) -> None:
    uri, ends = terminated
    assert len({run_id for run_id, _ in ends}) == 2
    for run_id, exit_code in ends:
        assert exit_code == 128 + signal.SIGTERM
        assert stored(uri, run_id).info.status == "KILLED"


def test_resume_goes_on_with_a_run_that_exists(store: str) -> None:
    with pytest.raises(KeyboardInterrupt), run(store) as first:
        first.log_metrics(1, {"loss": 3.0})
        raise KeyboardInterrupt
    with run(store, resume=first.id) as second:
        assert stored(store, second.id).info.status == "RUNNING"
        second.log_metrics(2, {"loss": 2.0})
    assert second.id == first.id and stored(store, first.id).info.status == "FINISHED"
    assert [metric.step for metric in MlflowClient(store).get_metric_history(first.id, "loss")] == [1, 2]

    MlflowClient(store).delete_run(first.id)
    for gone in (first.id, "0" * 32):
        with run(store, resume=gone) as third:
            pass
        assert third.id not in (None, gone)


def test_lineage_names_run_code_data_and_versions(store: str) -> None:
    with run(store) as tracked:
        lineage = tracking.lineage("train_prior", tracked, "abc")
    assert lineage["run_id"] == tracked.id and lineage["dataset_digest"] == "abc" and lineage["stage"] == "train_prior"
    assert lineage["versions"].keys() == {"torch", "numpy", "gymnasium", "mujoco", "tap"}
    assert lineage["versions"]["numpy"] == np.__version__


def test_git_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert tracking.git_state() == ("unknown", False)

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


# A store that is away. Every test also runs what a stage would call.


def use(tracked: Run, policy_folder: Path) -> None:
    tracked.log_metrics(5, {"loss": 1.0})
    tracked.set_tags({"note": "lost"})
    tracked.log_json({}, "lost.json")
    tracked.log_artifact(policy_folder / "vqvae.json")
    assert log_policy(tracked, policy_folder, np.zeros((1, 11))) is None


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_a_server_that_is_not_there_costs_one_warning(caplog: pytest.LogCaptureFixture, tiny_policy_folder: Path) -> None:
    uri = f"http://user:secret@127.0.0.1:{free_port()}"
    start = time.monotonic()
    with run(uri) as tracked:
        use(tracked, tiny_policy_folder)
    assert time.monotonic() - start < 6
    assert tracked.id is None and tracking.lineage("fetch", tracked, "abc")["run_id"] is None
    (warning,) = warnings(caplog)
    assert uri.replace("user:secret@", "") in warning and "not tracked" in warning and "secret" not in warning


def test_a_file_that_is_no_store_costs_one_warning(caplog: pytest.LogCaptureFixture, tiny_policy_folder: Path) -> None:
    file = tiny_policy_folder / "mlflow.db"
    file.write_text("not a database, not even a short one" * 50)
    with run(f"sqlite:///{file}") as tracked:
        use(tracked, tiny_policy_folder)
    assert tracked.id is None and len(warnings(caplog)) == 1


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


def test_a_server_that_vanishes_costs_one_warning(
    server: Server, store: str, caplog: pytest.LogCaptureFixture, tiny_policy_folder: Path
) -> None:
    with run(server.uri) as tracked:
        tracked.log_metrics(1, {"loss": 9.0})
        server.stop()
        start = time.monotonic()
        for step in range(100, 200):
            tracked.log_metrics(step, {"later": 1.0})
        assert time.monotonic() - start < 0.5  # training does not wait for the server
        use(tracked, tiny_policy_folder)
    assert tracked.id is not None
    (warning,) = warnings(caplog)
    assert server.uri in warning and "lost" in warning
    assert stored(store, tracked.id).info.status == "RUNNING"  # nobody could tell it


def test_a_server_that_comes_back_misses_no_metric(server: Server, store: str, caplog: pytest.LogCaptureFixture) -> None:
    with run(server.uri) as tracked:
        server.stop()
        tracked.log_metrics(1, {"loss": 9.0})
        deadline = time.monotonic() + 10
        while not warnings(caplog):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        tracked.log_metrics(2, {"loss": 8.0})
        server.start()
    found = stored(store, tracked.id)
    assert found.info.status == "FINISHED"
    assert [metric.step for metric in MlflowClient(store).get_metric_history(tracked.id, "loss")] == [1, 2]
    assert len(warnings(caplog)) == 1


def test_mlflow_is_told_not_to_wait_for_minutes() -> None:
    assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "2"
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "5"
