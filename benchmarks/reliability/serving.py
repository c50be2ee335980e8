"""What a server of `tap serve` does with wrong, hostile and impatient clients, and whether it keeps its memory and its promises.

The policy is tiny, in Hopper's dimensions, with random weights. Every answer must be a 4xx with one sentence, or the actions of
the policy called directly. The server's log must have no traceback. Prints JSON; exits with 1 if anything was wrong.
"""

import argparse
import collections
import contextlib
import gzip
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from tqdm import tqdm

from benchmarks.measure import Result
from benchmarks.serving import log_random_policy
from benchmarks.sizes import params_of
from tap.planning.policy import Policy
from tap.serving.policy import row_generators

TOKEN = "a-token.of~the+campaign/="
WIDTH = 11  # of Hopper's observations
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
        """The answer to `data` on a connection of its own; None if the server closes it without one. Raises TimeoutError."""
        with socket.create_connection(self.address, timeout=HANG) as connection:
            try:
                connection.sendall(data)
                if half_close:
                    connection.shutdown(socket.SHUT_WR)
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


# Requests


@dataclass(frozen=True)
class Case:
    """A request as it is sent. A valid one must get its actions; one that is not `whole` may get no answer."""

    data: bytes
    body: bytes = b""
    valid: bool = False
    whole: bool = True


def post(body: bytes, *headers: str, head: str = "POST /invocations HTTP/1.1") -> bytes:
    """A request with a token; `headers` without a content type get the right one."""
    lines = [head, "Host: a", f"Content-Length: {len(body)}", *headers]
    if not any(header.lower().startswith("content-type") for header in headers):
        lines.append("Content-Type: application/json")
    if not any(header.lower().startswith("authorization") for header in headers):
        lines.append(f"Authorization: Bearer {TOKEN}")
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def random_tree(rng: random.Random) -> dict[str, Any]:
    """A valid request of one to five rows."""
    scale = rng.choice([0.1, 1, 1, 1, 100, 1e4])
    row: Callable[[], list[float]] = lambda: [rng.choice([0, rng.gauss(0, scale), rng.randint(-9, 9)]) for _ in range(WIDTH)]
    tree: dict[str, Any] = {"inputs": [row() for _ in range(rng.randint(1, 5))]}
    if rng.random() < 0.7:
        tree["params"] = {"seed": rng.choice([rng.randint(-9, 9), rng.getrandbits(63)])}
        if rng.random() < 0.5:
            tree["params"]["details"] = rng.random() < 0.5
    return tree


def valid(rng: random.Random) -> Case:
    """A right request in one of the ways to write it."""
    tree = random_tree(rng)
    text = json.dumps(tree, indent=rng.choice([None, None, 1, 3]), sort_keys=rng.random() < 0.5)
    if rng.random() < 0.2:
        text = text.replace("inputs", "\\u0069nputs")
    body = rng.choice(["", " ", "\n\t"]).encode() + text.encode()
    kinds = ["application/json", "Application/JSON", "application/json;charset=utf-8", 'application/json; charset="UTF-8"']
    headers = [f"Content-Type: {rng.choice(kinds)}"]
    if rng.random() < 0.2:
        headers.append("Connection: close")
    data = post(body, *headers)
    if rng.random() < 0.2:
        head = data.partition(b"\r\n\r\n")[0].replace(b"Content-Length: %d" % len(body), b"Transfer-Encoding: chunked")
        size = rng.randint(1, len(body))
        chunks = [body[start : start + size] for start in range(0, len(body), size)]
        data = head + b"\r\n\r\n" + b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    return Case(data, body, valid=True)


JUNK = [
    *(None, True, False, "", "1", "NaN", "a\nTraceback (most recent call last):\n", "x" * 5000, "\u202e\0", "ü"),
    *(-0.0, 1e38, 3.4e38, -3.5e38, 1e308, 10**30, -(10**400), 10**5000, 2**63, -(2**63) - 1, 0.5),
    *(float("nan"), float("inf"), -float("inf"), [], {}, [[]], [[[0.0] * WIDTH]], {"inputs": [[0.0] * WIDTH]}),
]


