"""The actor: its loss by hand, each member's part of a batch, what it learns of noisy actions, and its files."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tap.data.windows import Layout
from tap.model.actor import LINEAR_BEYOND, Actor, load_actor, member_shares, save_actor
from tap.settings import Params, TrainActorParams

LAYOUT = Layout(observation_dim=2, action_dim=1)


@pytest.fixture
def actor(tiny_params: Params) -> Actor:
    torch.manual_seed(0)
    return Actor(tiny_params.train_actor, LAYOUT)


def member(actor: Actor, index: int, observations: np.ndarray) -> np.ndarray:
    """One member's actions, layer by layer in numpy."""
    x = observations
    for layer, (weight, bias) in enumerate(zip(actor.weights, actor.biases, strict=True)):
        x = x if layer == 0 else np.maximum(x, 0)
        x = x @ weight[index].detach().numpy() + bias.detach().numpy().reshape(len(weight), -1)[index]
    return x


def test_the_action_is_the_mean_of_plain_networks(actor: Actor) -> None:
    observations = np.random.default_rng(0).normal(size=(5, 2)).astype(np.float32)
    for bias in actor.biases:
        torch.nn.init.normal_(bias)
    expected = np.mean([member(actor, index, observations) for index in range(actor.params.members)], axis=0)
    np.testing.assert_allclose(actor(torch.from_numpy(observations)).detach().numpy(), expected, rtol=1e-5, atol=1e-6)


def test_each_member_is_trained_on_its_part_of_the_batch(actor: Actor) -> None:
    """With Huber's loss: quadratic up to the limit, linear beyond."""
    rng = np.random.default_rng(1)
    observations, actions = rng.normal(size=(6, 2)).astype(np.float32), rng.normal(size=(6, 1)).astype(np.float32) * 2
    found = actor.loss(torch.from_numpy(observations), torch.from_numpy(actions))["loss"].detach()
    errors = np.abs(np.concatenate([member(actor, g, observations[3 * g : 3 * g + 3]) for g in (0, 1)]) - actions)
    assert (errors < LINEAR_BEYOND).any() and (errors > LINEAR_BEYOND).any()
    by_hand = np.where(errors < LINEAR_BEYOND, errors**2 / 2, LINEAR_BEYOND * (errors - LINEAR_BEYOND / 2))
    assert float(found) == pytest.approx(by_hand.mean(), rel=1e-5)

    errors = np.abs(np.mean([member(actor, g, observations) for g in (0, 1)], axis=0) - actions)
    by_hand = np.where(errors < LINEAR_BEYOND, errors**2 / 2, LINEAR_BEYOND * (errors - LINEAR_BEYOND / 2))
    held_out = actor.held_out_loss(torch.from_numpy(observations), torch.from_numpy(actions))["loss"].detach()
    assert float(held_out) == pytest.approx(by_hand.mean(), rel=1e-5)


def test_noise_that_a_bound_cuts_off_moves_the_action_less_than_the_mean(tiny_params: Params) -> None:
    """Meant is 0.9 of a bound of 1, with noise of 0.4: the recorded actions' mean is 0.78, their median is what was meant."""
    generator = torch.Generator().manual_seed(0)
    actions = (0.9 + 0.4 * torch.randn(4000, 1, generator=generator)).clamp(-1, 1)
    observations, mean, std = torch.ones(4000, 2), actions.mean(), actions.std()
    assert float(mean) == pytest.approx(0.78, abs=0.02)
    torch.manual_seed(0)
    actor = Actor(tiny_params.train_actor, LAYOUT)
    optimizer = torch.optim.Adam(actor.parameters(), 0.01)
    for _ in range(300):
        optimizer.zero_grad()
        actor.loss(observations, (actions - mean) / std)["loss"].backward()
        optimizer.step()
    learned = float((actor(observations[:1]) * std + mean).detach())
    assert float(mean) + 0.03 < learned < 0.92


def test_files_give_the_same_actor(actor: Actor, tmp_path: Path) -> None:
    save_actor(tmp_path, actor)
    states = torch.from_numpy(np.random.default_rng(0).normal(size=(3, 2)).astype(np.float32))
    assert torch.equal(load_actor(tmp_path, LAYOUT, torch.device("cpu"))(states), actor(states))


def test_the_batch_must_be_divisible_among_the_members(tiny_params: Params) -> None:
    with pytest.raises(ValueError, match="batch_size 16 is not a multiple of members 3"):
        TrainActorParams.model_validate(tiny_params.train_actor.model_dump() | {"members": 3})


def test_processes_share_each_members_part() -> None:
    """Of 12 rows for three members, the first of two processes gets the first half of each member's four."""
    shared = member_shares(torch.arange(12), members=3, processes=2)
    assert shared.view(2, 3, 2).tolist() == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10, 11]]]
    assert member_shares(torch.arange(12), members=3, processes=1).tolist() == list(range(12))
    with pytest.raises(ValueError, match="batch_size 12 is not a multiple of 3 members times 8 processes"):
        member_shares(torch.arange(12), members=3, processes=8)
