"""Implicit Q-learning for the stage train_methods: a dataset's transitions -> an actor, by critics that are not kept."""

from typing import ClassVar

import torch
from torch import Tensor

from pipelines.stages.params import TrainMethodStage
from pipelines.stages.training import DATA, training_job
from tap.data.windows import Layout, fit_normalizer
from tap.methods.actor import IqlPolicy
from tap.methods.iql import ImplicitQLearning
from tap.methods.transitions import WINDOWS, Transitions, reward_scale
from tap.settings import TrainIqlParams


class TrainIqlStage(TrainMethodStage):
    stage: ClassVar[str] = "train_iql"
    params: TrainIqlParams


def run(dataset: str, seed: int) -> None:
    stage = TrainIqlStage.read(dataset)
    with training_job(stage, dataset, seed, None, {}) as job:
        params, normalizer = stage.params, fit_normalizer(job.training, WINDOWS)
        scale = reward_scale(job.training, params.rewards)
        training = Transitions(job.training, normalizer, params.rewards, scale, job.device, DATA)
        held_out = Transitions(job.held_out, normalizer, params.rewards, scale, job.device, DATA)
        layout = Layout(job.training.observation_dim, job.training.action_dim)
        torch.manual_seed(seed)
        policy = IqlPolicy(params, layout, normalizer).to(job.device)
        learning = ImplicitQLearning(policy, job.device)

        def loss(indices: Tensor, is_held_out: bool) -> dict[str, Tensor]:
            return learning.loss((held_out if is_held_out else training).batch(indices), update_targets=not is_held_out)

        job.fit(learning, loss, len(held_out), policy.save, sample=training.sample)
