"""Behaviour cloning against a policy that is known."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from pipelines.stages.train_bc import WINDOWS
from tap.data.episodes import Episodes, Selection
from tap.data.sampling import WindowSampler
from tap.data.windows import Layout, Windows, fit_normalizer
from tap.methods.behaviour_cloning import BehaviourCloning, best_episodes
from tap.settings import NetworkParams, Params, TrainBcParams
from tap.training import fit

GAINS = np.array([[0.5, -0.2, 0.01], [0.1, 0.3, -0.02]])  # (A, O)
MEAN, STD = np.array([1.0, -20.0, 300.0]), np.array([0.1, 1.0, 30.0])  # of observations


class Killed(Exception):
    pass


def linear_episodes(rows: int = 2000, seed: int = 0) -> Episodes:
    """Two episodes of the policy action = GAINS @ observation + 0.5."""
    observations = np.random.default_rng(seed).normal(MEAN, STD, (rows, 3))
    actions = observations @ GAINS.T + 0.5
    return Episodes(
        observations.astype(np.float32),
        actions.astype(np.float32),
        np.zeros(rows, np.float32),
        np.zeros(rows, bool),
        np.array([0, rows // 2, rows]),
    )


@pytest.fixture
def params(tiny_params: Params) -> TrainBcParams:
    changes = {"updates": 1500, "batch_size": 64, "learning_rate": 3e-3, "warmup_updates": 50, "log_every": 500}
    changed = tiny_params.train_bc.fit.model_copy(update=changes | {"checkpoint_every": 500})
    return TrainBcParams(network=NetworkParams(layers=2, width=32), fit=changed)


@pytest.fixture
def train(params: TrainBcParams, tmp_path: Path) -> Callable[..., BehaviourCloning]:
    def run(checkpoint: str = "checkpoint.pt", stop_at: int | None = None) -> BehaviourCloning:
        """What the stage trains; raises Killed at update `stop_at`."""
        episodes, device, calls = linear_episodes(), torch.device("cpu"), 0
        normalizer = fit_normalizer(episodes, WINDOWS)
        steps, layout = Windows(episodes, WINDOWS, normalizer, device).transitions_NX, Layout(3, 2)
        torch.manual_seed(0)
        policy = BehaviourCloning(params, layout, normalizer)

        def loss(rows: Tensor, is_held_out: bool) -> dict[str, Tensor]:
            nonlocal calls
            calls += 1
            if calls == stop_at:
                raise Killed
            return policy.loss(steps[rows][:, layout.observation], steps[rows][:, layout.action])

        fit(
            policy, loss, params.fit, sample=WindowSampler(np.array([len(steps)])), num_held_out=0, seed=0, device=device,
            checkpoint=tmp_path / checkpoint, log=lambda *_: None, description="test",
        )  # fmt: skip
        return policy

    return run


def test_it_learns_a_linear_policy(train: Callable[..., BehaviourCloning]) -> None:
    unseen = linear_episodes(seed=1)
    actions = train().act(unseen.observations, [])
    errors = np.square(actions - unseen.actions).mean(axis=0)
    assert (errors < 1e-3 * unseen.actions.var(axis=0)).all()


def test_the_loss_is_the_mean_squared_error_of_normalised_actions(params: TrainBcParams) -> None:
    episodes = linear_episodes()
    policy = BehaviourCloning(params, Layout(3, 2), fit_normalizer(episodes, WINDOWS))
    observed = (episodes.observations - episodes.observations.mean(0)) / episodes.observations.std(0)
    normal = (episodes.actions - episodes.actions.mean(0)) / episodes.actions.std(0)
    loss = policy.loss(torch.from_numpy(observed), torch.from_numpy(normal))["loss"]
    wrong = policy.act(episodes.observations, []) - episodes.actions
    assert loss.item() == pytest.approx(np.square(wrong / episodes.actions.std(0)).mean(), rel=1e-4)


def test_training_is_deterministic_and_resumes(train: Callable[..., BehaviourCloning]) -> None:
    expected = train("whole.pt").state_dict()
    again = train("again.pt").state_dict()
    with pytest.raises(Killed):
        train("killed.pt", stop_at=1200)
    resumed = train("killed.pt").state_dict()
    for name, weight in expected.items():
        assert torch.equal(weight, again[name]) and torch.equal(weight, resumed[name]), name


@pytest.fixture
def policy(params: TrainBcParams) -> BehaviourCloning:
    torch.manual_seed(0)
    return BehaviourCloning(params, Layout(3, 2), fit_normalizer(linear_episodes(), WINDOWS)).eval()


def test_a_saved_policy_acts_the_same_and_holds_no_pickle(policy: BehaviourCloning, tmp_path: Path) -> None:
    folder = tmp_path / "policy"
    policy.save(folder)
    assert {file.name for file in folder.iterdir()} == {"bc.json", "bc.safetensors"}
    loaded, observations = BehaviourCloning.load(folder), linear_episodes().observations[:5]
    np.testing.assert_array_equal(loaded.act(observations, []), policy.act(observations, []))
    assert (loaded.observation_dim, loaded.action_dim) == (3, 2)


def test_an_action_depends_on_its_own_observation(policy: BehaviourCloning) -> None:
    observations = linear_episodes().observations[:7]
    alone = np.concatenate([policy.act(observation[None], []) for observation in observations])
    np.testing.assert_allclose(policy.act(observations, []), alone, rtol=1e-5)
    assert policy.plan(observations, []).actions.shape == (7, 1, 2)


def test_wrong_observations_are_refused_and_far_ones_named(policy: BehaviourCloning) -> None:
    with pytest.raises(ValueError, match=r"this policy needs \(n, 3\)"):
        policy.plan(np.zeros((2, 4)), [])
    with pytest.raises(ValueError, match="NaN"):
        policy.plan(np.full((1, 3), np.nan), [])
    observations = np.stack([MEAN, MEAN + np.array([0, 0, 1000])])
    near, far = policy.ood_reasons(observations, policy.plan(observations, []))
    assert near == {} and far["state"].startswith("observation[2] is 1300, far outside the training data")


def test_the_best_episodes_are_those_of_the_highest_returns_that_have_the_share_of_the_steps() -> None:
    lengths, returns = np.array([4, 2, 3, 1, 10, 20]), np.array([5.0, 9.0, 9.0, 7.0, -1.0, 99.0])
    offsets, rewards = np.concatenate([[0], np.cumsum(lengths)]), np.zeros(lengths.sum(), np.float32)
    rewards[offsets[:-1]] = returns
    nothing = np.zeros((lengths.sum(), 1), np.float32)
    episodes = Episodes(nothing, nothing, rewards, np.zeros(lengths.sum(), bool), offsets)
    some = Selection(episodes, np.arange(5))  # of 20 steps; the episode with the return 99 is another one
    for share, best in (
        (0.05, [1]),  # at least one, though it has 2 steps of 1
        (0.1, [1]),
        (0.24, [1]),  # 4.8 steps: the 3 of the next one do not fit, and no worse one takes their place
        (0.25, [1, 2]),  # the two returns of 9, in the file's order
        (0.3, [1, 2, 3]),
        (0.5, [0, 1, 2, 3]),
        (1.0, [0, 1, 2, 3, 4]),
    ):
        assert best_episodes(some, share).indices.tolist() == best
    assert best_episodes(Selection(episodes, np.arange(0)), 0.1).indices.tolist() == []


def test_missing_weights_are_explained(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="train first"):
        BehaviourCloning.load(tmp_path)
