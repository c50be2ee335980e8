"""What a server of `tap serve` does with wrong, hostile and slow clients, under load, and when it is stopped.

The policy is tiny, in Hopper's dimensions, with random weights. Every answer must be a 4xx with one sentence, or the actions of
the policy called directly. The server's log must have no traceback. Prints JSON; exits with 1 if anything was wrong.
"""

import argparse
import collections
import contextlib
import http.client
import json
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from tqdm import tqdm

from benchmarks.measure import Result
from benchmarks.reliability.hostile_requests import KINDS, TOKEN, WIDTH, Case, post, valid
from benchmarks.serving import log_random_policy
from benchmarks.sizes import params_of
from tap.planning.policy import Policy
from tap.serving.policy import row_generators

TRANSFORMER = {"layers": 1, "width": 16, "heads": 2, "dropout": 0.1}
TINY = {
    "train_vqvae": {"windows": {"length": 6}, "codebook": {"size": 8, "dim": 4}, "transformer": TRANSFORMER},
    "train_prior": {"transformer": TRANSFORMER},
    "evaluate": {"planner": {"search": "beam", "horizon": 6, "beam_width": 4, "expansion_factor": 2}},
}
HANG = 60  # seconds without an answer that count as never
THREADS = 8


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes


@dataclass
class Server:
    """A `tap serve` process, where it listens, and the policy that it serves."""

    process: psutil.Popen
    address: tuple[str, int]
    policy: Policy
    log: Path
    processes: list[psutil.Process] = field(default_factory=list)  # all of `tap serve`

    def exchange(self, data: bytes, half_close: bool = False) -> Answer | None:
        """The answer to `data` on a connection of its own; None if the server closes it without one.

        Raises TimeoutError, and http.client.IncompleteRead for a part of an answer.
        """
        with socket.create_connection(self.address, timeout=HANG) as connection:
            with contextlib.suppress(OSError):  # the server may answer before it has read all
                connection.sendall(data)
                if half_close:
                    connection.shutdown(socket.SHUT_WR)
            try:
                return read_answer(connection)
            except (ConnectionError, http.client.BadStatusLine):
                return None

    def actions(self, inputs: Any, seed: int) -> np.ndarray:
        """The actions (N, A) of the policy called directly."""
        observations = np.asarray(inputs, dtype=np.float64)
        return self.policy.act(observations, row_generators(seed, len(observations)))


def read_answer(connection: socket.socket) -> Answer:
    response = http.client.HTTPResponse(connection)
    response.begin()
    return Answer(response.status, response.read())


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Server]:
    """A server that answers; its log and store are in `folder`."""
    environment = os.environ | {"MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db"}
    os.environ["MLFLOW_TRACKING_URI"] = environment["MLFLOW_TRACKING_URI"]
    from tap.tracking.registry import open_registry

    log_random_policy(folder, params_of("hopper", "cpu", **TINY))
    with open_registry(environment["MLFLOW_TRACKING_URI"]) as registry:
        version = registry.version("tap-random", "1")
        assert version
        registry.set_alias(version, "champion")
    (folder / "token").touch(0o600)
    (folder / "token").write_text(f"{TOKEN}\n")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "pipelines.cli", "serve", "random", "--port", str(port)]
    command += ["--token-file", str(folder / "token")]
    log = folder / "log"
    command = ["sh", "-c", 'ulimit -S -n 1024; exec "$@"', "sh", *command]  # the usual limit of open files
    with log.open("wb") as output:
        process = psutil.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    server = Server(process, ("127.0.0.1", port), Policy.load(folder / "policy"), log)
    try:
        deadline = time.monotonic() + 180
        while True:
            with contextlib.suppress(ConnectionError):
                if server.exchange(b"GET /ping HTTP/1.1\r\nHost: a\r\n\r\n"):
                    break
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server does not answer:\n{log.read_text()}")
            time.sleep(0.1)
        server.processes = [process, *process.children(recursive=True)]
        yield server
    finally:
        if process.is_running():
            process.terminate()
            process.wait()


