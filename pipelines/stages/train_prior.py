"""Stage train_prior: the VQ-VAE's codes of the dataset -> a prior over them, given the first state.

Example: python -m pipelines.stages.train_prior hopper-medium-replay 0
"""

import torch
from torch import Tensor

from pipelines.command_line import Dataset, OptionalAblation, Seed
from pipelines.stages.params import TrainPriorStage
from pipelines.stages.training import DATA, launch, training_job
from tap.data.windows import Windows
from tap.files import sha256
from tap.model.prior import Prior, save_prior
from tap.model.serialization import read_description
from tap.model.vqvae import encode_windows, load_vqvae
from tap.results import instance_key, weights_folder


def run(dataset: Dataset, seed: Seed, ablation: OptionalAblation = None) -> None:
    stage = TrainPriorStage.read(dataset, ablation)
    folder = weights_folder("train_vqvae", instance_key(dataset, seed, ablation))
    of_vqvae = {"description": read_description(folder, "vqvae"), "weights": sha256(folder / "vqvae.safetensors")}
    with training_job(stage, dataset, seed, ablation, {"vqvae": of_vqvae}) as job:
        vqvae, normalizer = load_vqvae(folder, job.device)
        training = Windows(job.training, vqvae.params.windows, normalizer, job.device, DATA)
        held_out = Windows(job.held_out, vqvae.params.windows, normalizer, job.device, DATA)
        params = stage.params
        torch.manual_seed(seed)
        prior = Prior(params, vqvae.params, vqvae.layout.observation_dim).to(job.device)

        # The VQ-VAE is frozen, so if training uses windows more than once, all are encoded first.
        once = params.fit.updates * params.fit.batch_size > len(training)
        codes = {windows: encode_windows(vqvae, windows) for windows in (training, held_out) if once}

        def loss(starts: Tensor, is_held_out: bool) -> dict[str, Tensor]:
            windows = held_out if is_held_out else training
            codes_BM = codes[windows][starts] if once else encode_windows(vqvae, windows, starts)
            return prior.loss(codes_BM.long(), windows.transitions_NX[starts, vqvae.layout.observation])

        job.fit(prior, loss, len(held_out), lambda folder: save_prior(folder, prior))


if __name__ == "__main__":
    launch(run)
