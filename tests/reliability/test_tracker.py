"""A training whose tracking server's requests fail at random, and the proxy that makes them fail."""

import http.client
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from benchmarks.reliability.tracker import FAULTS, QUICK, Proxy, campaign, mlflow_server


@pytest.fixture
def upstream() -> Iterator[tuple[str, list[str]]]:
    """A server that answers "yes", and the paths that were requested."""
    paths: list[str] = []

    class Yes(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            paths.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", "3")
            self.end_headers()
            self.wfile.write(b"yes")

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Yes)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", paths
    server.shutdown()
    server.server_close()


def ask(proxy: Proxy, path: str) -> str:
    """The response to a request, in a word."""
    connection = http.client.HTTPConnection("127.0.0.1", proxy.server_port, timeout=10)
    try:
        connection.request("POST", path, b"body")
        response = connection.getresponse()
        body = response.read()
    except (http.client.HTTPException, OSError):
        return "cut"
    finally:
        connection.close()
    return "yes" if body == b"yes" else "garbage" if response.status == 200 else str(response.status)


def test_each_fault_is_what_it_says(upstream: tuple[str, list[str]]) -> None:
    uri, paths = upstream
    proxy = Proxy(uri, share=0.7, seed=1)
    answers, forwards = {}, {}
    for number in range(80):
        before = proxy.met.copy()
        answer = ask(proxy, f"/{number}")
        (fault,) = proxy.met - before
        answers.setdefault(fault, set()).add(answer)
        forwards.setdefault(fault, set()).add(paths.count(f"/{number}"))
    proxy.shutdown()
    proxy.server_close()
    assert set(FAULTS) | {"none"} == answers.keys()
    yes = {fault: {"yes"} for fault in ("none", "delay", "repeat")}
    assert answers == yes | {
        "cut before": {"cut"},
        "cut after": {"cut"},
        "500 before": {"500"},
        "500 after": {"500"},
        "429": {"429"},
        "garbage": {"garbage"},
    }
    assert forwards.pop("repeat") == {2}
    assert [forwards[fault] for fault in ("cut before", "500 before", "429")] == [{0}] * 3
    assert all(forwards[fault] == {1} for fault in ("none", "delay", "cut after", "500 after", "garbage"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with mlflow_server(tmp_path_factory.mktemp("server")) as uri:
        yield uri


@pytest.fixture(autouse=True)
def keep_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The campaign sets variables of MLflow's client."""
    for name in QUICK:
        monkeypatch.setenv(name, os.environ.get(name, ""))


@pytest.mark.xdist_group("tracker")
def test_every_request_may_arrive_twice(server: str, tmp_path: Path) -> None:
    """As when a response is lost, and MLflow's client sends the request again: nothing is stored twice."""
    found = campaign(server, tmp_path, runs=1, updates=20, share=1, seed=0, faults=["repeat"])
    assert found["delivered_by_the_end_of_their_run"] == 1 and found["requests"].keys() == {"repeat"}


@pytest.mark.xdist_group("tracker")
def test_a_training_is_the_same_and_delivered_once(server: str, tmp_path: Path) -> None:
    found = campaign(server, tmp_path, runs=1, updates=20, share=0.3, seed=0)
    assert sum(found["requests"].values()) > 50 and len(found["requests"]) == len(FAULTS) + 1
