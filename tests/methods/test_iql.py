"""Implicit Q-learning: its losses by hand, and a task whose best policy is known."""

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT
from points import EPISODES, Killed, mean_return, share_of_the_best, train_on_walks

from pipelines.stages import train_methods
from tap.data.windows import Layout, fit_normalizer
from tap.methods.squashed_policy import IqlPolicy
from tap.methods.transitions import WINDOWS, Batch
from tap.settings import NetworkParams, Params, RewardParams, TrainIqlParams

pytest.importorskip("torchrl", reason="the extra offline-rl is not installed")
from tap.methods.iql import ImplicitQLearning

CPU = torch.device("cpu")


@pytest.fixture
def params(tiny_params: Params) -> TrainIqlParams:
    assert tiny_params.train_iql
    changes = {"updates": 800, "batch_size": 128, "learning_rate": 3e-3, "log_every": 200, "checkpoint_every": 200}
    return TrainIqlParams(
        network=NetworkParams(layers=2, width=32),
        rewards=RewardParams(shift=0, return_range=None),
        discount=0.9,
        expectile=0.7,
        temperature=3.0,
        target_rate=0.05,
        fit=tiny_params.train_iql.fit.model_copy(update=changes),
    )


@pytest.fixture
def policy(params: TrainIqlParams) -> IqlPolicy:
    torch.manual_seed(0)
    return IqlPolicy(params, Layout(1, 1), fit_normalizer(EPISODES, WINDOWS))


@pytest.fixture
def at_once(params: TrainIqlParams) -> IqlPolicy:
    """A policy whose targets equal Q after every update."""
    return IqlPolicy(params.model_copy(update={"target_rate": 1.0}), Layout(1, 1), fit_normalizer(EPISODES, WINDOWS))


@pytest.fixture
def train(params: TrainIqlParams, tmp_path: Path) -> Callable[..., IqlPolicy]:
    return lambda *arguments: train_on_walks(params, IqlPolicy, ImplicitQLearning, tmp_path, *arguments)


def constant(network: torch.nn.Module, *outputs: float) -> None:
    """Make a network's outputs independent of its inputs. A stack of networks gets one output each."""
    with torch.no_grad():
        *others, bias = network.parameters()
        for parameter in others:
            parameter.zero_()
        bias.copy_(torch.tensor(outputs).reshape(bias.shape))


@pytest.mark.parametrize(("value", "value_loss"), [(1.0, 0.7 * 1**2), (4.0, 0.3 * 2**2)])
def test_the_losses_are_those_computed_by_hand(at_once: IqlPolicy, value: float, value_loss: float) -> None:
    """Targets equal Q: 2 and 5, so the smaller is 2; the actor's Gaussian has location 0 and scale 1."""
    learning = ImplicitQLearning(at_once, CPU)
    losses = learning.losses
    constant(losses.qvalue_network_params, 2.0, 5.0)
    constant(losses.value_network_params, value)
    constant(at_once.network, 0.0, 0.0)
    squashed = np.array([0.5, -0.2])
    actions = at_once.centre_A + at_once.half_A * torch.tensor(squashed, dtype=torch.float32)[:, None]
    batch = Batch(torch.zeros(2, 1), actions, torch.tensor([1.0, -1.0]), torch.ones(2, 1), torch.tensor([False, True]))
    found = {name: loss.item() for name, loss in learning.loss(batch, training=True).items()}
    targets = np.array([1 + 0.9 * value, -1.0])
    assert found["q_loss"] == pytest.approx(np.mean((2 - targets) ** 2 + (5 - targets) ** 2), rel=1e-5)
    assert found["value_loss"] == pytest.approx(value_loss, rel=1e-5)
    density = -(squashed**2) / 2 - math.log(math.sqrt(2 * math.pi))
    assert found["actor_loss"] == pytest.approx(np.mean(-math.exp(3.0 * (2 - value)) * density), rel=1e-4)
    assert found["loss"] == pytest.approx(found["q_loss"] + found["value_loss"] + found["actor_loss"], rel=1e-5)


