"""Actors that critics train, for the stage train_methods: a dataset's transitions -> the actor's policy."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from pipelines.stages.training import DATA, Job
from tap.data.windows import fit_normalizer
from tap.methods.squashed_policy import SquashedPolicy
from tap.methods.transitions import WINDOWS, Transitions, reward_scale
from tap.settings import RewardParams

P = TypeVar("P", bound=SquashedPolicy)


def recorded_transitions(job: Job, rewards: RewardParams) -> tuple[Transitions, Transitions]:
    """Those of the job's training and held-out episodes, in the units of the former."""
    normalizer, scale = fit_normalizer(job.training, WINDOWS), reward_scale(job.training, rewards)
    training, held_out = (
        Transitions(episodes, normalizer, rewards, scale, job.device, DATA) for episodes in (job.training, job.held_out)
    )
    return training, held_out


def train_actor_critic(
    job: Job,
    params: Any,
    policy_type: type[P],
    learning: Callable[[P, torch.device], Any],
    transitions: tuple[Transitions, Transitions] | None = None,
    measure: Callable[[], dict[str, float]] = dict,
) -> P:
    """Train a policy on the job's transitions.

    `learning` makes a module of actor and critics, whose method `loss` takes a Batch and whether it is for training.
    `transitions` are those of `recorded_transitions`, where they were needed before; `measure` is as in `Job.fit`.
    """
    training, held_out = transitions or recorded_transitions(job, params.rewards)
    torch.manual_seed(job.seed)
    policy = policy_type(params, training.layout, training.normalizer).to(job.device)
    learner = learning(policy, job.device)

    def loss(indices: Tensor, is_held_out: bool) -> dict[str, Tensor]:
        batch = (held_out if is_held_out else training).batch(indices)
        losses: dict[str, Tensor] = learner.loss(batch, training=not is_held_out)
        return losses

    job.fit(learner, loss, len(held_out), policy.save, sample=training.sampler(params.fit.effective_share), measure=measure)
    return policy
