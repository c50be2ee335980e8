"""A served policy that remembers: requests with histories, over HTTP and in shared batches."""

import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import gymnasium
import mlflow
import numpy as np
import pytest
import requests
import torch
import uvicorn
from conftest import ROOT, random_episodes, tiny_tree
from mlflow.pyfunc import scoring_server

from benchmarks.sizes import params_of
from pipelines.serving.scoring import Invocations
from tap.data.history import History
from tap.data.windows import Layout, fit_normalizer
from tap.methods.decision_transformer import DecisionTransformer, window_params
from tap.serving.policy import SharedPolicy
from tap.settings import Runtime
from tap.tracking import run as tracking
from tap.tracking.registry import log_policy, open_registry

pytestmark = pytest.mark.xdist_group("serving")

OBSERVATIONS = np.random.default_rng(0).normal(size=(3, 11))


def history(steps: int, seed: int) -> History:
    rng = np.random.default_rng(seed)
    return History(rng.normal(size=(steps, 11)), rng.uniform(-1, 1, (steps, 3)), rng.normal(size=steps))


def as_json(histories: list[History]) -> dict[str, Any]:
    return {name: [getattr(each, name).tolist() for each in histories] for name in ("observations", "actions", "rewards")}


def make_policy() -> DecisionTransformer:
    params = params_of("hopper", "cpu", **tiny_tree()).train_dt
    assert params
    torch.manual_seed(0)
    episodes = random_episodes([30, 5, 40], observation_dim=11, action_dim=3)
    policy = DecisionTransformer(params, Layout(11, 3), fit_normalizer(episodes, window_params(params)))
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    policy.target_return.fill_(10)
    return policy.eval()


