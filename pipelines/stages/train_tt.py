"""The Trajectory Transformer for the stage train_methods: a dataset's episodes -> bins, and a model of their sequences."""

from typing import ClassVar

import torch
from torch import Tensor

from pipelines.stages.params import TrainMethodStage
from pipelines.stages.training import DATA, training_job
from tap.data.windows import Layout, Windows, fit_normalizer
from tap.methods.discretizer import Discretizer
from tap.methods.trajectory_transformer import TrajectoryTransformer
from tap.settings import TrainTtParams


class TrainTtStage(TrainMethodStage):
    stage: ClassVar[str] = "train_tt"
    params: TrainTtParams


def run(dataset: str, seed: int) -> None:
    stage = TrainTtStage.read(dataset)
    with training_job(stage, dataset, seed, None, {}) as job:
        params = stage.params
        normalizer = fit_normalizer(job.training, params.windows)
        training = Windows(job.training, params.windows, normalizer, job.device, DATA)
        held_out = Windows(job.held_out, params.windows, normalizer, job.device, DATA)
        layout = Layout(job.training.observation_dim, job.training.action_dim)
        torch.manual_seed(seed)
        policy = TrajectoryTransformer(params, layout, normalizer)
        policy.discretizer = Discretizer.fit(training.transitions_NX.cpu(), params.bins, params.binning)
        policy = policy.to(job.device)

        def loss(rows: Tensor, is_held_out: bool) -> dict[str, Tensor]:
            tokens_BTF, valid_BT = (held_out if is_held_out else training).gather(rows)
            return policy.loss(tokens_BTF[..., layout.transition], valid_BT)

        job.fit(policy, loss, len(held_out), policy.save)
