"""The served policy, called directly and over HTTP."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import gymnasium
import httpx
import numpy as np
import psutil
import pytest
import requests
import torch
from conftest import ROOT, make_tiny_policy, random_episodes, tiny_tree
from mlflow.exceptions import MlflowException
from mlflow.models import ModelSignature
from mlflow.protos.databricks_pb2 import INTERNAL_ERROR
from mlflow.pyfunc.model import PythonModelContext
from mlflow.types import DataType, ParamSchema, ParamSpec, Schema, TensorSpec

from benchmarks.sizes import params_of
from pipelines.serving.scoring import Invocations
from pipelines.serving.serve import serve
from pipelines.stages.train_bc import WINDOWS
from tap.data.action_bounds import save_bounds
from tap.data.windows import Layout, fit_normalizer
from tap.methods.behaviour_cloning import BehaviourCloning
from tap.methods.policy import Action
from tap.planning.plan import Plan
from tap.planning.planner import MAX_BATCH_STATES
from tap.planning.policy import Policy
from tap.serving.policy import PlanRequest, ServedPolicy, SharedPolicy
from tap.settings import Params, Runtime
from tap.tracking import run as tracking
from tap.tracking.registry import log_policy, open_registry

OBSERVATIONS = np.random.default_rng(0).normal(size=(3, 11))


def generators(seed: int, rows: int) -> list[torch.Generator]:
    seeds = [int(np.random.SeedSequence([seed, row]).generate_state(1, np.uint64)[0]) for row in range(rows)]
    return [torch.Generator().manual_seed(seed) for seed in seeds]


@pytest.fixture
def served(tiny_policy_folder: Path) -> ServedPolicy:
    model = ServedPolicy()
    model.load_context(PythonModelContext(artifacts={"policy": str(tiny_policy_folder)}, model_config=None))
    return model


def predict(model: ServedPolicy, observations: Any, params: dict[str, Any] | None = None) -> Any:
    return model.predict(None, observations, params)


def test_each_row_gets_its_own_generator(served: ServedPolicy, tiny_policy: Policy) -> None:
    actions = predict(served, OBSERVATIONS, {"seed": 7})
    np.testing.assert_allclose(actions, tiny_policy.act(OBSERVATIONS, generators(7, 3)), rtol=1e-5)
    np.testing.assert_allclose(predict(served, OBSERVATIONS[:1], {"seed": 7}), actions[:1], rtol=1e-5)
    assert not np.array_equal(predict(served, OBSERVATIONS), actions)
    assert predict(served, OBSERVATIONS, {"seed": -7}).shape == (3, 3)


def test_actions_are_clipped_to_the_bounds_of_each_dimension(tiny_policy: Policy, tiny_policy_folder: Path) -> None:
    free = tiny_policy.act(OBSERVATIONS, generators(7, 3))
    low, high = np.array([free[0, 0], -np.inf, -np.inf], np.float32), np.array([np.inf, free[1, 1], np.inf], np.float32)
    save_bounds(tiny_policy_folder, (low, high))
    model = ServedPolicy()
    model.load_context(PythonModelContext(artifacts={"policy": str(tiny_policy_folder)}, model_config=None))
    clipped = predict(model, OBSERVATIONS, {"seed": 7})
    expected = np.stack([np.maximum(free[:, 0], free[0, 0]), np.minimum(free[:, 1], free[1, 1]), free[:, 2]], axis=1)
    assert not np.allclose(expected, free)
    np.testing.assert_allclose(clipped, expected, rtol=1e-5)
    detailed = predict(model, OBSERVATIONS, {"seed": 7, "details": True})
    np.testing.assert_allclose([each["action"] for each in detailed], expected, rtol=1e-5)
    np.testing.assert_allclose([each["plan"]["actions"][0] for each in detailed], expected, rtol=1e-5)


def test_details_without_rewards_pretend_no_return(tiny_policy: Policy, tmp_path: Path) -> None:
    by_likelihood = tiny_policy.params.model_copy(update={"objective": "likelihood"})
    Policy(tiny_policy.vqvae, tiny_policy.normalizer, tiny_policy.prior, by_likelihood, tiny_policy.device).save(tmp_path)
    model = ServedPolicy()
    model.load_context(PythonModelContext(artifacts={"policy": str(tmp_path)}, model_config=None))
    (record,) = predict(model, OBSERVATIONS[:1], {"details": True})
    assert record.keys() == {"action", "plan", "probability", "out_of_distribution", "reasons"}
    assert record["plan"].keys() == {"observations", "actions"}


def test_lists_serve_as_arrays(served: ServedPolicy) -> None:
    np.testing.assert_array_equal(predict(served, OBSERVATIONS.tolist()), predict(served, OBSERVATIONS))


def test_details_are_the_plan_and_its_warnings(served: ServedPolicy, tiny_policy: Policy) -> None:
    records = predict(served, OBSERVATIONS, {"seed": 7, "details": True})
    plan = tiny_policy.plan(OBSERVATIONS, generators(7, 3))
    assert json.loads(json.dumps(records)) == records
    for row, record in enumerate(records):
        for name in ("observations", "actions", "rewards"):
            np.testing.assert_allclose(record["plan"][name], getattr(plan, name)[row], rtol=1e-4, atol=1e-5)
        assert record["action"] == record["plan"]["actions"][0]
        assert record["predicted_return"] == pytest.approx(plan.predicted_return[row], rel=1e-4)
        assert record["probability"] == pytest.approx(np.exp(plan.log_probability[row]), rel=1e-4)
        assert record["out_of_distribution"] == bool(record["reasons"])
    (far,) = predict(served, [[100.0, *[0.0] * 10]], {"details": True})
    assert far["out_of_distribution"] and far["reasons"]["state"].startswith(
        "observation[0] is 100, far outside the training data"
    )


def test_behaviour_cloning_is_served_without_predictions(tiny_params: Params, tmp_path: Path) -> None:
    episodes = random_episodes([30, 5, 40], observation_dim=11, action_dim=3)
    torch.manual_seed(0)
    policy = BehaviourCloning(tiny_params.train_bc, Layout(11, 3), fit_normalizer(episodes, WINDOWS))
    policy.save(tmp_path / "policy")
    model = ServedPolicy()
    model.load_context(PythonModelContext(artifacts={"policy": str(tmp_path / "policy")}, model_config=None))
    expected = policy.act(OBSERVATIONS, [])
    np.testing.assert_allclose(predict(model, OBSERVATIONS), expected, rtol=1e-5)
    far = np.array([[100.0, *[0.0] * 10]])
    near, warned = predict(model, np.concatenate([OBSERVATIONS[:1], far]), {"details": True})
    assert list(near) == list(warned) == ["action", "out_of_distribution", "reasons"]
    np.testing.assert_allclose(near["action"], expected[0], rtol=1e-5)
    assert warned["out_of_distribution"] and "observation[0] is 100" in warned["reasons"]["state"]


@pytest.mark.parametrize(
    ("observations", "sentence"),
    [
        (OBSERVATIONS[:, :5], r"shape \(3, 5\)"),
        (OBSERVATIONS[0], r"shape \(11,\)"),
        (OBSERVATIONS[:0], "no observation"),
        (np.full((1, 11), np.nan), "NaN"),
        (np.full((1, 11), 1e39), "float32"),
        ([[1.0, 2.0], [3.0]], "inhomogeneous"),
        ([["a"] * 11], "could not convert"),
    ],
)
def test_a_wrong_input_gets_status_400(served: ServedPolicy, observations: Any, sentence: str) -> None:
    with pytest.raises(MlflowException, match=sentence) as error:
        predict(served, observations)
    assert error.value.error_code == "INVALID_PARAMETER_VALUE" and error.value.get_http_status_code() == 400


def test_a_failure_of_the_planner_gets_status_500(served: ServedPolicy, caplog: pytest.LogCaptureFixture) -> None:
    served.policy.planner.prior = torch.nn.Identity()  # type: ignore[assignment]
    with pytest.raises(MlflowException, match="planning failed; see the server's log") as error:
        predict(served, OBSERVATIONS)
    assert error.value.get_http_status_code() == 500 and "Traceback" in caplog.text


class Gate:
    """A policy that plans only while it is open, and records the size of each batch."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.open, self.batches = policy, threading.Event(), []

    def check(self, observations: np.ndarray) -> None:
        self.policy.check(observations)

    def plan(self, observations: np.ndarray, generators: list[torch.Generator]) -> Plan:
        self.batches.append(len(observations))
        assert self.open.wait(30)
        return self.policy.plan(observations, generators)


