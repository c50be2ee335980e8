"""The Decision Transformer's policy: memory, returns-to-go, what it learns, its files."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import random_episodes
from torch import Tensor

from tap.data.episodes import Episodes
from tap.data.history import History
from tap.data.sampling import WindowSampler
from tap.data.windows import Layout, Windows, fit_normalizer
from tap.methods.decision_transformer import DecisionTransformer, window_params, with_return_scale
from tap.serving.policy import load_policy
from tap.settings import Params, TrainDtParams, load_params
from tap.training import fit

CPU = torch.device("cpu")
EPISODES = random_episodes([30, 3, 40], observation_dim=3, action_dim=2)


class Killed(Exception):
    pass


@pytest.fixture
def params(tiny_params: Params) -> TrainDtParams:
    assert tiny_params.train_dt
    return tiny_params.train_dt


def make_policy(params: TrainDtParams, episodes: Episodes, target_return: float) -> DecisionTransformer:
    torch.manual_seed(0)
    normalizer = with_return_scale(fit_normalizer(episodes, window_params(params)), params.return_scale)
    policy = DecisionTransformer(params, Layout(episodes.observation_dim, episodes.action_dim), normalizer)
    policy.target_return.fill_(target_return)
    return policy


@pytest.fixture
def policy(params: TrainDtParams) -> DecisionTransformer:
    """With weights so large that everything matters."""
    made = make_policy(params, EPISODES, target_return=5.0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5)
    return made.eval()


def history(steps: int, seed: int = 0) -> History:
    rng = np.random.default_rng(seed)
    return History(rng.normal(size=(steps, 3)), rng.uniform(-1, 1, (steps, 2)), rng.normal(size=steps))


def last(past: History, steps: int) -> History:
    first = len(past.observations) - steps
    return History(past.observations[first:], past.actions[first:], past.rewards)


def test_returns_to_go_and_steps_by_hand(policy: DecisionTransformer) -> None:
    """Of a context of 4 after 5 steps with rewards 1, 2, 4, 8 and 16, asked for 5: what the model is given."""
    given: dict[str, np.ndarray] = {}
    names = "returns", "observations", "actions", "steps"
    policy.model.register_forward_pre_hook(lambda _, inputs: given.update(zip(names, map(np.asarray, inputs), strict=True)))
    past = History(np.arange(15.0).reshape(5, 3), np.arange(10.0).reshape(5, 2), np.array([1.0, 2, 4, 8, 16]))
    policy.act(np.full((1, 3), 99.0), [], [past])
    mean, std = policy.normalizer.mean, policy.normalizer.std
    np.testing.assert_allclose(given["returns"][0] * std[-1] + mean[-1], [5 - 3, 5 - 7, 5 - 15, 5 - 31], rtol=1e-4)
    assert given["steps"].tolist() == [[2, 3, 4, 5]]
    observed = given["observations"][0] * std[:3] + mean[:3]
    np.testing.assert_allclose(observed, [[6, 7, 8], [9, 10, 11], [12, 13, 14], [99, 99, 99]], rtol=1e-4)
    np.testing.assert_allclose(given["actions"][0, :3] * std[3:5] + mean[3:5], [[4, 5], [6, 7], [8, 9]], rtol=1e-4)


def test_a_return_scale_divides_returns(params: TrainDtParams) -> None:
    scaled = make_policy(params.model_copy(update={"return_scale": 1000.0}), EPISODES, 0.0).normalizer
    column = slice(Layout(3, 2).return_to_go, None)
    assert scaled.normalize(torch.tensor([2500.0]), column).tolist() == [2.5]
    unscaled = fit_normalizer(EPISODES, window_params(params))
    np.testing.assert_array_equal(scaled.std[:-1], unscaled.std[:-1])


def test_the_training_windows_returns_are_those_of_acting(params: TrainDtParams, policy: DecisionTransformer) -> None:
    """An episode that is replayed, asked for its own return, gives the model the window that it was trained on."""
    shape, normalizer = window_params(params), policy.normalizer
    windows = Windows(EPISODES, shape, normalizer, CPU)
    first = 33 + 20
    tokens, valid = windows.gather(torch.tensor([first]))
    assert valid.all()
    layout = policy.layout
    with torch.no_grad():
        trained = policy.model(
            tokens[..., layout.return_to_go],
            tokens[..., layout.observation],
            tokens[..., layout.action],
            torch.arange(20, 24)[None],
        )
    rows = slice(33, first + 3)
    past = History(EPISODES.observations[rows], EPISODES.actions[rows], EPISODES.rewards[rows])
    policy.target_return.fill_(EPISODES.returns[2])
    acted = policy.act(EPISODES.observations[first + 3][None], [], [past])
    np.testing.assert_allclose(acted, normalizer.denormalize(trained[:, -1], layout.action).numpy(), rtol=1e-3, atol=1e-4)


def test_the_loss_is_the_mean_squared_error_over_valid_steps(params: TrainDtParams, policy: DecisionTransformer) -> None:
    windows = Windows(EPISODES, window_params(params), policy.normalizer, CPU)
    starts, first = torch.tensor([0, 28, 30]), torch.tensor([0, 28, 0])  # episodes of 30, 3 and 40 steps
    tokens, valid = windows.gather(starts)
    assert valid.sum(dim=1).tolist() == [4, 2, 3]
    layout, squares = policy.layout, []
    for row, count in enumerate(valid.sum(dim=1).tolist()):  # each window alone, without its padding
        window = tokens[row : row + 1, :count]
        parts = window[..., layout.return_to_go], window[..., layout.observation], window[..., layout.action]
        predicted = policy.model(*parts, first[row] + torch.arange(count)[None])
        squares.append((predicted - window[..., layout.action]).square().flatten())
    torch.testing.assert_close(policy.loss(tokens, valid, first)["loss"], torch.cat(squares).mean())


def test_an_action_depends_on_its_own_history_alone(policy: DecisionTransformer) -> None:
    """Rows of a batch, with histories of every length: padding and the other rows do not matter."""
    observations, pasts = EPISODES.observations[:7], [history(steps, seed=steps) for steps in range(7)]
    together = policy.act(observations, [], pasts)
    for row, past in enumerate(pasts):
        alone = policy.act(observations[row : row + 1], [], [past])
        np.testing.assert_allclose(together[row : row + 1], alone, rtol=1e-4, atol=1e-5)
        window = (
            torch.as_tensor(past.observations[-3:].astype(np.float32)),
            torch.as_tensor(past.actions[-3:].astype(np.float32)),
        )
        np.testing.assert_allclose(alone, unpadded(policy, observations[row], past, *window), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(policy.act(observations, [], pasts), together)
    assert not np.allclose(policy.act(observations, [], pasts[::-1]), together)


def unpadded(policy: DecisionTransformer, observation: np.ndarray, past: History, before: Tensor, acted: Tensor) -> np.ndarray:
    """The action by the model on the steps that there are."""
    steps, kept, normalizer, layout = len(past.rewards), len(before), policy.normalizer, policy.layout
    returns = torch.tensor([[5.0 - past.rewards[:t].sum() for t in range(steps - kept, steps + 1)]], dtype=torch.float32)
    seen = torch.cat([before, torch.as_tensor(observation)[None]])[None]
    did = torch.cat([acted, torch.full((1, 2), 7.0)])[None]  # the last is not known yet, and does not matter
    with torch.no_grad():
        predicted = policy.model(
            normalizer.normalize(returns[..., None], slice(layout.return_to_go, None))[..., 0],
            normalizer.normalize(seen, layout.observation),
            normalizer.normalize(did, layout.action),
            torch.arange(steps - kept, steps + 1)[None],
        )
    return normalizer.denormalize(predicted[:, -1], layout.action).numpy()


def test_only_the_context_and_all_rewards_matter(policy: DecisionTransformer) -> None:
    observation, past = EPISODES.observations[:1], history(9)
    expected = policy.act(observation, [], [past])
    np.testing.assert_array_equal(policy.act(observation, [], [last(past, policy.remembered_steps)]), expected)
    older, cheaper = past.observations.copy(), past.rewards.copy()
    older[5] += 1
    np.testing.assert_array_equal(policy.act(observation, [], [History(older, past.actions, past.rewards)]), expected)
    older[6] += 1
    assert not np.allclose(policy.act(observation, [], [History(older, past.actions, past.rewards)]), expected)
    cheaper[0] += 1
    assert not np.allclose(policy.act(observation, [], [History(past.observations, past.actions, cheaper)]), expected)


def test_without_a_history_an_episode_starts(policy: DecisionTransformer) -> None:
    observations = EPISODES.observations[:2]
    starts = [History.empty(3, 2)] * 2
    np.testing.assert_array_equal(policy.act(observations, []), policy.act(observations, [], starts))
    assert policy.plan(observations, []).actions.shape == (2, 1, 2)


def test_wrong_inputs_are_refused_and_far_ones_named(policy: DecisionTransformer) -> None:
    with pytest.raises(ValueError, match=r"this policy needs \(n, 3\)"):
        policy.plan(np.zeros((2, 4)), [])
    with pytest.raises(ValueError, match="there are 0 histories for 2 observations"):
        policy.plan(np.zeros((2, 3)), [], [])
    with pytest.raises(ValueError, match=r"the actions of history 0 have shape \(5, 2, 1\)"):
        policy.plan(np.zeros((1, 3)), [], [History(np.zeros((5, 3)), np.zeros((5, 2, 1)), np.zeros(5))])
    observations = EPISODES.observations[:2].copy()
    observations[1, 2] = 1e4
    near, far = policy.ood_reasons(observations, policy.plan(observations, []))
    assert near == {} and far["state"].startswith("observation[2] is 1e+04, far outside the training data")


@pytest.fixture
def train(params: TrainDtParams, tmp_path: Path) -> Callable[..., DecisionTransformer]:
    def run(
        episodes: Episodes, changes: dict[str, Any] | None = None, checkpoint: str = "checkpoint.pt", stop_at: int | None = None
    ) -> DecisionTransformer:
        """What the stage trains; raises Killed at update `stop_at`."""
        changed = params.model_copy(update={"fit": params.fit.model_copy(update=changes or {})})
        policy, calls = make_policy(changed, episodes, float(episodes.returns.max())), 0
        windows = Windows(episodes, window_params(changed), policy.normalizer, CPU)

        def loss(starts: Tensor, is_held_out: bool) -> dict[str, Tensor]:
            nonlocal calls
            calls += 1
            if calls == stop_at:
                raise Killed
            first = torch.from_numpy(episodes.offsets)[windows.episodes_of(starts)]
            return policy.loss(*windows.gather(starts), starts - first)

        fit(
            policy, loss, changed.fit, sample=WindowSampler(episodes.lengths), num_held_out=0, seed=0, device=CPU,
            checkpoint=tmp_path / checkpoint, log=lambda *_: None, description="test",
        )  # fmt: skip
        return policy

    return run


def test_training_is_deterministic_and_resumes(train: Callable[..., DecisionTransformer]) -> None:
    expected, again = (train(EPISODES, checkpoint=name).state_dict() for name in ("whole.pt", "again.pt"))
    with pytest.raises(Killed):
        train(EPISODES, checkpoint="killed.pt", stop_at=15)
    resumed = train(EPISODES, checkpoint="killed.pt").state_dict()
    for name, weight in expected.items():
        assert torch.equal(weight, again[name]) and torch.equal(weight, resumed[name]), name


STEPS = 6


def good_and_bad_days(episodes: int = 200, seed: int = 0) -> Episodes:
    """All observations alike. One half of the episodes does 1 at each step and earns 1, the other does -1 and earns nothing."""
    rng = np.random.default_rng(seed)
    good = np.repeat(rng.permutation(episodes) % 2 == 0, STEPS)
    observations = rng.normal(size=(len(good), 1)).astype(np.float32)
    actions = np.where(good, 1, -1).astype(np.float32)[:, None]
    offsets = np.arange(episodes + 1) * STEPS
    return Episodes(observations, actions, good.astype(np.float32), np.zeros(len(good), bool), offsets)


def test_it_does_what_the_target_return_asks_for(train: Callable[..., DecisionTransformer]) -> None:
    """Behaviour cloning would do 0, the mean. By the third step, the rewards so far say the same as the target."""
    policy = train(good_and_bad_days(), {"updates": 300, "learning_rate": 3e-3, "log_every": 300, "checkpoint_every": 300})
    observations = np.random.default_rng(1).normal(size=(20, 1))
    assert policy.target_return.item() == STEPS  # the highest return of an episode
    np.testing.assert_allclose(policy.act(observations, []), 1, atol=0.1)
    policy.target_return.fill_(0)
    np.testing.assert_allclose(policy.act(observations, []), -1, atol=0.1)


def test_a_saved_policy_acts_the_same_and_holds_no_pickle(policy: DecisionTransformer, tmp_path: Path) -> None:
    folder = tmp_path / "policy"
    policy.save(folder)
    assert {file.name for file in folder.iterdir()} == {"dt.json", "dt.safetensors"}
    loaded, observations, pasts = load_policy(folder, "cpu"), EPISODES.observations[:4], [history(t) for t in range(4)]
    assert isinstance(loaded, DecisionTransformer) and loaded.target_return == policy.target_return
    act = partial(loaded.act, observations, [])
    np.testing.assert_array_equal(act(pasts), policy.act(observations, [], pasts))
    np.testing.assert_array_equal(act(), policy.act(observations, []))


def test_every_scale_and_suite_has_params(params_yaml_with: Callable[..., Path]) -> None:
    scales = {"hopper-medium-v2": 1000.0, "pen-human-v0": None, "antmaze-umaze-v0": None, "my-robot": None}
    for dataset, return_scale in scales.items():
        load = partial(load_params, params_yaml_with(dataset), dataset)
        cpu, paper = load(scale="cpu").train_dt, load(scale="paper").train_dt
        assert cpu and paper and paper.return_scale == return_scale
        transformer, trained = paper.transformer, paper.fit
        sizes = transformer.layers, transformer.heads, transformer.width, transformer.dropout, paper.context
        assert sizes == (3, 1, 128, 0.1, 20)  # Chen et al. 2021, appendix A.2
        assert (trained.updates, trained.batch_size, trained.learning_rate, trained.clip_norm) == (100_000, 64, 1e-4, 0.25)
