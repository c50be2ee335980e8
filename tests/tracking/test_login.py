"""A tracking server that asks who one is: what the client sends, and what it says when it is refused."""

import base64
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import requests
from conftest import ROOT
from test_run import free_port, run, stored

from tap.settings import Runtime
from tap.tracking import run as tracking
from tap.tracking.registry import open_registry

SECRET = "correct-horse-battery"


class Refusing(ThreadingHTTPServer):
    """A server that answers each request with one status, and keeps what each sent to log in."""

    def __init__(self, status: int) -> None:
        logins = self.logins = set[str]()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                logins.add(self.headers.get("Authorization", "none"))
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_POST = do_GET

            def log_message(self, *arguments: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        self.uri = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


@pytest.fixture(params=[401, 403])
def refusing(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Refusing]:
    monkeypatch.chdir(tmp_path)
    server = Refusing(request.param)
    yield server
    server.shutdown()
    server.server_close()


def test_a_refusal_is_one_sentence_that_says_what_to_set(
    refusing: Refusing, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "ada")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", SECRET)
    refused, remedy = {
        401: ("refused the login", "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"),
        403: ("does not permit this to the user that is logged in", "ask who runs the server for the permission"),
    }[request.node.callspec.params["refusing"]]
    expected = f"MLflow at {refusing.uri} {refused}: {remedy}"
    with pytest.raises(ValueError) as caught, open_registry(refusing.uri):
        pass
    assert str(caught.value) == expected
    with run(refusing.uri) as tracked:
        tracked.log_metrics(1, {"loss": 1.0})
    (warning,) = (record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)
    assert warning.startswith(f"{expected}. What is not delivered")
    with pytest.raises(ValueError) as caught:
        list(tracking.sync(Runtime(tracking_uri=refusing.uri)))
    assert remedy in str(caught.value) and "nothing is lost" in str(caught.value) and "\n" not in str(caught.value)
    assert SECRET not in caplog.text + str(caught.value)
    assert refusing.logins == {"Basic " + base64.b64encode(f"ada:{SECRET}".encode()).decode()}
    assert SECRET not in "".join(file.read_text() for file in Path(".tracking").rglob("*.jsonl"))


def test_a_token_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", SECRET)
    server = Refusing(401)
    with pytest.raises(ValueError) as caught, open_registry(server.uri):
        pass
    server.shutdown()
    server.server_close()
    assert server.logins == {f"Bearer {SECRET}"} and SECRET not in str(caught.value)


def test_the_documented_server_lets_in_whom_it_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the configuration that docs/team.md shows."""
    pytest.importorskip("flask_wtf", reason="needs the extra team")
    page = (ROOT / "docs/team.md").read_text()
    (configuration,) = (block.partition("```")[0] for block in page.split("```ini\n")[1:])
    monkeypatch.chdir(tmp_path)
    Path(".team").mkdir()
    Path(".team/auth.ini").write_text(configuration)
    uri = f"http://127.0.0.1:{free_port()}"
    store = ["--backend-store-uri", "sqlite:///.team/mlflow.db", "--artifacts-destination", ".team/artifacts"]
    command = [sys.executable, "-m", "mlflow", "server", "--app-name", "basic-auth", "--workers", "1", *store]
    environment = os.environ | {"MLFLOW_AUTH_CONFIG_PATH": ".team/auth.ini", "MLFLOW_AUTH_ADMIN_PASSWORD": SECRET}
    environment |= {"MLFLOW_FLASK_SERVER_SECRET_KEY": "any", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (
        Path("server.log").open("w") as log,
        subprocess.Popen([*command, "--port", uri.rpartition(":")[2]], env=environment, stdout=log, stderr=log) as server,
    ):
        try:
            wait_for(uri)
            monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "admin")
            monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "wrong")
            with pytest.raises(ValueError, match="refused the login: set MLFLOW_TRACKING_USERNAME"), open_registry(uri):
                pass
            monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", SECRET)
            with run(uri) as tracked:
                tracked.log_metrics(1, {"loss": 2.0})
                tracked.log_json({"a": 1}, "a.json")
            assert stored(uri, tracked.id).info.status == "FINISHED" and not list(Path(".tracking").iterdir())
            user = {"username": "ada", "password": "a-password-of-ada"}
            created = requests.post(f"{uri}/api/2.0/mlflow/users/create", json=user, auth=("admin", SECRET), timeout=30)
            assert created.status_code == 200
            monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", user["username"])
            monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", user["password"])
            assert stored(uri, tracked.id).data.metrics["loss"] == 2.0  # READ is the default
            refused = "does not permit this to the user that is logged in: ask"
            with pytest.raises(ValueError, match=refused), open_registry(uri) as registry:
                registry.alias("tap-of-others", "champion")
        finally:
            server.terminate()
    assert SECRET not in Path("server.log").read_text()


def wait_for(uri: str) -> None:
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        try:
            if requests.get(f"{uri}/health", timeout=5).status_code == 200:
                return
        except requests.ConnectionError:
            time.sleep(0.5)
    raise AssertionError(f"{uri} does not respond")