class Server(NamedTuple):
    url: str
    policy: DecisionTransformer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The scoring server with a registered policy, in a thread; the policy has passed a load test."""
    folder, policy = tmp_path_factory.mktemp("history"), make_policy()
    policy.save(folder / "policy")
    uri = f"sqlite:///{folder}/mlflow.db"
    runtime = Runtime(tracking_uri=uri, outbox=folder / ".tracking")
    tags = {"dataset": "tiny", "seed": 0, "scale": "cpu", "dataset_digest": "abc"}
    with tracking.start_run("methods", name="methods", params={}, tags=tags, runtime=runtime) as run:
        log_policy(run, folder / "policy", OBSERVATIONS, 3, remembers=True)
        run.register("tap-tiny-dt", {})
    with open_registry(uri) as registry:
        version = registry.version_of_run("tap-tiny-dt", run.id)
        assert version is not None
        trial = registry.load_test(version)
        np.testing.assert_allclose(trial.actions, policy.act(OBSERVATIONS, []), rtol=1e-4, atol=1e-5)
        model = mlflow.pyfunc.load_model(str(registry.download(version, folder / "model")))
    app = Invocations(model, scoring_server.init(model))
    running = uvicorn.Server(uvicorn.Config(app, "127.0.0.1", 0, log_level="error"))
    thread = threading.Thread(target=running.run)
    thread.start()
    while not running.started:
        assert thread.is_alive()
        time.sleep(0.01)
    port = running.servers[0].sockets[0].getsockname()[1]
    yield Server(f"http://127.0.0.1:{port}", policy)
    running.should_exit = True
    thread.join(20)


def post(server: Server, observations: Any, **params: Any) -> tuple[int, Any]:
    answer = requests.post(f"{server.url}/invocations", json={"inputs": observations, "params": params}, timeout=60)
    return answer.status_code, answer.json()


def test_a_request_carries_a_history_for_each_row(server: Server) -> None:
    """Of different lengths, one of them empty: as if each had been sent alone."""
    histories = [history(9, 1), History.empty(11, 3), history(2, 2)]
    status, answer = post(server, OBSERVATIONS.tolist(), history=as_json(histories))
    expected = server.policy.act(OBSERVATIONS, [], histories)
    assert status == 200, answer
    np.testing.assert_allclose(answer["predictions"], expected, rtol=1e-4, atol=1e-5)
    for row in range(3):
        status, alone = post(server, OBSERVATIONS[row : row + 1].tolist(), history=as_json(histories[row : row + 1]))
        np.testing.assert_allclose(alone["predictions"], expected[row : row + 1], rtol=1e-4, atol=1e-5)
    assert not np.allclose(expected, server.policy.act(OBSERVATIONS, []))


def test_observations_alone_are_first_steps(server: Server) -> None:
    status, answer = post(server, OBSERVATIONS.tolist())
    assert status == 200, answer
    np.testing.assert_allclose(answer["predictions"], server.policy.act(OBSERVATIONS, []), rtol=1e-4, atol=1e-5)


def test_details_and_whole_numbers(server: Server) -> None:
    past = History(np.zeros((3, 11)), np.ones((3, 3)), np.arange(3.0))
    whole = {"observations": [[[0] * 11] * 3], "actions": [[[1] * 3] * 3], "rewards": [[0, 1, 2]]}
    status, answer = post(server, [[0] * 11], history=whole, details=True)
    assert status == 200, answer
    (record,) = answer["predictions"]
    assert list(record) == ["action", "out_of_distribution", "reasons"]
    np.testing.assert_allclose(record["action"], server.policy.act(np.zeros((1, 11)), [], [past])[0], rtol=1e-4, atol=1e-5)


ONE = as_json([history(4, 0)])


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"actions": [[[0.0] * 4] * 4]}, "params.history.actions.0.0: List should have at most 3 items after validation"),
        ({"rewards": [["a"]]}, "params.history.rewards.0.0: Input should be a valid number."),
        ({"states": []}, "params.history.states: Unknown field; the fields are observations, actions, rewards."),
        ({"rewards": [[0.0] * 4] * 2}, "the history has 1 rows of observations, 1 rows of actions, 2 rows of rewards: send as"),
        ({"rewards": [[0.0] * 3]}, "history 0 has 4 observations, 4 actions and 3 rewards: send the rewards of all steps"),
        (as_json([history(2, 0)]) | {"rewards": [[0.0] * 9]}, "history 0 has 2 observations, 2 actions and 9 rewards"),
        (as_json([history(2, 0)] * 2), "there are 2 histories for 1 observations: send one for each."),
    ],
)
def test_the_response_to_a_wrong_history_is_one_sentence(server: Server, wrong: dict[str, Any], sentence: str) -> None:
    status, answer = post(server, OBSERVATIONS[:1].tolist(), history=ONE | wrong)
    assert status == 400 and answer["message"].startswith(sentence), answer
    assert "\n" not in answer["message"]


def test_a_missing_part_and_a_large_history_are_refused(server: Server) -> None:
    status, answer = post(server, OBSERVATIONS[:1].tolist(), history={"observations": [[]], "rewards": [[]]})
    assert status == 400 and answer["message"] == "params.history.actions: Field required."
    whole = as_json([history(1000, 0)])  # an episode of a thousand steps is no problem
    assert post(server, OBSERVATIONS[:1].tolist(), history=whole)[0] == 200
    status, answer = post(server, OBSERVATIONS[:1].tolist(), history=as_json([history(40_000, 0)]))
    assert status == 413 and "send at most 256 rows at a time, with fewer steps of their histories" in answer["message"]


def test_requests_with_and_without_a_history_share_a_batch() -> None:
    policy = make_policy()
    shared, gate = SharedPolicy(policy), threading.Event()
    shared._planner.submit(gate.wait, 30)  # so that all requests wait for one batch
    pasts = [[history(5, 1), history(1, 2)], None, [history(3, 3), History.empty(11, 3)]]
    with ThreadPoolExecutor(3) as threads:
        plans = [threads.submit(shared.plan, OBSERVATIONS[:2], [], past) for past in pasts]
        while shared._waiting.qsize() < 3:
            time.sleep(0.001)
        with pytest.raises(ValueError, match="there are 1 histories for 2 observations"):
            shared.plan(OBSERVATIONS[:2], [], [history(1, 0)])
        gate.set()
    for past, plan in zip(pasts, plans, strict=True):
        np.testing.assert_allclose(plan.result().actions[:, 0], policy.act(OBSERVATIONS[:2], [], past), rtol=1e-4, atol=1e-5)


def test_the_documented_client_drives_an_environment(server: Server) -> None:
    page, client = (ROOT / "docs/serving.md").read_text(), ROOT / "docs/history_client.py"
    assert f"```python\n{client.read_text()}```\n" in page
    ran = subprocess.run([sys.executable, client, server.url], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    found = re.search(r"return (-?[\d.]+) after (\d+) steps", ran.stdout)
    assert found

    environment = gymnasium.make("Hopper-v4")  # the same without a server
    observation, _ = environment.reset(seed=0)
    past, ended = History.empty(11, 3), False
    while not ended:
        action = np.clip(server.policy.act(observation[None], [], [past])[0], -1, 1)
        following, reward, terminated, truncated, _ = environment.step(action)
        past, observation = past.after(observation, action, float(reward), 100), following
        ended = terminated or truncated
    assert int(found[2]) == len(past.rewards) and float(found[1]) == pytest.approx(past.rewards.sum(), abs=0.5)