def fault(server: Server, case: Case, answer: Answer | None) -> str | None:
    """What is wrong with an answer; None if nothing is."""
    if answer is None:
        return "no whole answer" if case.whole else None
    if answer.status == 200:
        return wrong_actions(server, case.body, answer)
    if case.valid:
        return f"a valid request got {answer.status}: {answer.body[:200]!r}"
    if not 400 <= answer.status < 500:
        return f"status {answer.status}: {answer.body[:200]!r}"
    return None if is_one_sentence(answer.body) else f"not one sentence: {answer.body[:300]!r}"


def wrong_actions(server: Server, body: bytes, answer: Answer) -> str | None:
    """Compare an answer with the policy called directly on what the body says, read by another JSON parser."""
    try:
        request, found = json.loads(body), strict_json(answer.body)["predictions"]
    except ValueError as error:
        return f"not JSON: {error}"
    params = {"seed": 0, "details": False} | request.get("params", {})
    if params["details"]:
        found = [prediction["action"] for prediction in found]
    expected = server.actions(request["inputs"], params["seed"])
    if np.shape(found) == expected.shape and np.allclose(found, expected, rtol=1e-4, atol=1e-5):
        return None
    return f"other actions than the policy's: {found} instead of {expected.tolist()}"


def strict_json(text: bytes) -> Any:
    """As json.loads, but raises ValueError for NaN and Infinity, which are not JSON."""

    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def is_one_sentence(body: bytes) -> bool:
    """Whether an error is one line for people: MLflow's and FastAPI's are JSON, uvicorn's are text."""
    with contextlib.suppress(ValueError):
        content = json.loads(body)
        body = (content.get("message") or content["detail"]).encode()
    return re.fullmatch(r"[^\x00-\x1f\x7f]{5,500}", body.decode()) is not None and b"Traceback" not in body


def fuzz(server: Server, count: int, seed: int = 0) -> Result:
    """Send `count` requests of all kinds, and valid ones afterwards."""
    rngs = [random.Random(f"{seed} {number}") for number in range(count)]
    kinds = [rng.choice(KINDS) for rng in rngs]
    started, faults, statuses = time.monotonic(), [], collections.Counter[str]()

    def send(rng: random.Random, kind: Callable[[random.Random], Case]) -> tuple[Case, Answer | None, float]:
        case, start, answer = kind(rng), time.monotonic(), None
        with contextlib.suppress(TimeoutError, http.client.IncompleteRead):
            answer = server.exchange(case.data, half_close=not case.whole)
        return case, answer, time.monotonic() - start

    slowest = 0.0
    with ThreadPoolExecutor(THREADS) as threads:
        for kind, (case, answer, seconds) in zip(kinds, tqdm(threads.map(send, rngs, kinds), total=count), strict=True):
            slowest = max(slowest, seconds)
            statuses[str(answer.status if answer else "none")] += 1
            if found := "never answered" if seconds >= HANG else fault(server, case, answer):
                faults.append(f"{kind.__name__}: {found[:400]} ({case.data[:200]!r})")
    afterwards = [valid(random.Random(f"after {number}")) for number in range(10)]
    faults += [found for case in afterwards if (found := fault(server, case, server.exchange(case.data)))]
    return {
        "requests": count,
        "seconds": time.monotonic() - started,
        "statuses": dict(sorted(statuses.items())),
        "slowest_seconds": slowest,
        "faults": faults,
    }


def silent(server: Server, count: int) -> Result:
    """Open connections that send nothing; meanwhile the server must answer, and then close them all."""
    start, latencies, faults = time.monotonic(), [], []
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(socket.create_connection(server.address, timeout=HANG)) for _ in range(count)]
        opened = time.monotonic() - start
        for number in range(5):
            case, asked = valid(random.Random(f"silent {number}")), time.monotonic()
            if found := fault(server, case, server.exchange(case.data)):
                faults.append(found)
            latencies.append(time.monotonic() - asked)
        try:
            for connection in connections:
                with contextlib.suppress(ConnectionError):
                    assert connection.recv(1) == b""
        except TimeoutError:
            faults.append(f"connections that sent nothing are still open after {HANG} seconds")
    return {
        "connections": count,
        "open_after_seconds": opened,
        "slowest_answer_seconds": max(latencies),
        "all_closed_after_seconds": time.monotonic() - start,
        "faults": faults,
    }


