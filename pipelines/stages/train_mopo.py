"""MOPO for the stage train_methods: a dataset's transitions -> dynamics models -> an actor, which is trained in them."""

from typing import ClassVar

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor

from pipelines.stages.params import TrainMethodStage
from pipelines.stages.train_actor_critic import recorded_transitions, train_actor_critic
from pipelines.stages.training import SPEED, Job, training_job
from tap.methods.dynamics import DynamicsEnsemble
from tap.methods.mopo import ModelBasedOptimization
from tap.methods.squashed_policy import MopoPolicy
from tap.methods.transitions import Transitions
from tap.settings import TrainMopoParams

MEASURED = 20_000  # transitions, spread evenly over all


class TrainMopoStage(TrainMethodStage):
    stage: ClassVar[str] = "train_mopo"
    params: TrainMopoParams


def run(dataset: str, seed: int) -> None:
    stage = TrainMopoStage.read(dataset)
    with training_job(stage, dataset, seed, None, {}) as job:
        optimize(job, stage.params)


def optimize(job: Job, params: TrainMopoParams) -> MopoPolicy:
    """Train dynamics models on the job's transitions, then a policy in them."""
    training, held_out = recorded_transitions(job, params.rewards)
    torch.manual_seed(job.seed)
    dynamics = DynamicsEnsemble(params.dynamics, training, job.device)

    def loss(indices: Tensor, is_held_out: bool) -> dict[str, Tensor]:
        return dynamics.loss((held_out if is_held_out else training).batch(indices))

    fit = params.dynamics_fit
    history = job.train(dynamics, loss, fit, len(held_out), training.sampler(fit.effective_share), part="dynamics")
    fitted = {f"dynamics_{name}": value for name, value in history[-1][1].items() if name != SPEED}
    measured = held_out if len(held_out) else training
    dynamics.choose_elites(measured)

    def learning(policy: MopoPolicy, device: torch.device) -> ModelBasedOptimization:
        return ModelBasedOptimization(policy, dynamics, training.reward_scale, device)

    def measure() -> dict[str, float]:
        return fitted | one_step_errors(dynamics, measured)

    return train_actor_critic(job, params, MopoPolicy, learning, (training, held_out), measure)


@torch.no_grad()
def one_step_errors(dynamics: DynamicsEnsemble, transitions: Transitions) -> dict[str, float]:
    """How well the elites' mean predicts the next normalised state, and whether their uncertainty tells where it does not.

    Errors are RMSEs over all dimensions; beside the model's stands that of the prediction that the state does not change.
    """
    squares, changes, errors, uncertainties = [], [], [], []
    for batch in transitions.batches(MEASURED):
        goes_on_B = ~batch.terminated_B
        mean_KBT, std_KBT, _ = dynamics.predict(batch.observation_BO, batch.action_BA)
        change_BO = batch.next_observation_BO - batch.observation_BO
        error_BO = mean_KBT.mean(dim=0)[:, :-1] - change_BO
        squares.append(error_BO[goes_on_B].square())
        changes.append(change_BO[goes_on_B].square())
        errors.append(torch.linalg.vector_norm(error_BO * dynamics.units_T[:-1], dim=1)[goes_on_B])
        uncertainties.append(dynamics.uncertainty(std_KBT)[goes_on_B])
    error_N, uncertainty_N = (torch.cat(parts).cpu().numpy() for parts in (errors, uncertainties))
    return {
        "one_step_error": float(torch.cat(squares).mean().sqrt()),
        "no_change_error": float(torch.cat(changes).mean().sqrt()),
        # undefined where one of both is constant
        "uncertainty_rank_correlation": float(np.nan_to_num(spearmanr(uncertainty_N, error_N).statistic)),
    }
