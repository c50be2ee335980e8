"""Stage train_prior: the VQ-VAE's codes of the dataset -> a prior over them, given the first state.

Example: python -m pipelines.train_prior hopper-medium-replay 0
"""

import torch
from torch import Tensor

from pipelines.stage import main
from pipelines.train import output_folder, training_job
from tap.prior import Prior, save_prior
from tap.vqvae import load_vqvae
from tap.windows import Windows


def run(dataset: str, seed: int, ablation: str | None = None) -> None:
    with training_job("train_prior", dataset, seed, ablation) as job:
        vqvae, normalizer = load_vqvae(output_folder("train_vqvae", job.key), job.device)
        training = Windows(job.training, vqvae.params.windows, normalizer, job.device)
        held_out = Windows(job.held_out, vqvae.params.windows, normalizer, job.device)
        torch.manual_seed(seed)
        prior = Prior(job.params.train_prior, vqvae.params, vqvae.layout.observation_dim).to(job.device)

        def loss(starts: Tensor, is_held_out: bool) -> dict[str, Tensor]:
            tokens, _ = (held_out if is_held_out else training).gather(starts)
            with torch.no_grad():
                codes = vqvae.encode(tokens)
            return prior.loss(codes, tokens[:, 0, vqvae.layout.observation])

        job.fit(prior, loss, len(training), len(held_out), lambda folder: save_prior(folder, prior))


if __name__ == "__main__":
    main(run)
