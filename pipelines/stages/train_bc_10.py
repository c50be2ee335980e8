"""10 %-BC for the stage train_methods: behaviour cloning of the episodes with the highest returns.

Chen et al. 2021, "Decision Transformer", section 5.1: of those that together have a tenth of the steps.
"""

from dataclasses import replace
from typing import ClassVar

from pipelines.stages.params import TrainMethodStage
from pipelines.stages.train_bc import imitate
from pipelines.stages.training import training_job
from tap.methods.behaviour_cloning import best_episodes
from tap.settings import TrainBcParams

SHARE = 0.1  # of the steps


class TrainBc10Stage(TrainMethodStage):
    stage: ClassVar[str] = "train_bc-10"
    params: TrainBcParams


def run(dataset: str, seed: int) -> None:
    stage = TrainBc10Stage.read(dataset)
    with training_job(stage, dataset, seed, None, {}) as job:
        best = replace(job, training=best_episodes(job.training, SHARE), held_out=best_episodes(job.held_out, SHARE))
        imitate(best, stage.params)