def damaged_tree(rng: random.Random) -> Case:
    """A right request in which something is replaced, added, doubled or removed."""
    tree = random_tree(rng)
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in node if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], dict | list):
                walk(node[key])

    walk(tree)
    inside, key = rng.choice(places[:4] if rng.random() < 0.5 else places)
    match rng.choice(["replace", "replace", "add", "double", "remove"]):
        case "replace":
            inside[key] = rng.choice(JUNK)
        case "remove":
            del inside[key]
        case "double" if isinstance(inside, list):
            inside += [inside[key]] * rng.choice([1, 300])
        case _ if isinstance(inside, dict):
            inside[rng.choice(["inputs", "params", "sed", "", "a\nb", "a\r\n\r\nb", "x" * 5000, "\u202e\0"])] = rng.choice(JUNK)
        case _:
            inside.insert(key, rng.choice(JUNK))
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        body = json.dumps(tree, ensure_ascii=rng.random() < 0.5).encode()
    finally:
        sys.set_int_max_str_digits(before)
    return Case(post(body), body)


def damaged_bytes(rng: random.Random) -> Case:
    """A right request with some bytes of its body replaced, removed or inserted."""
    body = bytearray(json.dumps(random_tree(rng)).encode())
    for _ in range(rng.choice([1, 1, 2, 10])):
        start = rng.randrange(len(body) + 1)
        replacement = rng.choice(
            [b"", rng.randbytes(1), rng.choice([b"[", b"}", b",", b'"', b"e9", b"-", b"\\ud800", b"\xff"])]
        )
        body[start : start + rng.choice([0, 1, 1, 20])] = replacement
    return Case(post(bytes(body)), bytes(body))


def noise(rng: random.Random) -> Case:
    body = rng.randbytes(rng.randrange(2000))
    return Case(post(body), body)


def wrong_encoding(rng: random.Random) -> Case:
    """A right request in an encoding other than UTF-8, said or not."""
    text = json.dumps(random_tree(rng))
    encoding = rng.choice(["utf-16", "utf-16-le", "utf-32", "utf-8-sig", "utf-7", "gzip"])
    body = gzip.compress(text.encode()) if encoding == "gzip" else text.replace("0", "ü").encode(encoding)
    headers = (
        [] if rng.random() < 0.5 else [f"Content-Type: application/json; charset={encoding}", f"Content-Encoding: {encoding}"]
    )
    return Case(post(body, *headers), body)


def deep(rng: random.Random) -> Case:
    depth = rng.choice([2, 100, 127, 128, 200, 1000, 10_000, 50_000])
    opening, closing = rng.choice([("[", "]"), ('{"inputs":', "}"), ('{"params":', "}")])
    body = (opening * depth + rng.choice(["", "1"]) + closing * rng.choice([0, depth])).encode()
    if rng.random() < 0.5:
        body = b'{"inputs": ' + body + b"}"
    return Case(post(body), body)


