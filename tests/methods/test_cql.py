"""Conservative Q-learning: its penalty by hand and by a plain loop, and a task whose best policy is known."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from points import EPISODES, Killed, mean_return, share_of_the_best, train_on_walks

from tap.data.windows import Layout, Normalizer, fit_normalizer
from tap.methods.squashed_policy import CqlPolicy
from tap.methods.transitions import WINDOWS, Batch
from tap.settings import NetworkParams, Params, RewardParams, TrainCqlParams

pytest.importorskip("torchrl", reason="the extra offline-rl is not installed")
from tap.methods.cql import ConservativeQLearning
from tap.methods.networks import transitions_dict

CPU = torch.device("cpu")


@pytest.fixture
def params(tiny_params: Params) -> TrainCqlParams:
    assert tiny_params.train_cql
    changes = {"updates": 800, "batch_size": 128, "learning_rate": 3e-3, "log_every": 200, "checkpoint_every": 200}
    return TrainCqlParams(
        network=NetworkParams(layers=2, width=32),
        rewards=RewardParams(shift=0, return_range=None),
        discount=0.9,
        target_rate=0.05,
        penalty_weight=1.0,
        sampled_actions=3,
        imitating_updates=100,
        fit=tiny_params.train_cql.fit.model_copy(update=changes),
    )


@pytest.fixture
def train(params: TrainCqlParams, tmp_path: Path) -> Callable[..., CqlPolicy]:
    return lambda *arguments: train_on_walks(params, CqlPolicy, ConservativeQLearning, tmp_path, *arguments)


def plane_policy(params: TrainCqlParams) -> CqlPolicy:
    """Of 3 observations and 2 actions between -1 and 1; its Gaussian has the greatest scale, 1."""
    bound = np.ones(7, np.float32)
    policy = CqlPolicy(params, Layout(3, 2), Normalizer(0 * bound, bound, -bound, bound))
    with torch.no_grad():
        policy.network[-1].weight[2:] = 0
        policy.network[-1].bias[2:] = 20
    return policy


def random_batch(rows: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    observation, following = torch.randn(2, rows, 3, generator=generator)
    action = 2 * torch.rand(rows, 2, generator=generator) - 1
    return Batch(observation, action, torch.randn(rows, generator=generator), following, torch.zeros(rows, dtype=torch.bool))


def test_the_penalty_is_that_of_a_plain_loop(params: TrainCqlParams) -> None:
    torch.manual_seed(0)
    policy, batch = plane_policy(params), random_batch(4)
    learning = ConservativeQLearning(policy, CPU)
    actions = transitions_dict(batch, policy.squash(batch.action_BA))
    torch.manual_seed(1)
    sampled = learning.losses.sampled_actions(actions)[0].double().numpy()
    weights = [tensor.detach().double().numpy() for tensor in learning.losses.qvalue_network_params.parameters()]

    def q(network: int, *inputs: np.ndarray) -> float:
        value = np.concatenate(inputs)
        for place in (0, 2, 4):
            value = weights[place][network] @ value + weights[place + 1][network]
            value = np.maximum(value, 0) if place < 4 else value
        return float(value[0])

    def density(state: torch.Tensor, action: np.ndarray) -> float:
        location = policy.network(state)[:2].tanh().detach().double().numpy()
        return float(np.prod(np.exp(-((action - location) ** 2) / 2) / math.sqrt(2 * math.pi)))

    expected = 0.0
    for row in range(4):
        state, following = batch.observation_BO[row], batch.next_observation_BO[row]
        recorded = policy.squash(batch.action_BA)[row].double().numpy()
        for network in (0, 1):
            total = 0.0
            for place, action in enumerate(sampled[row]):
                drawn_with = 0.25 if place < 3 else density(state if place < 6 else following, action)
                total += math.exp(q(network, state.double().numpy(), action)) / drawn_with
            expected += math.log(total / 9) - q(network, state.double().numpy(), recorded)
    learning.losses.q_loss(actions)
    torch.manual_seed(1)
    assert learning.losses.cql_loss(actions)[0].item() == pytest.approx(expected, rel=1e-4)


def test_the_penalty_of_a_critic_that_knows_nothing_is_the_volume_of_the_actions(params: TrainCqlParams) -> None:
    """ln of the integral of exp(Q) over a square of side 2 is Q + 2 ln 2, if actions are drawn inside it.

    Of a standard Gaussian's samples, P(|a| > 1) are clipped to a bound, of density p(1): they add P / p to each side's 2.
    """
    torch.manual_seed(0)
    policy = plane_policy(params.model_copy(update={"sampled_actions": 20_000, "penalty_weight": 5.0}))
    learning = ConservativeQLearning(policy, CPU)
    with torch.no_grad():
        policy.network[-1].weight[:2] = policy.network[-1].bias[:2] = 0
        for parameter in learning.losses.qvalue_network_params.parameters():
            parameter.zero_()
        parameter.fill_(3.0)  # the last bias
    side = 2 + math.erfc(1 / math.sqrt(2)) / (math.exp(-0.5) / math.sqrt(2 * math.pi))
    penalty = learning.loss(random_batch(4), training=False)["penalty"].item()
    assert penalty == pytest.approx(5.0 * 2 * math.log((2**2 + 2 * side**2) / 3), rel=0.01)


def test_a_critic_that_knows_the_returns_has_no_loss(params: TrainCqlParams) -> None:
    """Rewards of 1 for ever are worth 1 / (1 - discount), whatever the actor's entropy is worth."""
    torch.manual_seed(0)
    learning, batch = ConservativeQLearning(plane_policy(params), CPU), random_batch(64)
    batch = Batch(batch.observation_BO, batch.action_BA, torch.ones(64), batch.next_observation_BO, batch.terminated_B)
    with torch.no_grad():
        for parameter in learning.losses.qvalue_network_params.parameters():
            parameter.zero_()
        parameter.fill_(1 / (1 - params.discount))  # the last bias
        learning.losses.target_qvalue_network_params.update_(learning.losses.qvalue_network_params)
    assert learning.loss(batch, training=False)["q_loss"].item() == pytest.approx(0, abs=1e-9)


