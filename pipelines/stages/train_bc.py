"""Behaviour cloning for the stage train_methods: a dataset's episodes -> a network that imitates their actions."""

from typing import ClassVar

import torch
from torch import Tensor

from pipelines.stages.params import TrainMethodStage
from pipelines.stages.training import DATA, Job, training_job
from tap.data.windows import Layout, Windows, fit_normalizer
from tap.methods.behaviour_cloning import BehaviourCloning
from tap.settings import TrainBcParams, WindowParams

# One step; its reward and return-to-go are not used.
WINDOWS = WindowParams(length=1, discount=1.0, termination_penalty=None, bootstrap_truncated=False, normalize=True)


class TrainBcStage(TrainMethodStage):
    stage: ClassVar[str] = "train_bc"
    params: TrainBcParams


def run(dataset: str, seed: int) -> None:
    stage = TrainBcStage.read(dataset)
    with training_job(stage, dataset, seed, None, {}) as job:
        imitate(job, stage.params)


def imitate(job: Job, params: TrainBcParams) -> None:
    """Train a policy that imitates the job's training episodes."""
    normalizer = fit_normalizer(job.training, WINDOWS)
    training = Windows(job.training, WINDOWS, normalizer, job.device, DATA)
    held_out = Windows(job.held_out, WINDOWS, normalizer, job.device, DATA)
    layout = Layout(job.training.observation_dim, job.training.action_dim)
    torch.manual_seed(job.seed)
    policy = BehaviourCloning(params, layout, normalizer).to(job.device)

    def loss(rows: Tensor, is_held_out: bool) -> dict[str, Tensor]:
        steps_BX = (held_out if is_held_out else training).transitions_NX[rows]
        return policy.loss(steps_BX[:, layout.observation], steps_BX[:, layout.action])

    job.fit(policy, loss, len(held_out), policy.save)