def dribble(server: Server, count: int) -> Result:
    """`count` clients send the head of a request at a byte a second, and as many its body; the server must end both soon."""
    data = valid(random.Random(0)).data
    head = data.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
    faults: list[str] = []

    def client(at_once: bytes) -> tuple[float, int | None]:
        start, rest = time.monotonic(), data[len(at_once) :]
        with socket.create_connection(server.address, timeout=1) as connection:
            connection.sendall(at_once)
            for position in range(len(rest)):
                if time.monotonic() > start + HANG:
                    faults.append(f"a connection that sends a byte a second is still open after {HANG} seconds")
                    break
                try:
                    connection.sendall(rest[position : position + 1])
                    return time.monotonic() - start, read_answer(connection).status
                except TimeoutError:
                    continue
                except (ConnectionError, http.client.BadStatusLine):
                    return time.monotonic() - start, None
        return time.monotonic() - start, None

    with ThreadPoolExecutor(2 * count) as threads:
        ends = list(threads.map(client, [b"POST"] * count + [head] * count))
        case = valid(random.Random("dribble"))
        if found := fault(server, case, server.exchange(case.data)):
            faults.append(found)
    statuses = {"head": ends[0][1], "body": ends[-1][1]}
    return {"clients": 2 * count, "statuses": statuses, "longest_seconds": max(end[0] for end in ends), "faults": faults}


