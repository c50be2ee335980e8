"""The Trajectory Transformer's policy: what it trains on, its files, and params that do not fit."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import random_episodes
from torch import Tensor

from tap.data.sampling import WindowSampler
from tap.data.windows import Layout, Windows, fit_normalizer
from tap.methods.discretizer import Discretizer
from tap.methods.trajectory_transformer import TrajectoryTransformer
from tap.serving.policy import load_policy
from tap.settings import Params, TrainTtParams, load_params
from tap.training import fit

CPU = torch.device("cpu")
EPISODES = random_episodes([30, 3, 40], observation_dim=3, action_dim=2)


class Killed(Exception):
    pass


@pytest.fixture
def params(tiny_params: Params) -> TrainTtParams:
    assert tiny_params.train_tt
    return tiny_params.train_tt


@pytest.fixture
def windows(params: TrainTtParams) -> Windows:
    return Windows(EPISODES, params.windows, fit_normalizer(EPISODES, params.windows), CPU)


@pytest.fixture
def policy(params: TrainTtParams, windows: Windows) -> TrajectoryTransformer:
    torch.manual_seed(0)
    policy = TrajectoryTransformer(params, Layout(3, 2), fit_normalizer(EPISODES, params.windows))
    policy.discretizer = Discretizer.fit(windows.transitions_NX, params.bins, params.binning)
    with torch.no_grad():
        policy.model.heads_XKE.mul_(30)
    return policy.eval()


def generators(count: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in range(count)]


def test_the_loss_weighs_actions_and_leaves_out_what_follows_an_episode(
    policy: TrajectoryTransformer, windows: Windows
) -> None:
    tokens_BTF, valid_BT = windows.gather(torch.tensor([0, 28, 30]))  # episodes of 30, 3 and 40 steps
    assert valid_BT.sum(dim=1).tolist() == [5, 2, 3]
    raw_BTX = tokens_BTF[..., :7]
    rows = np.concatenate([EPISODES.observations, EPISODES.actions], axis=1)
    np.testing.assert_allclose(raw_BTX[2, :3, :5], rows[30:33], rtol=1e-6)
    log_probs = policy.model.log_probabilities(policy.discretizer.tokens(raw_BTX))
    log_probs[..., 3:5] *= 5
    expected = -log_probs[valid_BT].sum() / (10 * 7 - 3)
    torch.testing.assert_close(policy.loss(raw_BTX, valid_BT)["loss"], expected)


@pytest.fixture
def train(
    params: TrainTtParams, windows: Windows, policy: TrajectoryTransformer, tmp_path: Path
) -> Callable[..., dict[str, Tensor]]:
    start = {name: value.clone() for name, value in policy.state_dict().items()}

    def run(checkpoint: str, stop_at: int | None = None) -> dict[str, Tensor]:
        """The weights that the stage's training ends with; raises Killed at update `stop_at`."""
        policy.load_state_dict(start)
        policy.train()
        calls = 0

        def loss(rows: Tensor, is_held_out: bool) -> dict[str, Tensor]:
            nonlocal calls
            calls += 1
            if calls == stop_at:
                raise Killed
            tokens_BTF, valid_BT = windows.gather(rows)
            return policy.loss(tokens_BTF[..., :7], valid_BT)

        fit(
            policy, loss, params.fit, sample=WindowSampler(EPISODES.lengths), num_held_out=0, seed=0, device=CPU,
            checkpoint=tmp_path / checkpoint, log=lambda *_: None, description="test",
        )  # fmt: skip
        return {name: value.clone() for name, value in policy.state_dict().items()}

    return run


def test_training_is_deterministic_and_resumes(train: Callable[..., dict[str, Tensor]], policy: TrajectoryTransformer) -> None:
    discretizer = {name: value.clone() for name, value in policy.discretizer.state_dict().items()}
    expected, again = train("whole.pt"), train("again.pt")
    with pytest.raises(Killed):
        train("killed.pt", stop_at=15)
    resumed = train("killed.pt")
    for name, weight in expected.items():
        assert torch.equal(weight, again[name]) and torch.equal(weight, resumed[name]), name
    for name, value in discretizer.items():  # averaged weights leave the bins as they are
        assert torch.equal(value, expected[f"discretizer.{name}"])


def test_a_saved_policy_plans_the_same_and_holds_no_pickle(policy: TrajectoryTransformer, tmp_path: Path) -> None:
    folder = tmp_path / "policy"
    policy.save(folder)
    assert {file.name for file in folder.iterdir()} == {"tt.json", "tt.safetensors"}
    loaded, observations = load_policy(folder, "cpu"), EPISODES.observations[:4]
    assert isinstance(loaded, TrajectoryTransformer)
    expected, plan = policy.plan(observations, generators(4)), loaded.plan(observations, generators(4))
    assert plan.actions.shape == (4, 3, 2) and plan.observations.shape == (4, 3, 3)
    for name in ("actions", "observations", "rewards", "returns_to_go", "predicted_return"):
        np.testing.assert_array_equal(getattr(plan, name), getattr(expected, name))
    np.testing.assert_array_equal(loaded.act(observations, generators(4)), plan.actions[:, 0])


def test_a_plans_actions_are_bins_of_the_data(policy: TrajectoryTransformer) -> None:
    plan = policy.plan(EPISODES.observations[:2], generators(2))
    for dimension in range(2):
        assert set(plan.actions[..., dimension].flat) <= set(policy.discretizer.values_XK[3 + dimension].tolist())


def test_wrong_observations_are_refused_and_far_ones_named(policy: TrajectoryTransformer) -> None:
    with pytest.raises(ValueError, match=r"this policy needs \(n, 3\)"):
        policy.plan(np.zeros((2, 4)), generators(2))
    observations = EPISODES.observations[:2].copy()
    observations[1, 2] = 1e4
    near, far = policy.ood_reasons(observations, policy.plan(observations, generators(2)))
    assert near == {} and far["state"].startswith("observation[2] is 1e+04, far outside the training data")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"windows": {"length": 3}, "search": {"context": 3}}, "train_tt: search.context 3 leaves no room"),
        ({"windows": {"normalize": True}}, "train_tt: windows.normalize has no effect"),
    ],
)
def test_params_that_do_not_fit_are_refused(
    params_yaml_with: Callable[..., Path], overrides: dict[str, dict[str, int]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load_params(params_yaml_with(datasets={"hopper-tiny": {"train_tt": overrides}}), "hopper-tiny")


def test_every_scale_and_suite_has_params(params_yaml_with: Callable[..., Path]) -> None:
    for scale in ("cpu", "paper"):
        for dataset in ("hopper-medium-v2", "pen-human-v0", "antmaze-umaze-v0"):
            params = load_params(params_yaml_with(dataset), dataset, scale=scale).train_tt
            assert params and params.search.expansion_factor == 2 and params.windows.discount < 1
