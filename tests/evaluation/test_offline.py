"""Offline checks against a plain loop over windows and codes, with a critic that is right by construction and a random one."""

import numpy as np
import pytest
import torch
from conftest import random_episodes

from tap.data.windows import Windows
from tap.evaluation.offline import check, slope
from tap.model.actor import Actor
from tap.model.critic import Critic
from tap.model.vqvae import encode_windows
from tap.planning.policy import Policy
from tap.settings import Params

STARTS = torch.tensor([0, 3, 7, 19, 20, 28])


@pytest.fixture
def windows(tiny_policy: Policy) -> Windows:
    params = tiny_policy.vqvae.params.windows.model_copy(update={"length": 3})
    return Windows(random_episodes([9, 20], 11, 3), params, tiny_policy.normalizer, torch.device("cpu"))


def with_all_models(policy: Policy, params: Params) -> Policy:
    critic = Critic(params.train_critic, policy.vqvae).eval()
    critic.held_out_error = 1.5
    actor = Actor(params.train_actor, policy.vqvae.layout).eval()
    planner = policy.params.model_copy(update={"search": "critic_weighted", "actor": True})
    return Policy(policy.vqvae, policy.normalizer, policy.prior, planner, policy.device, critic, actor)


@torch.no_grad()
def by_hand(policy: Policy, windows: Windows) -> dict[str, np.ndarray]:
    """For each window, with one decoding per code."""
    layout, vqvae, critic = policy.vqvae.layout, policy.vqvae, policy.critic
    std, mean = policy.normalizer.std[layout.return_to_go], policy.normalizer.mean[layout.return_to_go]
    found: dict[str, list[float]] = {name: [] for name in ("own", "mean", "drawn", "actor", "advantage", "rest", "gain")}
    for start in STARTS:
        row = windows.transitions_NX[start]
        state, action = row[None, layout.observation], row[layout.action].numpy()
        own = int(encode_windows(vqvae, windows, start[None])[0, 0])
        codes = range(vqvae.params.codebook.size)
        actions = [vqvae.decode(torch.tensor([[k]]), state)[0].transitions_BTX[0, 0, layout.action].numpy() for k in codes]
        p = np.exp([float(policy.prior.log_probabilities(torch.tensor([[k]]), state)[0, 0]) for k in codes])
        errors = [float(np.square(each - action).sum()) for each in actions]
        found["own"].append(errors[own])
        found["mean"].append(float(np.square(np.average(actions, axis=0, weights=p) - action).sum()))
        found["drawn"].append(float(np.average(errors, weights=p)))
        if policy.actor:
            found["actor"].append(float(np.square(policy.actor(state)[0].numpy() - action).sum()))
        if critic:
            values = np.array([float(critic(state, torch.tensor([k])).mean()) * std + mean for k in codes])
            weights = p * np.exp((values - values.max()) / (policy.params.temperature * critic.held_out_error))
            value = float(np.average(values, weights=p))
            found["advantage"].append(float(values[own]) - value)
            found["rest"].append(float(row[layout.return_to_go]) * std + mean - value)
            found["gain"].append(float(np.average(values, weights=weights)) - value)
    return {name: np.array(values) for name, values in found.items()}


def test_all_measures_by_hand(tiny_policy: Policy, tiny_params: Params, windows: Windows) -> None:
    policy = with_all_models(tiny_policy, tiny_params)
    expected = by_hand(policy, windows)
    variance = float(windows.transitions_NX[STARTS][:, policy.vqvae.layout.action].numpy().var(axis=0).sum())
    found = check(policy, windows, STARTS, held_out=True)
    assert (found.windows, found.held_out) == (6, True)
    for name in ("own_code", "mean", "drawn_code", "actor"):
        error = expected[name.removesuffix("_code")].mean() / variance
        assert getattr(found, f"{name}_error") == pytest.approx(error, rel=1e-4)
    assert found.predicted_gain == pytest.approx(expected["gain"].mean(), rel=1e-3)
    fitted = np.polyfit(expected["advantage"], expected["rest"], 1)[0]
    assert found.advantage_slope == pytest.approx(fitted, rel=1e-3)


def test_a_policy_without_critic_and_actor_has_no_measures_of_them(tiny_policy: Policy, windows: Windows) -> None:
    found = check(tiny_policy, windows, STARTS, held_out=False)
    assert found.predicted_gain is found.advantage_slope is found.advantage_slope_error is found.actor_error is None
    assert found.mean_error == pytest.approx(
        by_hand(tiny_policy, windows)["mean"].mean()
        / float(windows.transitions_NX[STARTS][:, tiny_policy.vqvae.layout.action].numpy().var(axis=0).sum()),
        rel=1e-4,
    )


def test_the_slope_and_its_error_are_those_of_least_squares() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=500)
    y = 0.7 * x + 3 + rng.normal(size=500)
    (fitted, _), covariance = np.polyfit(x, y, 1, cov=True)
    assert slope(x, y) == pytest.approx((fitted, covariance[0, 0] ** 0.5), rel=1e-6)
    assert slope(np.ones(3), np.arange(3.0)) == (0.0, 0.0)
