"""Stage train_critic: windows' first codes and returns-to-go -> a critic of codes.

Where all rewards are 0, as of a dataset without any, there is nothing to value, and a single update is made.

Example: python -m pipelines.stages.train_critic hopper-medium-replay 0
"""

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor

from pipelines.command_line import Dataset, OptionalAblation, Seed
from pipelines.stages.params import TrainCriticStage
from pipelines.stages.training import DATA, launch, training_job
from tap.data.episodes import Episodes
from tap.data.windows import Windows
from tap.files import sha256
from tap.model.critic import Critic, sample_episodes, save_critic
from tap.model.serialization import read_description
from tap.model.vqvae import encode_windows, load_vqvae
from tap.results import instance_key, weights_folder

EVALUATED_AT_ONCE = 4096  # windows


def run(dataset: Dataset, seed: Seed, ablation: OptionalAblation = None) -> None:
    stage = TrainCriticStage.read(dataset, ablation)
    if not Episodes.load(DATA / "raw" / dataset / "episodes").rewards.any():
        stage = with_one_update(stage)
    folder = weights_folder("train_vqvae", instance_key(dataset, seed, ablation))
    of_vqvae = {"description": read_description(folder, "vqvae"), "weights": sha256(folder / "vqvae.safetensors")}
    with training_job(stage, dataset, seed, ablation, {"vqvae": of_vqvae}) as job:
        vqvae, normalizer = load_vqvae(folder, job.device)
        window_params = vqvae.params.windows
        if vqvae.params.bottleneck == "pool":  # the encoder is causal: a window's first code depends on its first steps only
            window_params = window_params.model_copy(update={"length": vqvae.params.latent_step})
        training = Windows(job.training, window_params, normalizer, job.device, DATA)
        held_out = Windows(job.held_out, window_params, normalizer, job.device, DATA)
        torch.manual_seed(seed)
        critic = Critic(stage.params, vqvae).to(job.device)
        seen_GE = sample_episodes(stage.params, len(training.ends_E), torch.Generator().manual_seed(seed)).to(job.device)

        # The VQ-VAE is frozen, so where training sees a window more than once, all are encoded before.
        once = stage.params.fit.updates * stage.params.fit.batch_size > len(training)
        codes = {windows: encode_windows(vqvae, windows)[:, 0] for windows in (training, held_out) if once}

        def batch(windows: Windows, starts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            codes_B = codes[windows][starts] if once else encode_windows(vqvae, windows, starts)[:, 0]
            transitions_BX = windows.transitions_NX[starts]
            return transitions_BX[:, vqvae.layout.observation], codes_B.long(), transitions_BX[:, vqvae.layout.return_to_go]

        def loss(starts: Tensor, is_held_out: bool) -> dict[str, Tensor]:
            if is_held_out:
                everything_GB = torch.ones(len(seen_GE), len(starts), dtype=torch.bool, device=starts.device)
                return critic.loss(*batch(held_out, starts), everything_GB)
            return critic.loss(*batch(training, starts), seen_GE[:, training.episodes_of(starts)])

        @torch.no_grad()
        def measure() -> dict[str, float]:
            windows = held_out if len(held_out) else training
            values, returns = [], []
            for starts in torch.arange(len(windows), device=job.device).split(EVALUATED_AT_ONCE):  # type: ignore[no-untyped-call]
                observation_BO, codes_B, return_B = batch(windows, starts)
                values.append(critic(observation_BO, codes_B).mean(dim=0))
                returns.append(return_B)
            scale = float(normalizer.std[vqvae.layout.return_to_go])
            value_N, return_N = (scale * torch.cat(parts).double().cpu().numpy() for parts in (values, returns))
            first_E = np.concatenate([[0], windows.ends_E[:-1].cpu().numpy()])
            critic.held_out_error = _rmse(value_N, return_N)
            return {
                "held_out_error": critic.held_out_error,
                "first_state_error": _rmse(value_N[first_E], return_N[first_E]),
                # undefined for a single episode
                "first_state_rank_correlation": float(np.nan_to_num(spearmanr(value_N[first_E], return_N[first_E]).statistic)),
                "return_std": float(return_N.std()),
            }

        job.fit(critic, loss, len(held_out), lambda folder: save_critic(folder, critic), measure=measure)


def with_one_update(stage: TrainCriticStage) -> TrainCriticStage:
    """The params of a critic that nothing uses, but whose files later stages expect."""
    fit = stage.params.fit.model_copy(update={"updates": 1, "warmup_updates": 0})
    return stage.model_copy(update={"params": stage.params.model_copy(update={"fit": fit})})


def _rmse(predicted: np.ndarray, true: np.ndarray) -> float:
    return float(np.sqrt(np.square(predicted - true).mean()))


if __name__ == "__main__":
    launch(run)
