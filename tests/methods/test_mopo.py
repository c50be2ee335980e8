"""MOPO: its losses by hand, what it trains on, and a task whose best policy is known."""

from pathlib import Path

import numpy as np
import pytest
import torch
from points import EPISODES, Killed, mean_return, share_of_the_best, walks_job

from tap.data.windows import Layout, fit_normalizer
from tap.methods.dynamics import DynamicsEnsemble
from tap.methods.squashed_policy import MopoPolicy
from tap.methods.transitions import WINDOWS, Batch, Transitions
from tap.settings import DynamicsParams, NetworkParams, Params, RewardParams, TrainMopoParams

pytest.importorskip("torchrl", reason="the extra offline-rl is not installed")
from pipelines.stages.train_mopo import one_step_errors, optimize
from tap.methods.mopo import ModelBasedOptimization

CPU = torch.device("cpu")


@pytest.fixture
def params(tiny_params: Params) -> TrainMopoParams:
    assert tiny_params.train_mopo
    changes = {"updates": 600, "batch_size": 128, "learning_rate": 3e-3, "log_every": 200, "checkpoint_every": 200}
    return TrainMopoParams(
        network=NetworkParams(layers=2, width=32),
        rewards=RewardParams(shift=0, return_range=None),
        discount=0.9,
        target_rate=0.05,
        dynamics=DynamicsParams(
            network=NetworkParams(layers=2, width=32),
            members=3,
            elites=2,
            beta=0.5,
            updates=400,
            learning_rate=3e-3,
            weight_decay=0,
        ),
        horizon=3,
        penalty_weight=1.0,
        real_share=0.25,
        kept_updates=50,
        fit=tiny_params.train_mopo.fit.model_copy(update=changes),
    )


@pytest.fixture
def walks(params: TrainMopoParams) -> Transitions:
    return Transitions(
        EPISODES.split(0, np.random.default_rng(0))[0], fit_normalizer(EPISODES, WINDOWS), params.rewards, 1, CPU
    )


@pytest.fixture
def learning(params: TrainMopoParams, walks: Transitions) -> ModelBasedOptimization:
    """Of an untrained model."""
    torch.manual_seed(0)
    policy = MopoPolicy(params, Layout(1, 1), walks.normalizer)
    return ModelBasedOptimization(policy, DynamicsEnsemble(params.dynamics, walks, CPU), 1, CPU)


def constant_q(losses: torch.nn.Module, *outputs: float) -> None:
    with torch.no_grad():
        *others, bias = losses.qvalue_network_params.parameters()
        for parameter in others:
            parameter.zero_()
        bias.copy_(torch.tensor(outputs).reshape(bias.shape))


def test_the_losses_are_those_computed_by_hand(params: TrainMopoParams, walks: Transitions) -> None:
    """Targets equal Q: 2 and 5, so the smaller is 2, and entropy has no weight; the second transition is an episode's last."""
    policy = MopoPolicy(params.model_copy(update={"target_rate": 1.0}), Layout(1, 1), walks.normalizer)
    learning = ModelBasedOptimization(policy, DynamicsEnsemble(params.dynamics, walks, CPU), 1, CPU)
    constant_q(learning.losses, 2.0, 5.0)
    learning._targets.step()
    with torch.no_grad():
        learning.losses.log_alpha.fill_(-50.0)
    batch = Batch(
        torch.zeros(2, 1), torch.zeros(2, 1), torch.tensor([1.0, -1.0]), torch.ones(2, 1), torch.tensor([False, True])
    )
    found = {name: loss.item() for name, loss in learning.loss(batch, training=False).items()}
    targets = np.array([1 + 0.9 * 2, -1.0])
    assert found["q_loss"] == pytest.approx(np.mean((2 - targets) ** 2 + (5 - targets) ** 2), rel=1e-5)
    assert found["actor_loss"] == pytest.approx(-2, rel=1e-5)
    assert found["loss"] == pytest.approx(found["q_loss"] + found["actor_loss"] + found["entropy_loss"], rel=1e-5)
    assert "penalty" not in found


def test_a_batch_is_recorded_transitions_and_those_of_rollouts(learning: ModelBasedOptimization, walks: Transitions) -> None:
    recorded, seen = walks.batch(torch.arange(128)), []
    learning.losses.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].clone()))
    found = learning.loss(recorded, training=True)
    (batch,) = seen
    torch.testing.assert_close(batch["observation"][:32], recorded.observation_BO[:32])
    torch.testing.assert_close(batch["next", "reward"][:32, 0], recorded.reward_B[:32])
    kept = learning.rollouts.kept_UBC[0]
    drawn = torch.cat([batch["observation"], batch["next", "reward"], batch["next", "observation"]], dim=1)[32:]
    assert len(drawn) == 96
    assert all(any(torch.equal(row, each[[0, 2, 3]]) for each in kept) for row in drawn)
    torch.testing.assert_close(kept[:, 0], recorded.observation_BO[:, 0])  # where the rollouts start

    learning.loss(recorded, training=False)
    torch.testing.assert_close(seen[1]["observation"], recorded.observation_BO)
    assert learning.rollouts.updates == 1
    assert found["penalty"] > 0