def test_waiting_requests_share_a_batch_and_get_their_own_plans(tiny_policy: Policy) -> None:
    gate = Gate(tiny_policy)
    shared = SharedPolicy(gate)  # type: ignore[arg-type]
    observations = np.random.default_rng(0).normal(size=(6, 2, 11))
    with ThreadPoolExecutor(7) as threads:
        plans = [threads.submit(shared.plan, observations[0], generators(0, 2))]
        while not gate.batches:  # the first is being planned
            time.sleep(0.001)
        plans += [threads.submit(shared.plan, observations[i], generators(i, 2)) for i in range(1, 6)]
        with pytest.raises(ValueError, match="shape"):  # a mistake fails only its own request
            shared.plan(observations[0, :, :5], generators(0, 2))
        while shared._waiting.qsize() < 5:
            time.sleep(0.001)
        gate.open.set()
    assert gate.batches == [2, 10]
    for i, plan in enumerate(plans):
        alone = tiny_policy.plan(observations[i], generators(i, 2))
        np.testing.assert_array_equal(plan.result().codes, alone.codes)
        np.testing.assert_allclose(plan.result().actions, alone.actions, rtol=1e-4, atol=1e-5)


def test_the_size_of_a_batch_is_limited(tiny_policy: Policy) -> None:
    gate = Gate(tiny_policy)
    shared = SharedPolicy(gate)  # type: ignore[arg-type]
    with ThreadPoolExecutor(5) as threads:
        threads.submit(shared.plan, OBSERVATIONS[:1], generators(0, 1))
        while not gate.batches:
            time.sleep(0.001)
        for seed in range(3):
            threads.submit(shared.plan, np.zeros((MAX_BATCH_STATES - 1, 11)), generators(seed, MAX_BATCH_STATES - 1))
        while shared._waiting.qsize() < 3:
            time.sleep(0.001)
        gate.open.set()
    assert gate.batches == [1, 2 * (MAX_BATCH_STATES - 1), MAX_BATCH_STATES - 1]


