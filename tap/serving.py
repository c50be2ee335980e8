"""A policy behind an HTTP server. MLflow copies this file into each logged model and runs it there ("models from code").

`tap serve` starts the server; a request carries observations (n, O) and gets actions (n, A):

    curl -s localhost:5001/invocations -H 'Content-Type: application/json' \\
        -d '{"inputs": [[1.25, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]], "params": {"seed": 0}}'

`params` may be left out. Equal observations and seeds get equal actions; a wrong shape or a NaN gets status 400 and a sentence.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mlflow.exceptions import MlflowException
from mlflow.models import set_model
from mlflow.pyfunc.model import PythonModel, PythonModelContext

from tap.policy import Policy


class ServedPolicy(PythonModel):
    """MLflow's interface to a Policy."""

    def load_context(self, context: PythonModelContext) -> None:
        """Load the policy that was logged with this file."""
        self.policy = Policy.load(Path(context.artifacts["policy"]))

    def predict(self, context: PythonModelContext, model_input: np.ndarray, params: dict[str, Any] | None = None) -> np.ndarray:
        """Actions (n, A) for observations (n, O). Row i plans with a generator from (seed, i), whatever the other rows hold."""
        seed = (params or {}).get("seed", 0)
        try:
            observations = np.asarray(model_input, dtype=np.float64)
            seeds = [np.random.SeedSequence([seed, row]).generate_state(1, np.uint64)[0] for row in range(len(observations))]
            actions = self.policy.act(observations, [torch.Generator().manual_seed(int(seed)) for seed in seeds])
        except (TypeError, ValueError) as error:  # the caller's mistake: 400, where the server would answer 500
            raise MlflowException.invalid_parameter_value(str(error)) from error
        return actions.astype(np.float32)


set_model(ServedPolicy())


def serve(name: str, alias: str, host: str, port: int, tracking_uri: str) -> None:
    """Serve the policy `models:/NAME@ALIAS` until Ctrl-C or SIGTERM, which also end the server's processes.

    Raises ValueError where there is no such policy, or the server ends by itself.
    """
    from tap.registry import open_registry  # not at the top: a served model needs no registry
    from tap.store import public

    with open_registry(tracking_uri) as registry:
        if registry.alias(name, alias) is None:
            raise ValueError(
                f"{name} has no {alias} at {public(tracking_uri)}: run `tap promote {name.removeprefix('tap-')}` first"
            )
    command = [sys.executable, "-m", "mlflow", "models", "serve", "--env-manager", "local"]
    command += ["--model-uri", f"models:/{name}@{alias}", "--host", host, "--port", str(port)]
    # MLflow finds its web server by PATH, which need not hold this virtual environment.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = {**os.environ, "PATH": path, "MLFLOW_TRACKING_URI": tracking_uri}

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        server = subprocess.Popen(command, env=environment, start_new_session=True)
        try:
            code = server.wait()
        except KeyboardInterrupt:
            return
        finally:
            _end_group(server)
    finally:
        signal.signal(signal.SIGTERM, before)
    raise ValueError(f"the server on {host}:{port} ended by itself with code {code}; its output above says why")


def _end_group(server: subprocess.Popen[bytes], patience: float = 10.0) -> None:
    """Ask a process and its children to end, and kill those that are still there after `patience` seconds."""
    deadline = time.monotonic() + patience
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGTERM)
        while time.monotonic() < deadline:
            server.poll()  # a child that is not waited for stays in its group
            os.killpg(server.pid, 0)
            time.sleep(0.05)
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()
