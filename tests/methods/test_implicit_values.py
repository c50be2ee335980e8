"""The critics of TT(+Q): their losses by hand and against torchrl's, and values that are known."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tap.data.windows import Layout, Normalizer
from tap.methods.implicit_values import ImplicitValues
from tap.methods.transitions import Batch
from tap.methods.twin_q import TwinQ
from tap.settings import CriticParams, NetworkParams, Params

CPU, LAYOUT, DISCOUNT = torch.device("cpu"), Layout(3, 2), 0.9


@pytest.fixture
def params(tiny_params: Params) -> CriticParams:
    assert tiny_params.train_tt_q
    changes = {"network": NetworkParams(layers=2, width=16), "expectile": 0.7, "target_rate": 0.05}
    return tiny_params.train_tt_q.critic.model_copy(update=changes)


@pytest.fixture
def values(params: CriticParams) -> ImplicitValues:
    torch.manual_seed(0)
    return ImplicitValues(TwinQ(params.network, LAYOUT), params, LAYOUT, DISCOUNT)


def random_batch(count: int) -> Batch:
    generator = torch.Generator().manual_seed(1)
    sizes = (count, 3), (count, 2), (count,), (count, 3)
    return Batch(*(torch.randn(size, generator=generator) for size in sizes), torch.arange(count) % 3 == 0)


def constant(network: Any, output: float) -> None:
    """Make a network's output independent of its inputs."""
    for parameter in network.parameters():
        nn.init.zeros_(parameter)
    nn.init.constant_(network[-1].bias, output)


@pytest.mark.parametrize(("value", "value_loss"), [(1.0, 0.7 * 1**2), (4.0, 0.3 * 2**2)])
def test_the_losses_are_those_computed_by_hand(values: ImplicitValues, value: float, value_loss: float) -> None:
    """Q is 2 and 5, and its targets 2 and 3, so the lower is 2. The second transition ends its episode."""
    for networks, outputs in ((values.q.networks, (2.0, 5.0)), (values.targets, (3.0, 2.0))):
        for network, output in zip(networks, outputs, strict=True):
            constant(network, output)
    constant(values.value, value)
    batch = Batch(
        torch.zeros(2, 3), torch.zeros(2, 2), torch.tensor([1.0, -1.0]), torch.ones(2, 3), torch.tensor([False, True])
    )
    found = {name: loss.item() for name, loss in values.loss(batch, training=False).items()}
    targets = np.array([1 + DISCOUNT * value, -1.0])
    assert found["q_loss"] == pytest.approx(np.mean((2 - targets) ** 2 + (5 - targets) ** 2), rel=1e-5)
    assert found["value_loss"] == pytest.approx(value_loss, rel=1e-5)
    assert found["loss"] == pytest.approx(found["q_loss"] + found["value_loss"], rel=1e-5)


def test_losses_and_gradients_are_torchrls(values: ImplicitValues, params: CriticParams) -> None:
    pytest.importorskip("torchrl", reason="the extra offline-rl is not installed")
    from tensordict import TensorDict
    from tensordict.nn import NormalParamExtractor, ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential
    from tensordict.nn import TensorDictModule as Module
    from torchrl.modules import TanhNormal, ValueOperator
    from torchrl.objectives import IQLLoss

    actor = ProbabilisticTensorDictSequential(
        Module(nn.Sequential(nn.Linear(3, 4), NormalParamExtractor()), ["observation"], ["loc", "scale"]),
        ProbabilisticTensorDictModule(["loc", "scale"], ["action"], distribution_class=TanhNormal),
    )
    q = [
        ValueOperator(Inputs(copy.deepcopy(network)), ["observation", "action"], ["state_action_value"])
        for network in values.q.networks
    ]
    value = ValueOperator(copy.deepcopy(values.value), ["observation"])
    theirs = IQLLoss(actor, q, value, loss_function="l2", expectile=params.expectile)
    theirs.make_value_estimator(gamma=DISCOUNT)
    batch = random_batch(64)
    ends = batch.terminated_B[:, None]
    after = {"observation": batch.next_observation_BO, "reward": batch.reward_B[:, None], "done": ends, "terminated": ends}
    transitions = TensorDict(
        {"observation": batch.observation_BO, "action": batch.action_BA, "next": TensorDict(after, 64)}, 64
    )
    expected = theirs.qvalue_loss(transitions)[0], theirs.value_loss(transitions)[0]
    sum(expected).backward()

    losses = values.loss(batch, training=False)
    losses["loss"].backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close((losses["q_loss"], losses["value_loss"]), expected)
    for ours, their in zip(values.value.parameters(), theirs.value_network_params.values(True, True), strict=True):
        torch.testing.assert_close(ours.grad, their.grad)
    pairs = zip(*(network.parameters() for network in values.q.networks), strict=True)
    for pair, their in zip(pairs, theirs.qvalue_network_params.values(True, True), strict=True):
        torch.testing.assert_close(torch.stack([parameter.grad for parameter in pair]), their.grad)


class Inputs(nn.Module):
    """A network of states and actions side by side."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, observation: torch.Tensor, action: torch.Tensor) -> Any:
        return self.network(torch.cat([observation, action], dim=-1))


def test_targets_follow_in_training_and_not_in_measuring(values: ImplicitValues) -> None:
    target, source = next(values.targets.parameters()), next(values.q.networks.parameters())
    before = target.clone()
    assert torch.equal(before, source)
    with torch.no_grad():
        source += 1
    values.loss(random_batch(3), training=False)
    assert torch.equal(target, before)
    values.loss(random_batch(3), training=True)
    torch.testing.assert_close(target, 0.95 * before + 0.05 * source.detach())


def test_q_is_in_raw_units_and_the_lower_of_two() -> None:
    q = TwinQ(NetworkParams(layers=1, width=8), LAYOUT)
    rng = np.random.default_rng(0)
    mean, std = rng.normal(size=7).astype(np.float32), rng.uniform(1, 3, 7).astype(np.float32)
    q.set_units(Normalizer(mean, std), scale=4.0)
    raw = rng.normal(size=(2, 6, 5)).astype(np.float32)
    normal = torch.from_numpy((raw - mean[:5]) / std[:5])
    expected = np.minimum(*(network(normal)[..., 0].detach().numpy() for network in q.networks)) / 4
    found = q(*torch.from_numpy(raw).split([3, 2], dim=-1))  # type: ignore[no-untyped-call]
    np.testing.assert_allclose(found.detach(), expected, rtol=1e-4, atol=1e-6)
    assert found.shape == (2, 6)
