"""The prior: the distribution of the dataset's codes given a state (paper, section 3.2).

Shapes: B batch, M codes, K codebook size, O observation, E width.
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from tap.distributed import all_reduce_sum
from tap.model.serialization import load_description, load_weights, save_model
from tap.model.transformer import Transformer, initialize
from tap.settings import Section, TrainPriorParams, TrainVqvaeParams


class Prior(nn.Module):
    """A causal Transformer for p(z_m | z_<m, s_1); each position gets s_1 and the embedding of the code before it."""

    def __init__(self, params: TrainPriorParams, vqvae_params: TrainVqvaeParams, observation_dim: int) -> None:
        super().__init__()
        self.params = params
        width, codebook_size = params.transformer.width, vqvae_params.codebook.size
        self.start = codebook_size  # the token before the first code
        self.embed_code = nn.Embedding(codebook_size + 1, width)
        self.join = nn.Linear(observation_dim + width, width)
        self.transformer = Transformer(params.transformer, vqvae_params.windows.length // vqvae_params.latent_step)
        self.norm = nn.LayerNorm(width)
        self.to_logits = nn.Linear(width, codebook_size)
        for module in (self.embed_code, self.join, self.to_logits):
            initialize(module)

    def forward(self, earlier_BM: Tensor, observation_BO: Tensor, past: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
        """Log probabilities (B, M, K) of the code after each of `earlier_BM` (`start`, then codes); also keys and values.

        With the `past` (keys and values) of earlier codes, `earlier_BM` has only the codes after them.
        """
        state_BMO = observation_BO[:, None].expand(-1, earlier_BM.shape[1], -1)
        tokens_BME = self.join(torch.cat([state_BMO, self.embed_code(earlier_BM)], dim=-1))
        x_BME, keys_values = self.transformer(tokens_BME, past)
        return self.to_logits(self.norm(x_BME)).float().log_softmax(dim=-1), keys_values

    def log_probabilities(self, codes_BM: Tensor, observation_BO: Tensor) -> Tensor:
        """ln p(z_m | z_<m, s_1) of each code of `codes_BM`: (B, M)."""
        earlier_BM = functional.pad(codes_BM[:, :-1], (1, 0), value=self.start)
        log_probs_BMK, _ = self(earlier_BM, observation_BO)
        probability_BM: Tensor = log_probs_BMK.gather(-1, codes_BM[..., None])[..., 0]
        return probability_BM

    def loss(self, codes_BM: Tensor, observation_BO: Tensor) -> dict[str, Tensor]:
        """This process's share of the mean cross-entropy over the global batch, in nats per code; sum it over processes."""
        count = all_reduce_sum(torch.full((), codes_BM.numel(), device=codes_BM.device))
        return {"loss": -self.log_probabilities(codes_BM, observation_BO).sum() / count}


class PriorDescription(Section):
    """prior.json."""

    params: TrainPriorParams


def save_prior(folder: Path, prior: Prior) -> None:
    """Write prior.safetensors and prior.json."""
    save_model(folder, "prior", prior, {"params": prior.params.model_dump(mode="json")})


def load_prior(folder: Path, vqvae_params: TrainVqvaeParams, observation_dim: int, device: torch.device) -> Prior:
    """Read what `save_prior` wrote, in evaluation mode. Raises ValueError if the folder contains no prior."""
    params = load_description(folder, "prior", PriorDescription).params
    return load_weights(folder, "prior", lambda: Prior(params, vqvae_params, observation_dim), device)
