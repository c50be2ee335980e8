"""Actors that critics train, for the stage train_methods: a dataset's transitions -> the actor's policy."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from pipelines.stages.training import DATA, Job
from tap.data.windows import Layout, fit_normalizer
from tap.methods.actor import SquashedPolicy
from tap.methods.transitions import WINDOWS, Transitions, reward_scale

P = TypeVar("P", bound=SquashedPolicy)


def train_actor(job: Job, params: Any, policy_type: type[P], learning: Callable[[P, torch.device], Any]) -> P:
    """Train a policy on the job's transitions.

    `learning` makes a module of actor and critics, whose method `loss` takes a Batch and whether it is for training.
    """
    normalizer, scale = fit_normalizer(job.training, WINDOWS), reward_scale(job.training, params.rewards)
    training, held_out = (
        Transitions(episodes, normalizer, params.rewards, scale, job.device, DATA) for episodes in (job.training, job.held_out)
    )
    torch.manual_seed(job.seed)
    policy = policy_type(params, Layout(job.training.observation_dim, job.training.action_dim), normalizer).to(job.device)
    learner = learning(policy, job.device)

    def loss(indices: Tensor, is_held_out: bool) -> dict[str, Tensor]:
        batch = (held_out if is_held_out else training).batch(indices)
        losses: dict[str, Tensor] = learner.loss(batch, training=not is_held_out)
        return losses

    job.fit(learner, loss, len(held_out), policy.save, sample=training.sample)
    return policy