class Paced:
    """A policy that takes all the time it is given, by a clock of its own."""

    def __init__(self) -> None:
        self.now, self.given = 0.0, []
        self.budget_ms = 0.0

    def clock(self) -> float:
        return self.now

    def check(self, observations: np.ndarray) -> None:
        pass

    def plan(self, observations: np.ndarray, generators: list[torch.Generator]) -> Action:
        return Action(observations[:, None])

    def plan_within(self, observations: np.ndarray, generators: list[torch.Generator], seconds: float) -> Action:
        self.given.append((float(observations[0, 0]), seconds))
        self.now += seconds
        return Action(observations[:, None])


def test_requests_with_a_budget_come_first_and_leave_the_others_theirs() -> None:
    """None is late, though each takes all that it is given."""
    paced = Paced()
    shared = SharedPolicy(paced, paced.clock)  # type: ignore[arg-type]
    states = [np.full((rows, 1), rows, float) for rows in (1, 2, 3, 4)]
    requests = [
        PlanRequest(state, generators(0, len(state)), None, end)
        for state, end in zip(states, [9.0, 6.0, None, 12.0], strict=True)
    ]
    for waiting in requests:
        shared._waiting.put(waiting)
    shared._plan_waiting()
    # The one that ends at 6 has 2 of 7 rows, that at 9 then 1 of 5, and that at 12 is the last.
    first, second = 6 * 2 / 7, (9 - 6 * 2 / 7) / 5
    assert paced.given == [(2.0, pytest.approx(first)), (1.0, pytest.approx(second)), (4.0, pytest.approx(12 - first - second))]
    for waiting, state in zip(requests, states, strict=True):
        np.testing.assert_array_equal(waiting.plan.result(timeout=0).actions[:, 0], state)


