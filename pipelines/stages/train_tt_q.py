"""TT(+Q) for the stage train_methods: a dataset's transitions -> a critic; its episodes -> a Trajectory Transformer.

The critic is trained here, rather than taken from `iql`: it learns from the rewards that the Transformer predicts.
"""

from typing import ClassVar

from torch import Tensor

from pipelines.stages.params import TrainMethodStage
from pipelines.stages.train_tt import initial_policy, train_model
from pipelines.stages.training import DATA, Job, training_job
from tap.data.windows import fit_normalizer
from tap.methods.implicit_values import ImplicitValues
from tap.methods.trajectory_transformer_q import TrajectoryTransformerQ
from tap.methods.transitions import WINDOWS, Transitions, reward_scale
from tap.settings import RewardParams, TrainTtQParams


class TrainTtQStage(TrainMethodStage):
    stage: ClassVar[str] = "train_tt-q"
    params: TrainTtQParams


def run(dataset: str, seed: int) -> None:
    stage = TrainTtQStage.read(dataset)
    with training_job(stage, dataset, seed, None, {}) as job:
        policy = initial_policy(job, stage.params, TrajectoryTransformerQ)
        losses = train_critic(job, policy)
        train_model(job, policy, measure=lambda: losses)


def train_critic(job: Job, policy: TrajectoryTransformerQ) -> dict[str, float]:
    """Train the policy's critic, which stays as it is from then on, and return its last losses."""
    params, windows = policy.params.critic, policy.params.windows
    rewards = RewardParams(shift=0, return_range=params.return_range)
    normalizer, scale = fit_normalizer(job.training, WINDOWS), reward_scale(job.training, rewards)
    training, held_out = (
        Transitions(episodes, normalizer, rewards, scale, job.device, DATA, windows.termination_penalty)
        for episodes in (job.training, job.held_out)
    )
    policy.q.set_units(normalizer, scale)
    learner = ImplicitValues(policy.q, params, policy.layout, windows.discount).to(job.device)

    def loss(indices: Tensor, is_held_out: bool) -> dict[str, Tensor]:
        return learner.loss((held_out if is_held_out else training).batch(indices), training=not is_held_out)

    history = job.train(learner, loss, params.fit, len(held_out), training.sampler(params.fit.effective_share), part="critic")
    policy.q.requires_grad_(False)
    return {name: value for name, value in history[-1][1].items() if name in ("q_loss", "value_loss")}