@pytest.mark.parametrize("reward_scale", [1.0, 4.0])
def test_rewards_are_lowered_by_the_uncertainty_in_raw_units(
    params: TrainMopoParams, walks: Transitions, reward_scale: float
) -> None:
    """Scaled as rewards are, so that a scale changes the units of all alike."""
    params = params.model_copy(update={"penalty_weight": 3.0})
    scaled = Transitions(walks_job(params.fit, Path()).training, walks.normalizer, params.rewards, reward_scale, CPU)
    dynamics = DynamicsEnsemble(params.dynamics, scaled, CPU)
    learning = ModelBasedOptimization(MopoPolicy(params, Layout(1, 1), walks.normalizer), dynamics, reward_scale, CPU)
    recorded = scaled.batch(torch.arange(128))
    penalty = learning.loss(recorded, training=True)["penalty"].item()
    kept = learning.rollouts.kept_UBC[0]
    _, std_EBT, _ = dynamics.predict(kept[:, :1], kept[:, 1:2])
    raw = std_EBT.numpy() * np.array([walks.normalizer.std[0], 1 / reward_scale])
    expected = 3 * reward_scale * np.sqrt((raw**2).sum(axis=2)).max(axis=0)
    assert penalty == pytest.approx(expected.mean(), rel=1e-5)


def test_it_finds_the_best_policy_in_random_walks(params: TrainMopoParams, tmp_path: Path) -> None:
    policy = optimize(walks_job(params.fit, tmp_path / "checkpoint.pt"), params)
    assert mean_return(policy.act) > share_of_the_best(0.8)


@pytest.mark.parametrize(("module", "calls"), [(DynamicsEnsemble, 30), (ModelBasedOptimization, 50)])
def test_training_is_deterministic_and_resumes(
    params: TrainMopoParams, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: type[torch.nn.Module], calls: int
) -> None:
    """A run is killed while it trains the model, or the actor in it."""
    few = {"updates": 60, "log_every": 20, "checkpoint_every": 20}
    dynamics, fit = params.dynamics.model_copy(update={"updates": 40}), params.fit.model_copy(update=few)
    params = params.model_copy(update={"dynamics": dynamics, "fit": fit, "kept_updates": 20})

    def train(folder: str) -> dict[str, torch.Tensor]:
        return optimize(walks_job(fit, tmp_path / folder / "checkpoint.pt"), params).state_dict()

    expected = train("whole")
    loss, left = module.loss, iter(range(calls))

    def killing(*arguments: object, **named: object) -> object:
        if next(left, None) is None:
            raise Killed
        return loss(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(module, "loss", killing)
        with pytest.raises(Killed):
            train("killed")
    assert (tmp_path / "killed/checkpoint.pt").exists() == (module is ModelBasedOptimization)
    resumed = train("killed")
    for name, weight in expected.items():
        assert torch.equal(weight, resumed[name]), name


def test_errors_of_a_model_that_predicts_no_change(params: TrainMopoParams, walks: Transitions) -> None:
    """Its targets' mean is then that of the recorded changes, which is nearly 0 here."""
    dynamics = DynamicsEnsemble(params.dynamics, walks, CPU)
    with torch.no_grad():
        for parameter in (*dynamics.weights, *dynamics.biases):
            parameter.zero_()
    found = one_step_errors(dynamics, walks)
    places = EPISODES.observations[:, 0].reshape(-1, 20)
    changes = np.diff(places, axis=1) / places.std()
    assert found["no_change_error"] == pytest.approx(np.sqrt((changes**2).mean()), rel=1e-4)
    assert found["one_step_error"] == pytest.approx(changes.std(), rel=1e-4)
    assert found["uncertainty_rank_correlation"] == 0


def test_a_saved_policy_acts_the_same(params: TrainMopoParams, tmp_path: Path) -> None:
    policy = MopoPolicy(params, Layout(1, 1), fit_normalizer(EPISODES, WINDOWS))
    folder, observations = tmp_path / "policy", EPISODES.observations[:5]
    policy.save(folder)
    assert {file.name for file in folder.iterdir()} == {"mopo.json", "mopo.safetensors"}
    np.testing.assert_array_equal(MopoPolicy.load(folder).act(observations, []), policy.act(observations, []))