class Server(NamedTuple):
    """`tap serve` of a champion with a tiny policy for Hopper."""

    url: str
    policy: Policy
    example: np.ndarray  # the actions for OBSERVATIONS of the model loaded from the registry


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that responds; at the end, SIGTERM must stop it and all its processes."""
    folder = tmp_path_factory.mktemp("serving")
    policy = make_tiny_policy(params_of("hopper", "cpu", **tiny_tree()))
    policy.save(folder / "policy")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    uri = f"sqlite:///{folder}/mlflow.db"
    runtime = Runtime(tracking_uri=uri, outbox=folder / ".tracking")
    tags = {"dataset": "tiny", "seed": 0, "scale": "cpu", "dataset_digest": "abc"}
    with tracking.start_run("evaluate", name="evaluate", params={}, tags=tags, runtime=runtime) as run:
        log_policy(run, folder / "policy", OBSERVATIONS, 3, budget_ms=0.0)
        run.register("tap-tiny", {"score": 1.5})
    with open_registry(uri) as registry:
        found = registry.version_of_run("tap-tiny", run.id)
        assert found is not None and found.version == "1" and found.tags["score"] == "1.5"
        with pytest.raises(ValueError, match=r"tap-tiny has no champion at .*: run `tap promote tiny` first"):
            serve("tap-tiny", "champion", "127.0.0.1", port, None, uri)
        registry.set_alias(found, "champion")
        example = registry.load_test(found).actions
    (logged,) = (folder / "mlartifacts" / "models").glob("*/artifacts")
    assert (logged / "code/tap/planning/planner.py").exists()  # the code travels with the weights
    assert "torch==2.13.0\n" in (logged / "requirements.txt").read_text()

    environment = os.environ | {"PATH": "/usr/bin:/bin", "MLFLOW_TRACKING_URI": uri}  # a PATH without the virtual environment
    command = [sys.executable, "-m", "pipelines.cli", "serve", "tiny", "--port", str(port)]
    process = psutil.Popen(command, env=environment, cwd=ROOT)
    try:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 120
        while True:
            assert process.poll() is None and time.monotonic() < deadline
            try:
                assert requests.get(f"{url}/ping", timeout=5).status_code == 200
                break
            except requests.ConnectionError:
                time.sleep(0.1)
        yield Server(url, policy, example)
        children = process.children(recursive=True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0
        assert children and not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
    finally:
        for child in [*process.children(recursive=True), process] if process.is_running() else []:
            child.kill()


def post(server: Server, body: Any, content_type: str = "application/json") -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = requests.post(f"{server.url}/invocations", data, headers={"Content-Type": content_type}, timeout=30)
    return answer.status_code, answer.json()


@pytest.mark.xdist_group("serving")
def test_a_champion_over_http(server: Server) -> None:
    status, answer = post(server, {"inputs": OBSERVATIONS.tolist()})
    assert status == 200
    np.testing.assert_allclose(answer["predictions"], server.example, rtol=1e-5)
    status, answer = post(server, {"inputs": [[1.25] + [0] * 10], "params": {"seed": 3}}, "application/json; charset=utf-8")
    assert status == 200 and np.shape(answer["predictions"]) == (1, 3)
    status, answer = post(server, {"inputs": OBSERVATIONS.tolist(), "params": {"details": True}})
    assert status == 200
    np.testing.assert_allclose([record["action"] for record in answer["predictions"]], server.example, rtol=1e-5)
    for budget_ms, searched in ((60_000, "beam-4"), (1e-6, "prior")):
        status, answer = post(server, {"inputs": [ROW], "params": {"details": True, "budget_ms": budget_ms}})
        assert status == 200 and answer["predictions"][0]["searched"] == searched


ROW = [0.0] * 11
MISTAKES: list[tuple[Any, str]] = [
    ({"inputs": [[1.0, 2.0]]}, "inputs.0: List should have at least 11 items after validation, not 2."),
    ({"inputs": [ROW, [*ROW, 1.0]]}, "inputs.1: List should have at most 11 items after validation, not 12."),
    ({"inputs": ROW}, "inputs.0: Input should be a valid array."),
    ({"inputs": []}, "inputs: List should have at least 1 item after validation, not 0."),
    ({"inputs": [ROW] * 257}, "inputs: List should have at most 256 items after validation, not 257."),
    ({"inputs": [[float("nan"), *ROW[1:]]]}, "inputs.0.0: Input should be a finite number."),
    ({"inputs": [[None, *ROW[1:]]]}, "inputs.0.0: Input should be a valid number."),
    ({"inputs": [["1", *ROW[1:]]]}, "inputs.0.0: Input should be a valid number."),
    ({"inputs": [[1e39, *ROW[1:]]]}, "inputs.0.0: Input should be less than or equal to 34"),
    ({"inputs": [ROW], "parms": {}}, "parms: Unknown field; the fields are inputs, params."),
    ({"inputs": [ROW], "params": {"sed": 1}}, "params.sed: Unknown field; the fields are seed, details, budget_ms."),
    ({"inputs": [ROW], "params": {"seed": "a"}}, "params.seed: Input should be a valid integer."),
    ({"inputs": [ROW], "params": {"seed": 1.5}}, "params.seed: Input should be a valid integer."),
    ({"inputs": [ROW], "params": {"details": 1}}, "params.details: Input should be a valid boolean."),
    ({"inputs": [ROW], "params": {"budget_ms": -1}}, "budget_ms is -1: send a time in milliseconds, or 0 for none."),
    ({"inputs": [ROW], "params": 1}, "params: Input should be an object."),
    ({}, "inputs: Field required."),
    ([ROW], "request: Input should be an object."),
    ({"inputs": [[1e30] * 11]}, "the model has no finite plan for these observations."),
    ({"inputs": [ROW], "a\nb": 1}, r"a\nb: Unknown field; the fields are inputs, params."),
    ({"inputs": [ROW], "x" * 1000: 1}, "x" * 100 + ": Unknown field; the fields are inputs, params."),
    (b"observations", "request: Invalid JSON: expected value at line 1 column 1."),
    (b"", "request: Invalid JSON: EOF while parsing a value at line 1 column 0."),
    (b"[" * 10_000, "request: Invalid JSON: recursion limit exceeded"),
]


@pytest.mark.xdist_group("serving")
@pytest.mark.parametrize(("body", "sentence"), MISTAKES)
def test_the_response_to_a_wrong_request_is_one_sentence(server: Server, body: Any, sentence: str) -> None:
    status, answer = post(server, body)
    assert status == 400 and answer["error_code"] == "BAD_REQUEST" and answer["message"].startswith(sentence)
    assert "\n" not in answer["message"] and "stack_trace" not in answer


@pytest.mark.xdist_group("serving")
def test_other_formats_and_large_bodies_are_refused(server: Server) -> None:
    status, answer = post(server, b"a,b\n1,2\n", "text/csv")
    assert status == 415 and answer["message"] == "The content type is text/csv; it must be application/json."
    answer = requests.post(f"{server.url}/invocations", b"{}", timeout=30)
    assert answer.status_code == 415 and "The content type is none" in answer.text
    status, answer = post(server, b" " * 200_000)
    assert status == 413 and "send at most 256 rows at a time" in answer["message"]
    status, answer = post(server, {"inputs": [ROW]}, 'Application/JSON; charset="UTF-8"')
    assert status == 200 and np.shape(answer["predictions"]) == (1, 3)
    assert requests.get(f"{server.url}/invocations", timeout=30).status_code == 405
    assert requests.get(f"{server.url}/nowhere", timeout=30).status_code == 404


@pytest.mark.xdist_group("serving")
def test_the_documented_client_drives_an_environment(server: Server) -> None:
    page, client = (ROOT / "docs/serving.md").read_text(), ROOT / "docs/client.py"
    assert f"```python\n{client.read_text()}```\n" in page
    ran = subprocess.run([sys.executable, client, server.url], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    found = re.search(r"return (-?[\d.]+) after (\d+) steps", ran.stdout)
    assert found

    environment = gymnasium.make("Hopper-v4")  # the same without a server
    observation, _ = environment.reset(seed=0)
    total, step, ended = 0.0, 0, False
    actions: list[np.ndarray] = []
    while not ended:
        if step % 3 == 0:
            actions = list(server.policy.plan(observation[None], generators(step, 1)).actions[0, :3])
        observation, reward, terminated, truncated, _ = environment.step(np.clip(actions.pop(0), -1, 1))
        total, step, ended = total + float(reward), step + 1, terminated or truncated
    assert int(found[2]) == step and float(found[1]) == pytest.approx(total, abs=0.5)


@pytest.fixture
def recorded(tmp_path: Path) -> Callable[..., str]:
    """Writes states as recorded where docs/robot_loop.py reads them, and runs it there."""

    def loop(url: str, states: np.ndarray) -> str:
        episodes = tmp_path / "data/raw/arm/episodes"
        episodes.mkdir(parents=True)
        np.save(episodes / "observations.npy", states.astype(np.float32))
        client = [sys.executable, ROOT / "docs/robot_loop.py", url]
        ran = subprocess.run(client, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        return ran.stdout + ran.stderr

    return loop


@pytest.mark.xdist_group("serving")
def test_the_documented_loop_sends_a_command_each_tick(server: Server, recorded: Callable[..., str]) -> None:
    page, client = (ROOT / "docs/robots.md").read_text(), ROOT / "docs/robot_loop.py"
    assert f"```python\n{client.read_text()}```\n" in page
    usual = server.policy.normalizer.mean[server.policy.vqvae.layout.observation]
    printed = recorded(server.url, np.tile(usual, (60, 1)))
    found = re.search(r"(\d+) commands in ([\d.]+) s; late answers: (\d+); states unlike the data: 0", printed)
    assert found, printed
    commands, seconds, late = int(found[1]), float(found[2]), int(found[3])
    assert commands >= 60 - late and seconds >= 60 / 30 - 0.05  # before the first answer there is no command


@pytest.mark.xdist_group("serving")
def test_the_documented_loop_stops_at_states_unlike_the_data(server: Server, recorded: Callable[..., str]) -> None:
    states = np.tile(server.policy.normalizer.mean[server.policy.vqvae.layout.observation], (60, 1))
    states[20:, 4] = 1000
    printed = recorded(server.url, states)
    assert "tick 20: observation[4] is 1000, far outside the training data" in printed
    assert re.search(r"tick (29|[3-5]\d): no plan to trust since tick \d+: stopping the robot", printed), printed


class Failing:
    """A model whose signature is that of the tiny policy, and whose `predict` fails or takes long."""

    def __init__(self, error: Exception | None) -> None:
        inputs = Schema([TensorSpec(np.dtype(np.float64), (-1, 1))])
        outputs, params = (
            Schema([TensorSpec(np.dtype(np.float32), (-1, 1))]),
            ParamSchema([ParamSpec("seed", DataType.long, 0)]),
        )
        self.metadata = SimpleNamespace(signature=ModelSignature(inputs, outputs, params))
        self.error = error

    def predict(self, observations: np.ndarray, params: dict[str, Any]) -> np.ndarray:
        if self.error:
            raise self.error
        time.sleep(0.5)
        return observations


@pytest.mark.parametrize(
    ("error", "status", "code", "sentence"),
    [
        (None, 504, "DEADLINE_EXCEEDED", "The request took longer than 0.05 seconds; send fewer rows at a time."),
        (MlflowException("planning failed", INTERNAL_ERROR), 500, "INTERNAL_ERROR", "planning failed."),
        (MlflowException.invalid_parameter_value("no\nplan"), 400, "BAD_REQUEST", r"no\nplan."),
        (KeyError("params"), 500, "INTERNAL_ERROR", "The model failed; see the server's log."),
    ],
)
def test_a_failure_of_the_model_is_one_sentence(error: Exception | None, status: int, code: str, sentence: str) -> None:
    app = Invocations(Failing(error), None)  # type: ignore[arg-type]
    app.timeout = 0.05  # type: ignore[assignment]

    async def response() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return await client.post("/invocations", json={"inputs": [[1.0]]})

    answer = asyncio.run(response())
    assert answer.status_code == status and answer.json()["message"] == sentence and answer.json()["error_code"] == code
    assert "stack_trace" not in answer.json()
