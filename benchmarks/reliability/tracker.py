"""Training while a proxy before a real MLflow server delays, cuts, repeats, refuses and garbles requests at random.

Trainings without tracking and with it take turns. All must have the same losses and weights to the bit, and a tracked one
should take as long. In the end MLflow must have each tracked run once, complete and ended: params, tags, every point of every
metric, artifacts, model and version. "wall_ratio" and "processor_ratio" are the medians over pairs of the training
times, tracked to untracked, by the clock and of the training's own thread, which other work on the machine changes less;
"ends_seconds" is the median of what the tracked runs' ends took, with their last attempt to deliver.
"""

import argparse
import hashlib
import http.client
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from mlflow import MlflowClient
from torch import Tensor
from tqdm import tqdm

from benchmarks.measure import Result, machine, ratio
from benchmarks.sizes import LAYOUTS, params_of, random_observations, random_policy, random_windows
from tap.data.sampling import WindowSampler
from tap.model.vqvae import VQVAE
from tap.planning.policy import Policy
from tap.settings import Params, Runtime
from tap.tracking import run as tracking
from tap.tracking.registry import log_policy
from tap.training import fit

LAYOUT, CPU = LAYOUTS["hopper"], torch.device("cpu")
FAULTS = ("delay", "cut before", "cut after", "repeat", "500 before", "500 after", "429", "garbage")
MAX_DELAY = 0.5  # seconds
ATTEMPTS = 20  # of `tap sync` while requests still fail
# MLflow's client samples and sends often, and retries at once.
QUICK = {"MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL": "0.5"}
QUICK |= {"MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "0", "MLFLOW_HTTP_REQUEST_BACKOFF_JITTER": "0"}
TAGS = {"dataset": "hopper", "seed": 0, "scale": "cpu", "dataset_digest": "abc"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10, help="pairs of trainings [10]")
    parser.add_argument("--updates", type=int, default=300, help="of each training [300]")
    parser.add_argument("--share", type=float, default=0.3, help="of the requests that fail in some way [0.3]")
    parser.add_argument("--seed", type=int, default=0, help="of the faults [0]")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, mlflow_server(Path(folder)) as server:
        found = campaign(server, Path(folder), options.runs, options.updates, options.share, options.seed)
    print(json.dumps(machine() | found, indent=2))


class Seconds(NamedTuple):
    """What a training took: by the clock, and of the processor in its own thread, which other work does not change much."""

    wall: float
    processor: float


class Proxy(ThreadingHTTPServer):
    """Passes requests on to an HTTP server; a share of them meets a fault, drawn from a seeded generator."""

    daemon_threads = True

    def __init__(self, upstream: str, share: float, seed: int, faults: Sequence[str] = FAULTS) -> None:
        super().__init__(("127.0.0.1", 0), Passing)
        self.upstream, self.uri = upstream.removeprefix("http://"), f"http://127.0.0.1:{self.server_port}"
        self.share, self.faults = share, faults
        self.met: Counter[str] = Counter()
        self._random, self._drawing = random.Random(seed), threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def draw(self) -> tuple[str, float]:
        """The fault of the next request, "none" for most, and a delay in seconds."""
        with self._drawing:
            fault = self._random.choice(self.faults) if self._random.random() < self.share else "none"
            self.met[fault] += 1
            return fault, self._random.uniform(0, MAX_DELAY)


class Passing(BaseHTTPRequestHandler):
    """One request through a Proxy."""

    server: Proxy

    def handle_one_request(self) -> None:
        self.raw_requestline = self.rfile.readline(65537)
        self.close_connection = True
        if not self.raw_requestline or not self.parse_request():
            return
        body = self._body()
        fault, delay = self.server.draw()
        if fault == "delay":
            time.sleep(delay)
        if fault in ("500 before", "429"):
            return self._answer(int(fault[:3]), b"later")
        if fault == "cut before":
            return self._cut()
        if fault == "repeat":
            self._pass_on(body)
        status, answer = self._pass_on(body)
        if fault == "cut after":
            return self._cut()
        if fault == "500 after":
            return self._answer(500, b"lost")
        self._answer(status, b"<html>\xff" if fault == "garbage" and self.command != "GET" else answer)

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _pass_on(self, body: bytes) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self.server.upstream, timeout=60)
        hop = ("host", "connection", "accept-encoding", "content-length", "transfer-encoding")
        headers = {name: value for name, value in self.headers.items() if name.lower() not in hop}
        connection.request(self.command, self.path, body, headers)
        response = connection.getresponse()
        answer = response.status, response.read()
        connection.close()
        return answer

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _cut(self) -> None:
        self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@contextmanager