def oversized(rng: random.Random) -> Case:
    """A body, or a head, larger than the limit; the body with a length or in chunks."""
    size = rng.choice([200_000, 500_000, 2_000_000])
    body = rng.choice([b" " * size, b"[" * size, b'{"inputs": [' + b"[0,0,0,0,0,0,0,0,0,0,0]," * (size // 24)])
    if rng.random() < 0.2:
        return Case(post(b"", "X: " + "x" * size), whole=False)  # refused before it is read, so the answer may be lost
    if rng.random() < 0.3:
        head = post(b"", "Transfer-Encoding: chunked").replace(b"Content-Length: 0\r\n", b"")
        return Case(head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
    return Case(post(body), body)


def wrong_type(rng: random.Random) -> Case:
    """A right body with a wrong, odd or missing content type."""
    body = json.dumps(random_tree(rng)).encode()
    kinds = ["text/csv", "application/parquet", "text/plain", "application/jsonx", "", ";", "*/*", "application/json, text/csv"]
    name = rng.choice(["x" * 10_000, "\xff\xfe", *kinds, *kinds])
    data = post(body, f"Content-Type: {name}")
    if rng.random() < 0.2:  # what follows the answer is not HTTP
        data = data.replace(b"Content-Length: %d" % len(body), b"Transfer-Encoding: chunked")
    return Case(data)


def wrong_token(rng: random.Random) -> Case:
    """A right request, to any path, with a wrong token or none."""
    tokens = [
        "",
        "Bearer",
        "Bearer ",
        f"Bearer {TOKEN[:-1]}",
        f"Bearer {TOKEN}x",
        f"Basic {TOKEN}",
        TOKEN,
        f"Bearer \xff{TOKEN}",
    ]
    tokens += [f"Bearer {TOKEN} {TOKEN}", f"Bearer, Bearer {TOKEN}", "Bearer " + "x" * 10_000, f"Bearer {TOKEN.upper()}"]
    body = json.dumps(random_tree(rng)).encode()
    path = rng.choice(
        ["/invocations", "/invocations", "/version", "/health", "/docs", "/openapi.json", "/ping/", "//ping", "/nowhere"]
    )
    method = "POST" if path == "/invocations" else "GET"
    return Case(post(body, f"Authorization: {rng.choice(tokens)}", head=f"{method} {path} HTTP/1.1"))


def wrong_place(rng: random.Random) -> Case:
    """Another path or method."""
    places = [
        "GET /invocations",
        "PUT /invocations",
        "DELETE /ping",
        "POST /version",
        "GET /",
        "GET /..%2f..%2fetc/passwd",
        "GET /%00",
    ]
    places += [
        "GET /%ff%fe",
        "GET /invocations%0a",
        "TRACE /",
        "OPTIONS *",
        "CONNECT a:1",
        "GET http://a/invocations",
        "X /invocations",
    ]
    return Case(post(b"", head=f"{rng.choice(places)} HTTP/1.{rng.choice([0, 1])}"))


def wrong_http(rng: random.Random) -> Case:
    """Not HTTP/1.1, or a request whose head contradicts its body or itself."""
    body = json.dumps(random_tree(rng)).encode()
    right = post(body)
    length = b"Content-Length: %d" % len(body)
    replacements = [
        b"Content-Length: -1",
        b"Content-Length: x",
        b"Content-Length: 1e3",
        length + b"\r\nContent-Length: 1",
        b" " + length,
    ]
    replacements += [
        b"Transfer-Encoding: gzip",
        b"Transfer-Encoding: chunked",
        b"Transfer-Encoding: chunked, chunked",
        b"X\0Y: 1",
        b":",
    ]
    match rng.choice(["replaced", "replaced", "noise", "version", "upgrade", "doubled host"]):
        case "replaced":
            return Case(right.replace(length, rng.choice(replacements)), whole=False)
        case "noise":
            return Case(rng.randbytes(rng.randrange(1, 200)) + b"\r\n\r\n")
        case "version":
            version = rng.choice([b"HTTP/9.9", b"HTTP/2.0", b"HTTP/0.9", b"http/1.1", b"HTTP/1.1 x", b""])
            return Case(right.replace(b"HTTP/1.1", version, 1), body)
        case "upgrade":
            wanted = rng.choice(["websocket", "h2c", "x"])
            key = "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA=="
            headers = ["Connection: Upgrade", f"Upgrade: {wanted}", key, "Sec-WebSocket-Version: 13"]
            head = rng.choice(["GET /invocations HTTP/1.1", "POST /invocations HTTP/1.1"])
            return Case(post(body, *headers, head=head), body)
    return Case(right.replace(b"Host: a", b"Host: a\r\nHost: b"))


def cut(rng: random.Random) -> Case:
    """A right request that ends too early."""
    data = valid(rng).data
    return Case(data[: rng.randrange(1, len(data))], whole=False)


KINDS = (
    *(valid, damaged_tree, damaged_tree, damaged_bytes, damaged_bytes, noise, wrong_encoding, deep, oversized),
    *(wrong_type, wrong_token, wrong_place, wrong_http, cut),
)


# What is right


def fault(server: Server, case: Case, answer: Answer | None) -> str | None:
    """What is wrong with an answer; None if nothing is."""
    if answer is None:
        return None if not case.whole else "no answer"
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


# The campaign's parts


def fuzz(server: Server, count: int, seed: int = 0) -> Result:
    """Send `count` requests of all kinds, and valid ones afterwards."""
    rngs = [random.Random(f"{seed} {number}") for number in range(count)]
    kinds = [rng.choice(KINDS) for rng in rngs]
    started, faults, statuses = time.monotonic(), [], collections.Counter[str]()

    def send(rng: random.Random, kind: Callable[[random.Random], Case]) -> tuple[Case, Answer | None, float]:
        case, start, answer = kind(rng), time.monotonic(), None
        with contextlib.suppress(TimeoutError):
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
    """`count` clients send the head of a request by a byte a second, and as many its body; the server must not wait for long."""
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
    rows = [[float(row)] * WIDTH for row in range(64)]
    data = [post(json.dumps({"inputs": rows, "params": {"seed": seed}}).encode()) for seed in range(clients)]
    stopped, faults, begun = threading.Event(), [], 0

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
        time.sleep(1)
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
    gone, alive = psutil.wait_procs(server.processes, timeout=5)
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
