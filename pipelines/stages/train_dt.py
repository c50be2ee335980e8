"""The Decision Transformer for the stage train_methods: a dataset's episodes -> actions given the return that followed."""

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from pipelines.stages.params import TrainMethodStage
from pipelines.stages.training import DATA, training_job
from tap.data.windows import Layout, Windows, fit_normalizer
from tap.methods.decision_transformer import DecisionTransformer, window_params, with_return_scale
from tap.settings import TrainDtParams


class TrainDtStage(TrainMethodStage):
    stage: ClassVar[str] = "train_dt"
    params: TrainDtParams


def run(dataset: str, seed: int) -> None:
    stage = TrainDtStage.read(dataset)
    with training_job(stage, dataset, seed, None, {}) as job:
        params, shape = stage.params, window_params(stage.params)
        normalizer = with_return_scale(fit_normalizer(job.training, shape), params.return_scale)
        training = Windows(job.training, shape, normalizer, job.device, DATA)
        held_out = Windows(job.held_out, shape, normalizer, job.device, DATA)
        torch.manual_seed(seed)
        policy = DecisionTransformer(params, Layout(job.training.observation_dim, job.training.action_dim), normalizer)
        highest = job.training.episodes.returns[job.training.indices].max()
        policy.target_return.fill_(highest if params.target_return is None else params.target_return)
        policy = policy.to(job.device)

        def loss(starts: Tensor, is_held_out: bool) -> dict[str, Tensor]:
            windows = held_out if is_held_out else training
            first_E = functional.pad(windows.ends_E[:-1], (1, 0))
            return policy.loss(*windows.gather(starts), starts - first_E[windows.episodes_of(starts)])

        job.fit(policy, loss, len(held_out), policy.save)
