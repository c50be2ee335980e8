"""MLflow's store in PostgreSQL, as a team may have it: runs, their metrics, a registered policy and its promotion's aliases."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tap.settings import Runtime
from tap.tracking import run as tracking

TAGS = {"dataset": "hopper-medium-replay", "seed": 0, "scale": "cpu", "dataset_digest": "abc"}


def binary(name: str) -> str:
    """A program of the server, which Debian keeps off PATH."""
    places = [os.environ["PATH"], *map(str, Path("/usr/lib/postgresql").glob("*/bin"))]
    if (found := shutil.which(name, path=os.pathsep.join(places))) is None:
        pytest.skip("PostgreSQL's server is not installed")
    return found


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    """The URI of an empty database."""
    user = "nobody" if os.getuid() == 0 else None  # it refuses to run as root
    initdb, server = binary("initdb"), binary("postgres")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    folder = Path(tempfile.mkdtemp())
    if user:
        shutil.chown(folder, user)
    subprocess.run(
        [initdb, "-D", folder / "db", "-U", "tap", "--auth=trust"], user=user, cwd=folder, check=True, capture_output=True
    )
    command = [server, "-D", folder / "db", "-p", str(port), "-k", folder, "-c", "listen_addresses=127.0.0.1"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, user=user, cwd=folder, stdout=log, stderr=log)
    deadline = time.monotonic() + 60
    while subprocess.run([binary("pg_isready"), "-h", "127.0.0.1", "-p", str(port)], capture_output=True).returncode:
        assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
        time.sleep(0.1)
    yield f"postgresql://tap@127.0.0.1:{port}/postgres"
    process.send_signal(signal.SIGINT)  # does not wait for clients, as SIGTERM would
    process.wait(30)
    shutil.rmtree(folder)


def test_runs_are_kept_in_postgres(postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with tracking.start_run(
        "train_prior", name="prior", params={"a": {"b": 1}}, tags=TAGS, runtime=Runtime(tracking_uri=postgres)
    ) as run:
        run.log_metrics(1, {"loss": 0.5})
        run.log_metrics(2, {"loss": 0.25})
    client = MlflowClient(postgres)
    experiment = client.get_experiment_by_name("tap")
    assert experiment is not None and run.id
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED" and found.data.params == {"a.b": "1"}
    assert [each.value for each in client.get_metric_history(found.info.run_id, "loss")] == [0.5, 0.25]
