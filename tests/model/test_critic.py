from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import tap.model.critic
from tap.model.critic import Critic, load_critic, sample_episodes, save_critic
from tap.planning.policy import Policy
from tap.settings import Params
from tap.training import make_optimizer


@pytest.fixture
def critic(tiny_policy: Policy, tiny_params: Params) -> Critic:
    torch.manual_seed(1)
    critic = Critic(tiny_params.train_critic, tiny_policy.vqvae).eval()
    with torch.no_grad():
        for bias in critic.biases:
            bias.normal_()
    return critic


def batch(windows: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    observations = torch.randn(windows, 11, generator=generator)
    return observations, torch.randint(8, (windows,), generator=generator), torch.randn(windows, generator=generator)


def by_hand(critic: Critic, policy: Policy, observation_O: Tensor, code: int) -> list[float]:
    """Each member's value of one state and code, in numpy and one layer after another."""
    vectors = policy.vqvae.codebook.vectors_KD.double().numpy()
    found = []
    for member in range(critic.params.members):
        x = np.concatenate([observation_O.double().numpy(), vectors[code] / vectors.std(ddof=1)])
        for layer, (weight, bias) in enumerate(zip(critic.weights, critic.biases, strict=True)):
            x = np.maximum(x, 0) if layer else x
            x = x @ weight[member].detach().double().numpy() + bias.view(critic.params.members, -1)[member].detach().numpy()
        found.append(float(x[0]))
    return found


def test_each_member_is_an_mlp_of_state_and_code_vector(critic: Critic, tiny_policy: Policy) -> None:
    observations, codes, _ = batch(4)
    expected = np.array([by_hand(critic, tiny_policy, o, int(k)) for o, k in zip(observations, codes, strict=True)]).T
    assert len(expected) == 5 and len(np.unique(expected)) == 20
    np.testing.assert_allclose(critic(observations, codes).detach(), expected, rtol=1e-4, atol=1e-5)


def test_values_are_the_members_mean_for_each_states_codes(
    critic: Critic, tiny_policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    observations, _, _ = batch(5)
    codes = torch.randint(8, (5, 3), generator=torch.Generator().manual_seed(1))
    expected = [
        [np.mean(by_hand(critic, tiny_policy, o, int(code))) for code in row]
        for o, row in zip(observations, codes, strict=True)
    ]
    for at_once in (512, 6, 1):  # all in one part, two states at a time, one
        monkeypatch.setattr(tap.model.critic, "VALUED_AT_ONCE", at_once)
        np.testing.assert_allclose(critic.values(observations, codes).detach(), expected, rtol=1e-4, atol=1e-5)


def test_the_loss_by_hand(critic: Critic, tiny_policy: Policy) -> None:
    observations, codes, returns = batch(6)
    seen = torch.rand(5, 6, generator=torch.Generator().manual_seed(2)) < 0.5
    errors = [
        (by_hand(critic, tiny_policy, observations[b], int(codes[b]))[member] - float(returns[b])) ** 2
        for member, b in seen.nonzero().tolist()
    ]
    assert 0 < len(errors) < 30
    assert critic.loss(observations, codes, returns, seen)["loss"].item() == pytest.approx(np.mean(errors), rel=1e-4)


def test_a_member_learns_from_its_own_episodes_only(critic: Critic) -> None:
    observations, codes, returns = batch(6)
    seen = torch.ones(5, 6, dtype=torch.bool)
    seen[3] = False
    critic.loss(observations, codes, returns, seen)["loss"].backward()
    for weight in critic.weights:
        assert weight.grad is not None and not weight.grad[3].any()
        assert all(weight.grad[member].any() for member in (0, 1, 2, 4))


def test_each_member_is_trained_on_its_share_of_episodes(tiny_params: Params) -> None:
    seen = sample_episodes(tiny_params.train_critic, 20, torch.Generator().manual_seed(0))
    assert seen.sum(dim=1).tolist() == [14] * 5 and len(seen.unique(dim=0)) == 5
    assert sample_episodes(tiny_params.train_critic, 1, torch.Generator().manual_seed(0)).all()


def test_weight_decay_leaves_biases_out(critic: Critic, tiny_params: Params) -> None:
    decayed, others = make_optimizer(critic, tiny_params.train_critic.fit).param_groups
    assert {id(p) for p in decayed["params"]} == {id(p) for p in critic.weights} and decayed["weight_decay"] == 0.01
    assert {id(p) for p in others["params"]} == {id(p) for p in critic.biases} and others["weight_decay"] == 0


def test_a_known_value_is_learned(critic: Critic) -> None:
    """Returns of a table of codes times a function of the state, with noise: the critic finds the mean."""
    generator = torch.Generator().manual_seed(0)
    table_K = torch.linspace(-1, 1, 8)
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2)
    for _ in range(400):
        observations = torch.randn(256, 11, generator=generator)
        codes = torch.randint(8, (256,), generator=generator)
        returns = table_K[codes] * observations[:, 0].sign() + 0.5 * torch.randn(256, generator=generator)
        optimizer.zero_grad()
        critic.loss(observations, codes, returns, torch.ones(5, 256, dtype=torch.bool))["loss"].backward()
        optimizer.step()
    observations = torch.randn(200, 11, generator=generator)
    observations[:, 0] = torch.where(observations[:, 0] < 0, -1.0, 1.0)
    error = critic.values(observations, torch.arange(8).expand(len(observations), 8)) - table_K * observations[:, :1].sign()
    assert error.square().mean().sqrt().item() < 0.2  # a constant errs by 0.65


def test_a_saved_critic_is_the_same(critic: Critic, tiny_policy: Policy, tmp_path: Path) -> None:
    critic.held_out_error = 12.5
    save_critic(tmp_path, critic)
    loaded = load_critic(tmp_path, tiny_policy.vqvae, torch.device("cpu"))
    observations, _, _ = batch(3)
    codes = torch.arange(8).expand(len(observations), 8)
    torch.testing.assert_close(loaded.values(observations, codes), critic.values(observations, codes), rtol=0, atol=0)
    assert loaded.held_out_error == 12.5 and loaded.params == critic.params and not loaded.training
    with pytest.raises(ValueError, match=r"critic\.json does not exist: train first"):
        load_critic(tmp_path / "none", tiny_policy.vqvae, torch.device("cpu"))
