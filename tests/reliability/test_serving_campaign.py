"""The short form of benchmarks/reliability/serving.py, and that its verdict can be bad."""

import dataclasses
import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from benchmarks.reliability import serving
from benchmarks.reliability.hostile_requests import TOKEN, Case, deep, valid
from benchmarks.reliability.serving import Answer, Server

pytestmark = pytest.mark.xdist_group("serving campaign")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", "")  # `running` sets it
        with serving.running(tmp_path_factory.mktemp("serving")) as server:
            yield server


def test_wrong_answers_are_faults(server: Server) -> None:
    case = valid(random.Random(5))
    answer = server.exchange(case.data)
    assert answer and answer.status == 200 and serving.fault(server, case, answer) is None
    other = dataclasses.replace(case, body=case.body.replace(b"[", b"[[3" + b",2" * 10 + b"],", 1))  # one row more
    assert "other actions" in str(serving.fault(server, other, answer))
    predictions = json.loads(answer.body)["predictions"]
    shifted = json.dumps({"predictions": [[1 + number for number in row] for row in predictions]}).encode()
    assert "other actions" in str(serving.fault(server, case, Answer(200, shifted)))
    assert "not JSON" in str(serving.fault(server, case, Answer(200, b'{"predictions": [[NaN, 0, 0]]}')))
    assert "a valid request got 400" in str(serving.fault(server, case, Answer(400, b"Not this one.")))
    wrong = deep(random.Random(0))
    assert serving.fault(server, wrong, Answer(400, b'{"message": "Not this one."}')) is None
    assert "status 500" in str(serving.fault(server, wrong, Answer(500, b"Internal Server Error")))
    assert "not one sentence" in str(serving.fault(server, wrong, Answer(400, b'{"message": "Two\\nlines."}')))
    assert serving.fault(server, wrong, None) == "no whole answer"
    assert serving.fault(server, Case(b"PO", whole=False), None) is None


def test_hostile_and_slow_clients_get_a_sentence_or_an_end(server: Server) -> None:
    with ThreadPoolExecutor(4) as threads:
        fuzz = threads.submit(serving.fuzz, server, 200, seed=1)
        others = [threads.submit(part, server, 3) for part in (serving.silent, serving.dribble, serving.leave)]
        silent, dribble, leave = (each.result() for each in others)
    assert fuzz.result()["faults"] == silent["faults"] == dribble["faults"] == leave["faults"] == []
    assert {"200", "400", "401", "404", "405", "413", "415"} <= fuzz.result()["statuses"].keys()
    assert dribble["statuses"] == {"head": None, "body": 408}
    assert serving.tracebacks(server) == []


def test_nobody_can_read_the_token(server: Server) -> None:
    assert len(server.processes) >= 2  # `tap serve` and the server
    for process in server.processes:
        if process.status() != psutil.STATUS_ZOMBIE:
            assert TOKEN not in " ".join(process.cmdline()) and TOKEN not in " ".join(process.environ().values())
    assert TOKEN not in server.log.read_text()


def test_a_server_that_is_stopped_finishes_what_it_has_begun(server: Server) -> None:
    """The last test: it stops the server."""
    assert serving.load(server, seconds=1, clients=2)["faults"] == []
    stopped = serving.stop_under_load(server, clients=4)
    assert stopped["faults"] == [] and stopped["exit_code"] == 0 and stopped["requests_in_progress"] > 0
