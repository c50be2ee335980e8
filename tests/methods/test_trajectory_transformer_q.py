"""TT(+Q): a task that needs the best parts of several episodes, its files, and params that do not fit."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT, random_episodes
from points import Killed

from pipelines.stages import train_tt_q
from pipelines.stages.train_tt import initial_policy, train_model
from pipelines.stages.train_tt_q import train_critic
from pipelines.stages.training import Job
from tap.data.episodes import Episodes, Selection
from tap.data.windows import Layout, fit_normalizer
from tap.methods.discretizer import Discretizer
from tap.methods.implicit_values import ImplicitValues
from tap.methods.trajectory_planner import TrajectoryPlanner
from tap.methods.trajectory_transformer import TrajectoryTransformer
from tap.methods.trajectory_transformer_q import TrajectoryTransformerQ
from tap.serving.policy import load_policy
from tap.settings import Params, TrainTtQParams, load_params

CPU, DISCOUNT, EXPECTILE = torch.device("cpu"), 0.9, 0.9
NOISE = random_episodes([30, 3, 40], observation_dim=3, action_dim=2)


def generators(count: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in range(count)]


def stitched(count: int = 60) -> Episodes:
    """Of three kinds, as many each. Action -1 at place 0 pays 0.3 and ends; 1 leads to place 1, where 1 pays 1 and -1 nothing.

    No episode takes both steps to the best reward: those from 0 fail at 1, and those that succeed there begin there.
    """
    kinds = [[(0, -1, 0.3)], [(0, 1, 0.0), (1, -1, 0.0)], [(1, 1, 1.0)]]
    episodes = [rows for _ in range(count) for rows in kinds]
    observations, actions, rewards = np.array([row for rows in episodes for row in rows], np.float32).T
    offsets = np.cumsum([0, *map(len, episodes)])
    terminals = np.zeros(len(rewards), bool)
    terminals[offsets[1:] - 1] = True
    return Episodes(observations[:, None], actions[:, None], rewards, terminals, offsets)


@pytest.fixture
def params(tiny_params: Params) -> TrainTtQParams:
    """For `stitched`: one step is planned. Values are learned from rewards five times as large."""
    assert tiny_params.train_tt_q
    tree: Any = tiny_params.train_tt_q.model_dump()
    tree["windows"] |= {"length": 2, "discount": DISCOUNT, "bootstrap_truncated": False, "termination_penalty": None}
    tree["search"] |= {"horizon": 1, "context": 1, "beam_width": 16, "cdf": 0.0}
    tree["transformer"] |= {"width": 32, "dropout": 0.0}
    fit = {"effective_share": 1.0, "batch_size": 64, "learning_rate": 3e-3, "log_every": 50, "checkpoint_every": 50}
    tree["fit"] |= fit | {"updates": 150}
    critic = {"network": {"layers": 2, "width": 32}, "return_range": 5.0, "expectile": EXPECTILE, "target_rate": 0.05}
    tree["critic"] |= critic | {"fit": tree["critic"]["fit"] | fit | {"updates": 600}}
    return TrainTtQParams.model_validate(tree)


def job_of(params: TrainTtQParams, folder: Path, episodes: Episodes) -> Job:
    every, none = Selection(episodes, np.arange(len(episodes.lengths))), Selection(episodes, np.arange(0))
    return Job("train_test", "stitched-0", 0, params.fit, every, none, CPU, None, folder / "checkpoint.pt", "")


@pytest.fixture
def train(params: TrainTtQParams, tmp_path: Path) -> Callable[..., TrajectoryTransformerQ]:
    def run(folder: str = "whole") -> TrajectoryTransformerQ:
        """The policy that the stage trains."""
        job = job_of(params, tmp_path / folder, stitched())
        policy = initial_policy(job, params, TrajectoryTransformerQ)
        train_critic(job, policy)
        train_model(job, policy)
        return policy

    return run


def test_it_combines_the_best_steps_of_two_episodes_where_returns_of_the_data_mislead(
    train: Callable[..., TrajectoryTransformerQ],
) -> None:
    """Q(0, 1) is the discounted expectile of the values 0 and 1 that follow equally often; each return that followed was 0."""
    policy, start = train(), np.zeros((1, 1))
    places, actions = torch.tensor([[0.0], [0.0], [1.0], [1.0]]), torch.tensor([[-1.0], [1.0], [-1.0], [1.0]])
    with torch.no_grad():
        values = policy.q(places, actions)
    np.testing.assert_allclose(values, [0.3, DISCOUNT * EXPECTILE, 0, 1], atol=0.03)
    plan = policy.plan(start, generators(1))
    assert plan.actions.tolist() == [[[1]]]
    np.testing.assert_allclose(plan.predicted_return, DISCOUNT * EXPECTILE, atol=0.03)
    without = TrajectoryPlanner(policy.model, policy.discretizer, policy.layout, DISCOUNT, policy.params.search)
    plan = without.plan(torch.zeros(1, 1), generators(1))
    assert plan.actions.tolist() == [[[-1]]]
    np.testing.assert_allclose(plan.predicted_return, 0.3, atol=0.03)


def test_the_critic_learns_from_the_rewards_that_the_model_predicts(params: TrainTtQParams, tmp_path: Path) -> None:
    """With the penalty for the end of an episode, in units of reward."""
    windows = params.windows.model_copy(update={"termination_penalty": -2.0})
    params = params.model_copy(update={"windows": windows})
    job = job_of(params, tmp_path, stitched())
    policy = initial_policy(job, params, TrajectoryTransformerQ)
    train_critic(job, policy)
    with torch.no_grad():
        values = policy.q(torch.tensor([[0.0], [0.0], [1.0]]), torch.tensor([[-1.0], [1.0], [1.0]]))
    np.testing.assert_allclose(values, [-2, -2 * DISCOUNT, -2], atol=0.05)


def test_its_model_is_that_of_tt(params: TrainTtQParams, train: Callable[..., TrajectoryTransformerQ], tmp_path: Path) -> None:
    """To the bit, so that scores differ by the critic alone."""
    job = job_of(params, tmp_path / "tt", stitched())
    expected = initial_policy(job, params, TrajectoryTransformer)
    train_model(job, expected)
    found = train().state_dict()
    for name, weight in expected.state_dict().items():
        assert torch.equal(found[name], weight), name


@pytest.mark.parametrize("update", [320, 700])  # of the critic, of the model
def test_training_resumes_after_a_kill(
    train: Callable[..., TrajectoryTransformerQ], monkeypatch: pytest.MonkeyPatch, update: int
) -> None:
    expected, updates = train().state_dict(), 0

    def killed_at_update(loss: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **keywords: Any) -> Any:
            nonlocal updates
            updates += 1
            if updates == update:
                raise Killed
            return loss(*arguments, **keywords)

        return counted

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(ImplicitValues, "loss", killed_at_update(ImplicitValues.loss))
        patch.setattr(TrajectoryTransformer, "loss", killed_at_update(TrajectoryTransformer.loss))
        train("killed")
    resumed = train("killed").state_dict()
    for name, weight in expected.items():
        assert torch.equal(weight, resumed[name]), name


def test_minutes_are_those_of_critic_and_model(params: TrainTtQParams, tmp_path: Path) -> None:
    job = job_of(params, tmp_path, stitched())
    policy = initial_policy(job, params, TrajectoryTransformerQ)
    losses = train_critic(job, policy)
    of_critic = job.minutes
    train_model(job, policy)
    assert of_critic and job.minutes and job.minutes > of_critic > 0
    assert losses.keys() == {"q_loss", "value_loss"}


def test_a_saved_policy_plans_the_same_without_torchrl(tiny_params: Params, tmp_path: Path) -> None:
    params, observations = tiny_params.train_tt_q, NOISE.observations[:4]
    assert params
    torch.manual_seed(0)
    policy = TrajectoryTransformerQ(params, Layout(3, 2), fit_normalizer(NOISE, params.windows)).eval()
    rows = np.concatenate([NOISE.observations, NOISE.actions, NOISE.rewards[:, None], NOISE.rewards[:, None]], axis=1)
    policy.discretizer = Discretizer.fit(torch.from_numpy(rows), params.bins, params.binning)
    policy.q.set_units(fit_normalizer(NOISE, train_tt_q.WINDOWS), scale=3.0)
    folder = tmp_path / "policy"
    policy.save(folder)
    assert {file.name for file in folder.iterdir()} == {"tt-q.json", "tt-q.safetensors"}
    loaded = load_policy(folder, "cpu")
    assert isinstance(loaded, TrajectoryTransformerQ)
    for name, value in policy.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    expected, plan = policy.plan(observations, generators(4)), loaded.plan(observations, generators(4))
    for name, array in vars(expected).items():
        np.testing.assert_array_equal(getattr(plan, name), array, err_msg=name)

    np.save(tmp_path / "observations.npy", observations)
    code = (
        "import sys; sys.modules['torchrl'] = sys.modules['tensordict'] = None\n"
        "import numpy as np, torch; from pathlib import Path; from tap.serving.policy import load_policy\n"
        f"folder = Path({str(tmp_path)!r}); policy = load_policy(folder / 'policy', 'cpu')\n"
        "generators = [torch.Generator().manual_seed(seed) for seed in range(4)]\n"
        "np.save(folder / 'actions.npy', policy.act(np.load(folder / 'observations.npy'), generators))"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    np.testing.assert_array_equal(np.load(tmp_path / "actions.npy"), expected.actions[:, 0])


def test_episodes_held_out_of_one_part_only_are_refused(params_yaml_with: Callable[..., Path]) -> None:
    overrides = {"train_tt_q": {"critic": {"fit": {"held_out": 0.2}}}}
    with pytest.raises(ValueError, match=r"train_tt_q: critic.fit.held_out 0.2 is not fit.held_out 0.1: set both to one value"):
        load_params(params_yaml_with(datasets={"hopper-tiny": overrides}), "hopper-tiny")