def test_an_actors_weight_is_at_most_100(at_once: IqlPolicy) -> None:
    learning = ImplicitQLearning(at_once, CPU)
    constant(learning.losses.qvalue_network_params, 50.0, 50.0)
    constant(learning.losses.value_network_params, 0.0)
    constant(at_once.network, 0.0, 0.0)
    batch = Batch(
        torch.zeros(1, 1), at_once.centre_A[None], torch.zeros(1), torch.zeros(1, 1), torch.zeros(1, dtype=torch.bool)
    )
    loss = learning.loss(batch, training=True)["actor_loss"].item()
    assert loss == pytest.approx(100 * math.log(math.sqrt(2 * math.pi)), rel=1e-4)


def test_without_advantages_the_actor_acts_as_clipped_actions_do_in_the_mean(at_once: IqlPolicy) -> None:
    """A third of them are at a bound. Their mean is 0.48; the mode of a squashed Gaussian would be 0.78."""
    learning = ImplicitQLearning(at_once, CPU)
    constant(learning.losses.qvalue_network_params, 0.0, 0.0)
    constant(learning.losses.value_network_params, 0.0)
    squashed_B1 = (0.6 + 0.8 * torch.randn(512, 1, generator=torch.Generator().manual_seed(0))).clamp(-0.99, 0.99)
    ends_B = torch.zeros(512, dtype=torch.bool)
    actions_B1 = at_once.centre_A + at_once.half_A * squashed_B1
    batch = Batch(torch.zeros(512, 1), actions_B1, torch.zeros(512), torch.zeros(512, 1), ends_B)
    optimizer = torch.optim.Adam(at_once.network.parameters(), 3e-3)
    for _ in range(400):
        optimizer.zero_grad()
        learning.loss(batch, training=True)["actor_loss"].backward()
        optimizer.step()
    acts = at_once.squash(at_once(torch.zeros(1, 1))).item()
    assert acts == pytest.approx(squashed_B1.mean().item(), abs=0.03)


def test_targets_follow_in_training_and_not_in_measuring(policy: IqlPolicy) -> None:
    learning = ImplicitQLearning(policy, CPU)
    target = next(learning.losses.target_qvalue_network_params.buffers())
    source = next(learning.losses.qvalue_network_params.parameters())
    before = target.clone()
    assert torch.equal(before, source)
    with torch.no_grad():
        source += 1
    transitions = Batch(*(torch.zeros(3, 1),) * 2, torch.zeros(3), torch.zeros(3, 1), torch.zeros(3, dtype=torch.bool))
    learning.loss(transitions, training=False)
    assert torch.equal(target, before)
    learning.loss(transitions, training=True)
    torch.testing.assert_close(target, 0.95 * before + 0.05 * source.detach())


def test_it_finds_the_best_policy_in_random_walks(train: Callable[..., IqlPolicy]) -> None:
    assert mean_return(train().act) > share_of_the_best(0.8)


def test_training_is_deterministic_and_resumes(train: Callable[..., IqlPolicy]) -> None:
    expected = train("whole.pt").state_dict()
    with pytest.raises(Killed):
        train("killed.pt", 500)
    resumed = train("killed.pt").state_dict()
    for name, weight in expected.items():
        assert torch.equal(weight, resumed[name]), name


def test_actions_stay_within_the_recorded_ones(policy: IqlPolicy) -> None:
    with torch.no_grad():
        policy.network[-1].bias[0] = 100.0
    highest = EPISODES.actions.max()
    assert 0 <= policy.act(np.zeros((1, 1)), [])[0, 0] - highest < 0.011 * highest


def test_a_saved_policy_is_loaded_without_torchrl(policy: IqlPolicy, tmp_path: Path) -> None:
    policy.save(tmp_path / "policy")
    code = (
        "import sys; sys.modules['torchrl'] = sys.modules['tensordict'] = None\n"
        "import numpy as np; from pathlib import Path; from tap.serving.policy import load_policy\n"
        f"print(load_policy(Path({str(tmp_path / 'policy')!r}), 'cpu').act(np.array([[0.3]]), []).item())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert float(done.stdout.splitlines()[-1]) == pytest.approx(policy.act(np.array([[0.3]]), []).item(), rel=1e-5)


def test_without_torchrl_training_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pipelines.stages.train_iql", "tap.methods.iql", "tap.methods.networks"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "tensordict", None)
    with pytest.raises(ValueError, match=r"training iql needs tensordict: run `pip install .*\[offline-rl\]"):
        train_methods.run("any", 0, "iql")
