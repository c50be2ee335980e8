"""Conservative Q-learning for the stage train_methods: a dataset's transitions -> an actor, by critics that are not kept."""

from typing import ClassVar

from pipelines.stages.params import TrainMethodStage
from pipelines.stages.train_actor_critic import train_actor_critic
from pipelines.stages.training import training_job
from tap.methods.cql import ConservativeQLearning
from tap.methods.squashed_policy import CqlPolicy
from tap.settings import TrainCqlParams


class TrainCqlStage(TrainMethodStage):
    stage: ClassVar[str] = "train_cql"
    params: TrainCqlParams


def run(dataset: str, seed: int) -> None:
    stage = TrainCqlStage.read(dataset)
    with training_job(stage, dataset, seed, None, {}) as job:
        train_actor_critic(job, stage.params, CqlPolicy, ConservativeQLearning)