def leave(server: Server, count: int) -> Result:
    """Clients that leave before, or within, their answer, and some that never read it; the server must forget them all."""
    tree = {"inputs": [[0.0] * WIDTH] * 256, "params": {"details": True}}
    data, unread = post(json.dumps(tree).encode()), []
    for number in tqdm(range(count)):
        connection = socket.socket()
        if number % 3 == 2:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)  # an answer does not fit into it
            connection.connect(server.address)
            connection.sendall(data)
            unread.append(connection)
            continue
        connection.settimeout(HANG)
        connection.connect(server.address)
        connection.sendall(data)
        if number % 3 == 1:
            connection.recv(1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # reset, not a polite end
        connection.close()
    case = valid(random.Random("leave"))
    found = fault(server, case, server.exchange(case.data))
    start = time.monotonic()
    while (held := open_connections(server)) and time.monotonic() < start + HANG:
        time.sleep(0.2)
    seconds = time.monotonic() - start
    for connection in unread:
        connection.close()
    faults = [found] if found else []
    faults += [f"{held} connections of clients that left are still open after {HANG} seconds"] if held else []
    return {"clients": count, "forgotten_after_seconds": seconds, "faults": faults}


def open_connections(server: Server) -> int:
    """Connections that the server's processes have open."""
    found = [connection for process in server.processes for connection in process.net_connections("tcp")]
    return sum(connection.status in (psutil.CONN_ESTABLISHED, psutil.CONN_CLOSE_WAIT) for connection in found)


def load(server: Server, seconds: float, clients: int = 8) -> Result:
    """Clients that ask again at once, for so long; the memory of the server's processes meanwhile, and its slope.

    The slope is that of a line through the second half, as MiB an hour.
    """
    cases = [valid(random.Random(f"load {number}")) for number in range(64)]
    end, faults, samples = time.monotonic() + seconds, [], []
    counts = [0] * clients

    def client(number: int) -> None:
        rng = random.Random(number)
        while time.monotonic() < end:
            case = rng.choice(cases)
            if found := fault(server, case, server.exchange(case.data)):
                faults.append(found)
            counts[number] += 1

    with ThreadPoolExecutor(clients) as threads:
        running = [threads.submit(client, number) for number in range(clients)]
        start, every = time.monotonic(), min(5.0, seconds / 20)
        for _ in tqdm(range(int(seconds / every))):
            time.sleep(every)
            samples.append((time.monotonic() - start, memory(server)))
        for each in running:
            each.result()
    times, sizes = np.array(samples).T
    half = len(samples) // 2
    slope = float(np.polyfit(times[half:], sizes[half:], 1)[0]) * 3600
    return {
        "seconds": seconds,
        "clients": clients,
        "answers": sum(counts),
        "memory_mib": [round(float(size), 1) for size in sizes[:: max(1, len(sizes) // 30)]],
        "slope_mib_per_hour": slope,
        "faults": faults[:10],
    }


def memory(server: Server) -> float:
    """Resident memory of the server's processes, in MiB."""
    return sum(process.memory_info().rss for process in server.processes) / 2**20


def stop_under_load(server: Server, clients: int) -> Result:
    """SIGTERM while `clients` requests are being answered: each must get its whole answer, and no process may remain.

    Other clients ask on meanwhile: each gets a whole answer or none.
    """
    rows = [[float(row)] * WIDTH for row in range(128)]
    data = [post(json.dumps({"inputs": rows, "params": {"seed": seed}}).encode()) for seed in range(clients)]
    stopped, faults = threading.Event(), []

    def long(number: int) -> Answer | None:
        return server.exchange(data[number])

    def short() -> int:
        answered = 0
        while True:
            case = valid(random.Random(f"stop {answered}"))
            try:
                answer = server.exchange(case.data)
            except http.client.IncompleteRead as error:
                faults.append(f"a cut answer: {error}")
                continue
            except ConnectionError:
                return answered  # the server is gone
            if answer and (found := fault(server, case, answer)):
                faults.append(found)
            answered += answer is not None
            if stopped.is_set() and answer is None:
                return answered

    with ThreadPoolExecutor(clients + 2) as threads:
        asking = [threads.submit(short) for _ in range(2)]
        time.sleep(0.5)
        answers = [threads.submit(long, number) for number in range(clients)]
        wait(answers, return_when=FIRST_COMPLETED)  # by then the server has read them all
        begun = sum(not answer.done() for answer in answers)
        start = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        stopped.set()
        for seed, future in enumerate(answers):
            answer = future.result()
            if answer is None or answer.status != 200:
                faults.append(f"a request that was begun got {answer}")
            elif not np.allclose(strict_json(answer.body)["predictions"], server.actions(rows, seed), rtol=1e-4, atol=1e-5):
                faults.append("a request that was begun got other actions than the policy's")
        code = server.process.wait(HANG)
        seconds = time.monotonic() - start
        short_answers = sum(each.result() for each in asking)
    if code != 0:
        faults.append(f"exit code {code}")
    _, alive = psutil.wait_procs(server.processes, timeout=5)
    faults += [f"process {process.pid} remains" for process in alive]
    return {
        "requests_in_progress": begun,
        "short_answers": short_answers,
        "stopped_after_seconds": seconds,
        "exit_code": code,
        "faults": faults,
    }


def tracebacks(server: Server) -> list[str]:
    """The server's log from each traceback on."""
    return [part[:2000] for part in server.log.read_text(errors="replace").split("Traceback (most recent call last)")[1:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000, help="fuzzed requests (default: %(default)s)")
    parser.add_argument("--connections", type=int, default=1_000, help="connections that send nothing (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=60, help="clients that leave, and bytes' senders (default: %(default)s)")
    parser.add_argument("--load", type=float, default=1800, help="seconds at full load (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the fuzzed requests (default: %(default)s)")
    options = parser.parse_args()
    result: Result = {}
    with tempfile.TemporaryDirectory() as folder, running(Path(folder)) as server:
        parts: dict[str, Callable[[], Result]] = {
            "fuzz": lambda: fuzz(server, options.requests, options.seed),
            "silent": lambda: silent(server, options.connections),
            "dribble": lambda: dribble(server, options.clients),
            "leave": lambda: leave(server, options.clients),
            "load": lambda: load(server, options.load),
            "stop_under_load": lambda: stop_under_load(server, 16),
        }
        for name, part in parts.items():
            result[name] = part()
            print(name, json.dumps(result[name]), file=sys.stderr)  # the load takes long
        result["tracebacks"] = tracebacks(server)
    print(json.dumps(result, indent=2))
    sys.exit(any(part["faults"] for name, part in result.items() if name != "tracebacks") or bool(result["tracebacks"]))


if __name__ == "__main__":
    main()
