"""The served policy, called directly and over HTTP."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from mlflow.exceptions import MlflowException
from mlflow.pyfunc.model import PythonModelContext

from tap import tracking
from tap.policy import Policy
from tap.registry import log_policy, open_registry, register
from tap.serving import ServedPolicy, serve

OBSERVATIONS = np.random.default_rng(0).normal(size=(3, 11))


@pytest.fixture
def served(tiny_policy_folder: Path) -> ServedPolicy:
    model = ServedPolicy()
    model.load_context(PythonModelContext(artifacts={"policy": str(tiny_policy_folder)}, model_config=None))
    return model


def predict(model: ServedPolicy, observations: Any, params: dict[str, Any] | None = None) -> np.ndarray:
    return model.predict(None, observations, params)


def test_each_row_gets_its_own_generator(served: ServedPolicy, tiny_policy: Policy) -> None:
    actions = predict(served, OBSERVATIONS, {"seed": 7})
    seeds = [int(np.random.SeedSequence([7, row]).generate_state(1, np.uint64)[0]) for row in range(3)]
    expected = tiny_policy.act(OBSERVATIONS, [torch.Generator().manual_seed(seed) for seed in seeds])
    np.testing.assert_allclose(actions, expected, rtol=1e-5)
    np.testing.assert_allclose(predict(served, OBSERVATIONS[:1], {"seed": 7}), actions[:1], rtol=1e-5)
    assert not np.array_equal(predict(served, OBSERVATIONS), actions)


def test_lists_serve_as_arrays(served: ServedPolicy) -> None:
    np.testing.assert_array_equal(predict(served, OBSERVATIONS.tolist()), predict(served, OBSERVATIONS))


@pytest.mark.parametrize(
    ("observations", "sentence"),
    [
        (OBSERVATIONS[:, :5], r"shape \(3, 5\)"),
        (OBSERVATIONS[0], r"shape \(11,\)"),
        (np.full((1, 11), np.nan), "NaN"),
        ([[1.0, 2.0], [3.0]], "inhomogeneous"),
        ([["a"] * 11], "could not convert"),
    ],
)
def test_a_wrong_input_is_the_callers_mistake(served: ServedPolicy, observations: Any, sentence: str) -> None:
    with pytest.raises(MlflowException, match=sentence) as error:
        predict(served, observations)
    assert error.value.error_code == "INVALID_PARAMETER_VALUE" and error.value.get_http_status_code() == 400


def post(port: int, body: Any) -> tuple[int, Any]:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/invocations", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@contextmanager
def server(uri: str, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """`serve` in a process of its own, with a PATH that does not hold the virtual environment; ready when given."""
    program = f"from tap.serving import serve; serve('tap-tiny', 'champion', '127.0.0.1', {port}, {uri!r})"
    process = subprocess.Popen([sys.executable, "-c", program], env=os.environ | {"PATH": "/usr/bin:/bin"})
    try:
        deadline = time.monotonic() + 120
        while True:
            assert process.poll() is None and time.monotonic() < deadline
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/ping", timeout=5)
                break
            except OSError:
                time.sleep(0.1)
        yield process
    finally:
        for child in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []:
            child.kill()
        process.kill()
        process.wait()


def test_a_champion_over_http(tiny_policy_folder: Path, tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    tags = {"dataset": "tiny", "seed": 0, "scale": "cpu", "dataset_digest": "abc"}
    with tracking.start_run("evaluate", name="evaluate", params={}, tags=tags, tracking_uri=uri) as run:
        model_uri = log_policy(run, tiny_policy_folder, OBSERVATIONS)
    assert model_uri is not None
    version = register(model_uri, "tap-tiny", {"score": 1.5})
    with open_registry(uri) as registry:
        found = registry.version_of_run("tap-tiny", str(run.id))
        assert found is not None and found.version == version and found.tags["score"] == "1.5"
        with pytest.raises(ValueError, match=r"tap-tiny has no champion at .*: run `tap promote tiny` first"):
            serve("tap-tiny", "champion", "127.0.0.1", 1, uri)
        registry.set_alias(found, "champion")
        example = registry.load_test(found).actions
    policy = tmp_path / "mlartifacts" / "models" / model_uri.removeprefix("models:/") / "artifacts"
    assert (policy / "code/tap/planner.py").exists()  # the code travels with the weights
    assert "torch==2.13.0\n" in (policy / "requirements.txt").read_text()

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    with server(uri, port) as process:
        status, answer = post(port, {"inputs": OBSERVATIONS.tolist()})
        assert status == 200
        np.testing.assert_allclose(answer["predictions"], example, rtol=1e-5)
        status, answer = post(port, {"inputs": [[1.25] + [0] * 10], "params": {"seed": 3}})
        assert status == 200 and np.shape(answer["predictions"]) == (1, 3)
        for wrong, sentence in (
            ([[1.0, 2.0]], "(1, 2)"),
            ([[float("nan")] * 11], "NaN"),
            ([[1.0], [1.0, 2.0]], "inhomogeneous"),
        ):
            status, answer = post(port, {"inputs": wrong})
            assert status == 400 and sentence in answer["message"]
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0
        assert children and not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