def mlflow_server(folder: Path) -> Iterator[str]:
    """The address of an MLflow server whose store is in `folder`."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{listener.getsockname()[1]}"
    store = ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", str(folder / "artifacts")]
    command = [sys.executable, "-m", "mlflow", "server", "--workers", "1", "--port", uri.rpartition(":")[2], *store]
    environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (folder / "server.log").open("w") as log, subprocess.Popen(command, env=environment, stdout=log, stderr=log) as server:
        try:
            deadline = time.monotonic() + 600
            while not _responds(uri):
                if server.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError((folder / "server.log").read_text())
                time.sleep(0.2)
            yield uri
        finally:
            server.terminate()


def _responds(uri: str) -> bool:
    try:
        connection = http.client.HTTPConnection(uri.removeprefix("http://"), timeout=5)
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False


def campaign(
    server: str, folder: Path, runs: int, updates: int, share: float, seed: int, faults: Sequence[str] = FAULTS
) -> Result:
    """Train `runs` times without tracking and with it, in turns.

    Raises AssertionError if losses or weights differ, or a run is not stored, or something of it twice.
    """
    os.environ |= QUICK
    lengths = {"updates": updates, "warmup_updates": 0, "log_every": 5, "checkpoint_every": updates}
    params = params_of("hopper", "cpu", train_vqvae={"fit": lengths})
    policy, proxy = random_policy(params, LAYOUT, CPU), Proxy(server, share, seed, faults)
    policy.save(folder / "policy")
    runtime = Runtime(tracking_uri=proxy.uri, outbox=folder / "outbox")
    alone: list[Seconds] = []
    tracked: list[Seconds] = []
    ends: list[float] = []
    logged: dict[str, list[tuple[int, dict[str, float]]]] = {}
    results = set()

    def train_alone(number: int) -> None:
        history, digest, seconds = train(params, folder / f"{number}-alone", None)
        results.add((json.dumps(history), digest))
        alone.append(seconds)

    def train_tracked(number: int) -> None:
        with tracking.start_run("train_vqvae", name="tracked", params=params.model_dump(), tags=TAGS, runtime=runtime) as run:
            history, digest, seconds = train(params, folder / f"{number}-tracked", run)
            _finish(run, policy, folder / "policy")
            ended = time.perf_counter()
        ends.append(time.perf_counter() - ended)
        tracked.append(seconds)
        results.add((json.dumps(history), digest))
        logged[run.id] = history

    for number in tqdm(range(runs)):
        for one in (train_alone, train_tracked)[:: -1 if number % 2 else 1]:
            one(number)
    assert len(results) == 1, "tracking changed losses or weights"
    waiting = len(list(runtime.outbox.iterdir()))
    attempts = _sync(runtime)
    proxy.shutdown()
    for key, history in logged.items():
        assert_stored_once(MlflowClient(server), key, history, params)
    return {
        "runs": runs,
        "updates": updates,
        "requests": dict(proxy.met),
        "wall_ratio": ratio([each.wall for each in tracked], [each.wall for each in alone]),
        "processor_ratio": ratio([each.processor for each in tracked], [each.processor for each in alone]),
        "processor_seconds_alone": median(each.processor for each in alone),
        "ends_seconds": median(ends),
        "delivered_by_the_end_of_their_run": runs - waiting,
        "attempts_to_sync_the_rest": attempts,
    }


def train(params: Params, folder: Path, run: tracking.Run | None) -> tuple[list[Any], str, Seconds]:
    """Losses by update, without speeds, the digest of all weights, and seconds."""
    torch.manual_seed(0)
    model, windows = VQVAE(params.train_vqvae, LAYOUT), random_windows(params, LAYOUT, CPU)
    history: list[tuple[int, dict[str, float]]] = []

    def loss(starts: Tensor, is_held_out: bool) -> dict[str, Tensor]:
        return model.loss(*windows.gather(starts))

    def log(update: int, values: Mapping[str, float]) -> None:
        history.append((update, {key: value for key, value in values.items() if key != "updates_per_second"}))
        if run:
            run.log_metrics(*history[-1])

    wall, processor = time.perf_counter(), time.thread_time()
    fit(
        model,
        loss,
        params.train_vqvae.fit,
        sample=WindowSampler(np.array([len(windows)])),
        num_held_out=100,
        seed=0,
        device=CPU,
        checkpoint=folder / "checkpoint.pt",
        log=log,
        description=folder.name,
    )
    seconds = Seconds(time.perf_counter() - wall, time.thread_time() - processor)
    digest = hashlib.sha256()
    for weights in model.state_dict().values():
        digest.update(weights.numpy().tobytes())
    return history, digest.hexdigest(), seconds


def _finish(run: tracking.Run, policy: Policy, folder: Path) -> None:
    """Log what `evaluate` does beside numbers."""
    run.set_tags({"note": "late"})
    run.log_json({"key": run.id}, "metrics.json")
    log_policy(run, folder, random_observations(2, LAYOUT), policy.action_dim)
    run.register("tap-campaign", {"score": 1.5}, "# A policy")


def _sync(runtime: Runtime) -> int:
    """Deliver what the runs have left in the outbox, as `tap sync` does; returns the attempts that it took."""
    attempts = 0
    while list(runtime.outbox.iterdir()):
        attempts += 1
        assert attempts <= ATTEMPTS, "not delivered"
        try:
            list(tracking.sync(runtime))
        except ValueError:  # not even the experiment could be looked up
            continue
    return attempts


def assert_stored_once(client: MlflowClient, key: str, history: list[tuple[int, dict[str, float]]], params: Params) -> None:
    """Raises AssertionError unless the store has everything that was logged under `key`, and nothing twice."""
    (experiment,) = client.search_experiments(filter_string="name = 'tap'")
    (run,) = client.search_runs([experiment.experiment_id], f"tags.run_key = '{key}'")
    assert run.info.status == "FINISHED", run.info.status
    assert run.data.tags["note"] == "late" and TAGS.items() <= {**run.data.tags, "seed": 0}.items()
    assert run.data.params["train_vqvae.fit.updates"] == str(params.train_vqvae.fit.updates)
    for name in history[0][1]:
        points = sorted((each.step, each.value) for each in client.get_metric_history(run.info.run_id, name))
        assert points == [(step, values[name]) for step, values in history if name in values], name
    system = client.get_metric_history(run.info.run_id, "system/cpu_utilization_percentage")
    assert len({(each.step, each.timestamp) for each in system}) == len(system) > 0
    assert [file.path for file in client.list_artifacts(run.info.run_id)] == ["metrics.json"]
    with tempfile.TemporaryDirectory() as folder:
        assert json.loads(Path(client.download_artifacts(run.info.run_id, "metrics.json", folder)).read_text()) == {"key": key}
    (model,) = client.search_logged_models([experiment.experiment_id], f"tags.run_key = '{key}'")
    assert run.outputs is not None and [output.model_id for output in run.outputs.model_outputs] == [model.model_id]
    (version,) = client.search_model_versions(f"name = 'tap-campaign' and tags.run_key = '{key}'")
    assert version.tags["score"] == "1.5" and version.description == "# A policy"


if __name__ == "__main__":
    main()
