"""What clients of a served policy wait, and whether they keep a control loop of 20 Hz, at `cpu` scale in Hopper's dimensions.

The server is that of `tap serve`, in a process of its own; each client is a thread with a connection that stays open. "answers"
are to clients that ask again at once. In a loop a client asks at every tick, or at every third for a whole plan; a tick is
missed if its action is not there when the next one comes.
"""

import importlib.util
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.measure import Result, main
from benchmarks.sizes import LAYOUTS, params_of, random_observations, random_policy
from tap.settings import Params

CLIENTS = (1, 8, 32)
PERIOD = 1 / 20  # seconds of a tick


def benchmark(device: torch.device, quick: bool) -> Result:
    if importlib.util.find_spec("mlflow") is None:
        return {"skipped": "mlflow is not installed"}
    seconds = 3.0 if quick else 10.0
    with server(params_of("hopper", "cpu")) as url:
        return {f"{clients}_clients": with_clients(url, clients, seconds) for clients in CLIENTS}


@contextmanager
def server(params: Params) -> Iterator[str]:
    """The address of a server, in a process of its own, of a policy with random weights in Hopper's dimensions."""
    from pipelines.orchestration import process

    with tempfile.TemporaryDirectory() as folder, socket.socket() as listener:
        os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder}/mlflow.db"
        model_uri = log_random_policy(Path(folder), params)
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        listener.close()
        with process.running([sys.executable, "-m", "pipelines.serving.scoring", model_uri, "127.0.0.1", str(port)]) as running:
            url = f"http://127.0.0.1:{port}"
            while not answers(url):
                if running.poll() is not None:
                    raise RuntimeError("the server exited; see its output above")
                time.sleep(0.1)
            yield url


def log_random_policy(folder: Path, params: Params) -> str:
    """Log a policy with random weights in Hopper's dimensions, saved as `folder`/policy, in MLflow's store; its URI."""
    from tap.settings import Runtime
    from tap.tracking.registry import log_policy
    from tap.tracking.run import start_run

    layout = LAYOUTS["hopper"]
    random_policy(params, layout, torch.device("cpu")).save(folder / "policy")
    tags = {"dataset": "random", "seed": 0, "scale": "cpu", "dataset_digest": "none"}
    runtime = Runtime(outbox=folder / "outbox")
    with start_run("evaluate", name="benchmark", params={}, tags=tags, runtime=runtime) as run:
        log_policy(run, folder / "policy", random_observations(2, layout), layout.action_dim, budget_ms=0.0)
        run.register("tap-random", {})
    return "models:/tap-random/1"


def answers(url: str) -> bool:
    import requests

    try:
        return bool(requests.get(f"{url}/ping", timeout=5).ok)
    except requests.ConnectionError:
        return False


def with_clients(url: str, clients: int, seconds: float) -> Result:
    """Latencies, and shares of missed ticks, of that many clients at once."""
    every_client(clients, ask_on, url, 1.0)  # warms up
    latencies = 1000 * np.concatenate(every_client(clients, ask_on, url, seconds))
    return {
        "median_ms": float(np.median(latencies)),
        "p95_ms": float(np.percentile(latencies, 95)),
        "answers_per_second": len(latencies) / seconds,
        "missed_ticks": missed_ticks(url, clients, seconds),
        "missed_ticks_plan_every_3": missed_ticks(url, clients, seconds, plan_every=3),
    }


def missed_ticks(url: str, clients: int, seconds: float, period: float = PERIOD, plan_every: int = 1) -> float:
    """The share of ticks that clients miss which keep a loop of `period` seconds, of all of their ticks."""
    return float(np.mean(every_client(clients, keep_time, url, seconds, period, plan_every)))


def every_client(clients: int, function: Callable[..., Any], url: str, seconds: float, *arguments: float) -> list[Any]:
    """What `function` returns for each of that many clients at once; each starts at another moment of a tick."""
    start = time.perf_counter() + 0.1
    starts = [start + PERIOD * client / clients for client in range(clients)]
    with ThreadPoolExecutor(clients) as threads:
        return list(threads.map(lambda start: function(url, start, seconds, *arguments), starts))


def ask_on(url: str, start: float, seconds: float) -> np.ndarray:
    """Seconds of each answer to a client that asks without a pause."""
    client, latencies = Client(url), []
    wait_until(start)
    while (asked := time.perf_counter()) < start + seconds:
        client.ask(details=False)
        latencies.append(time.perf_counter() - asked)
    return np.array(latencies)


def keep_time(url: str, start: float, seconds: float, period: float, plan_every: int) -> float:
    """The share of ticks for which a client has no action, if it executes `plan_every` actions of each plan."""
    client, tick, missed, ticks = Client(url), 0, 0, round(seconds / period)
    while tick < ticks:
        wait_until(start + period * tick)
        client.ask(details=plan_every > 1)
        late = int((time.perf_counter() - start) / period) - tick  # ticks that have ended meanwhile
        missed += min(late, ticks - tick)
        tick += late + plan_every
    return missed / ticks


class Client:
    """A connection, and an observation to ask about."""

    def __init__(self, url: str) -> None:
        import requests

        self.url, self.session = f"{url}/invocations", requests.Session()
        self.inputs = random_observations(1, LAYOUTS["hopper"]).tolist()

    def ask(self, details: bool) -> None:
        answer = self.session.post(self.url, json={"inputs": self.inputs, "params": {"details": details}}, timeout=60)
        answer.raise_for_status()


def wait_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.perf_counter()))


if __name__ == "__main__":
    main(__doc__, benchmark)
