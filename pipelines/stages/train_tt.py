"""The Trajectory Transformer for the stage train_methods: a dataset's episodes -> bins, and a model of their sequences."""

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from pipelines.stages.params import TrainMethodStage
from pipelines.stages.training import DATA, Job, training_job
from tap.data.windows import Layout, Windows, fit_normalizer
from tap.methods.discretizer import Discretizer
from tap.methods.trajectory_transformer import TrajectoryTransformer
from tap.settings import TrainTtParams

P = TypeVar("P", bound=TrajectoryTransformer)


class TrainTtStage(TrainMethodStage):
    stage: ClassVar[str] = "train_tt"
    params: TrainTtParams


def run(dataset: str, seed: int) -> None:
    stage = TrainTtStage.read(dataset)
    with training_job(stage, dataset, seed, None, {}) as job:
        train_model(job, initial_policy(job, stage.params, TrajectoryTransformer))


def initial_policy(job: Job, params: Any, policy_type: type[P]) -> P:
    """A policy with random weights for the job's data."""
    layout = Layout(job.training.observation_dim, job.training.action_dim)
    torch.manual_seed(job.seed)
    return policy_type(params, layout, fit_normalizer(job.training, params.windows)).to(job.device)


def train_model(job: Job, policy: TrajectoryTransformer, measure: Callable[[], dict[str, float]] = dict) -> None:
    """Fit the policy's bins, and train its model."""
    params = policy.params
    training, held_out = (
        Windows(episodes, params.windows, policy.normalizer, job.device, DATA) for episodes in (job.training, job.held_out)
    )
    policy.discretizer = Discretizer.fit(training.transitions_NX.cpu(), params.bins, params.binning).to(job.device)

    def loss(rows: Tensor, is_held_out: bool) -> dict[str, Tensor]:
        tokens_BTF, valid_BT = (held_out if is_held_out else training).gather(rows)
        return policy.loss(tokens_BTF[..., policy.layout.transition], valid_BT)

    job.fit(policy, loss, len(held_out), policy.save, measure=measure)
