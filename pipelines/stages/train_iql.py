"""Implicit Q-learning for the stage train_methods: a dataset's transitions -> an actor, by critics that are not kept."""

from typing import ClassVar

from pipelines.stages.params import TrainMethodStage
from pipelines.stages.train_actor_critic import train_actor_critic
from pipelines.stages.training import training_job
from tap.methods.iql import ImplicitQLearning
from tap.methods.squashed_policy import IqlPolicy
from tap.settings import TrainIqlParams


class TrainIqlStage(TrainMethodStage):
    stage: ClassVar[str] = "train_iql"
    params: TrainIqlParams


def run(dataset: str, seed: int) -> None:
    stage = TrainIqlStage.read(dataset)
    with training_job(stage, dataset, seed, None, {}) as job:
        train_actor_critic(job, stage.params, IqlPolicy, ImplicitQLearning)
