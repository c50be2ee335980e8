"""Stage train_vqvae: a dataset's episodes -> the VQ-VAE that turns three steps into one code, and back.

Example: python -m pipelines.stages.train_vqvae hopper-medium-replay 0
"""

from pathlib import Path

import torch
from torch import Tensor

from pipelines.command_line import Dataset, OptionalAblation, Seed
from pipelines.stages.params import TrainVqvaeStage
from pipelines.stages.training import DATA, launch, training_job
from tap.data.windows import Layout, Windows, fit_normalizer
from tap.distributed import rank, world_size
from tap.model.vqvae import ENCODED_AT_ONCE, VQVAE, save_vqvae

REFIT_WINDOWS = 20_000  # spread evenly over the training episodes


def run(dataset: Dataset, seed: Seed, ablation: OptionalAblation = None) -> None:
    stage = TrainVqvaeStage.read(dataset, ablation)
    with training_job(stage, dataset, seed, ablation, {}) as job:
        params = stage.params
        normalizer = fit_normalizer(job.training, params.windows)
        training = Windows(job.training, params.windows, normalizer, job.device, DATA)
        held_out = Windows(job.held_out, params.windows, normalizer, job.device, DATA)
        torch.manual_seed(seed)
        vqvae = VQVAE(params, Layout(job.training.observation_dim, job.training.action_dim)).to(job.device)

        def loss(starts: Tensor, is_held_out: bool) -> dict[str, Tensor]:
            return vqvae.loss(*(held_out if is_held_out else training).gather(starts))

        def refit_codebook() -> None:
            starts = torch.linspace(0, len(training) - 1, min(REFIT_WINDOWS, len(training)), device=job.device).long()
            batches = starts[rank() :: world_size()].split(ENCODED_AT_ONCE)  # type: ignore[no-untyped-call]
            vqvae.codebook.refit(vqvae.features(training.gather(batch)[0]) for batch in batches)

        def save(folder: Path) -> None:
            save_vqvae(folder, vqvae, normalizer)

        job.fit(vqvae, loss, len(held_out), save, refit_codebook)


if __name__ == "__main__":
    launch(run)