def test_the_actor_imitates_first(params: TrainCqlParams) -> None:
    """A critic that values the right highly draws the actor there, though the recorded actions are on the left."""
    torch.manual_seed(0)
    policy = plane_policy(params.model_copy(update={"imitating_updates": 2}))
    learning, batch = ConservativeQLearning(policy, CPU), random_batch(64)
    batch = Batch(
        batch.observation_BO, torch.full((64, 2), -0.9), batch.reward_B, batch.next_observation_BO, batch.terminated_B
    )
    with torch.no_grad():  # Q = 10 (the sum of both actions + 3), where ReLUs change nothing
        for parameter in learning.losses.qvalue_network_params.parameters():
            parameter.zero_()
        weights_in, bias_in, weights_hidden, _, weights_out, _ = learning.losses.qvalue_network_params.parameters()
        weights_in[:, 0, 3:], bias_in[:, 0], weights_hidden[:, 0, 0], weights_out[:, 0, 0] = 1, 3, 1, 10
    pulls = []
    for _ in range(4):
        losses = learning.loss(batch, training=True)
        (gradient,) = torch.autograd.grad(losses["actor_loss"], policy.network[-1].bias)
        pulls.append(-gradient[:2].sum().item())
    assert max(pulls[:2]) < 0 < min(pulls[2:])
    assert learning.updates == 4
    learning.loss(batch, training=False)
    assert learning.updates == 4


def test_it_finds_the_best_policy_in_random_walks(train: Callable[..., CqlPolicy]) -> None:
    assert mean_return(train().act) > share_of_the_best(0.8)


def test_training_is_deterministic_and_resumes(train: Callable[..., CqlPolicy]) -> None:
    expected = train("whole.pt").state_dict()
    with pytest.raises(Killed):
        train("killed.pt", 500)
    resumed = train("killed.pt").state_dict()
    for name, weight in expected.items():
        assert torch.equal(weight, resumed[name]), name


def test_a_saved_policy_acts_the_same(params: TrainCqlParams, tmp_path: Path) -> None:
    policy = CqlPolicy(params, Layout(1, 1), fit_normalizer(EPISODES, WINDOWS))
    folder, observations = tmp_path / "policy", EPISODES.observations[:5]
    policy.save(folder)
    assert {file.name for file in folder.iterdir()} == {"cql.json", "cql.safetensors"}
    np.testing.assert_array_equal(CqlPolicy.load(folder).act(observations, []), policy.act(observations, []))
