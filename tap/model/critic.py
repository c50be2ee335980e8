"""The critic: the return of executing a code at a state.

An addition to the paper, in which plans are valued by the decoded rewards and returns-to-go. The critic is fitted to the return
that followed each state and code in the data, so that it values a code alone, without a plan to the horizon.

Shapes: B batch, N states, C codes at each, G ensemble members, K codebook size, D code dimension, O observation, E episodes.
"""

from itertools import pairwise
from pathlib import Path

import torch
from pydantic import PositiveFloat
from torch import Tensor, nn

from tap.distributed import all_reduce_sum
from tap.model.serialization import load_description, load_weights, save_model
from tap.model.vqvae import VQVAE
from tap.settings import Section, TrainCriticParams

VALUED_AT_ONCE = 512  # codes at states, in all members: bounds memory, and small tensors are reused between decisions


class Critic(nn.Module):
    """An ensemble of MLPs, as batched matrices: (state, code) -> the normalised return-to-go at that state.

    States are normalised, and codes are their vectors in the VQ-VAE's codebook, in units of the std of all vectors.
    `held_out_error` is the RMSE of the ensemble's mean on episodes that no member was trained on, in units of return; infinite
    until it is measured.
    """

    codes_KD: Tensor

    def __init__(self, params: TrainCriticParams, vqvae: VQVAE) -> None:
        super().__init__()
        self.params, self.held_out_error = params, float("inf")
        vectors_KD = vqvae.codebook.vectors_KD.detach()
        self.register_buffer("codes_KD", vectors_KD / vectors_KD.std(), persistent=False)
        sizes = (vqvae.layout.observation_dim + vectors_KD.shape[1], params.width, params.width, 1)
        layers = list(pairwise(sizes))
        self.weights = nn.ParameterList((2 * torch.rand(params.members, i, o) - 1) / i**0.5 for i, o in layers)
        # Flat, so that weight decay, which is for matrices, leaves them out.
        self.biases = nn.ParameterList(torch.zeros(params.members * o) for _, o in layers)

    def forward(self, observation_BO: Tensor, codes_B: Tensor) -> Tensor:
        """What each member predicts for each state and code: (G, B)."""
        members = self.params.members
        x = torch.cat([observation_BO, self.codes_KD[codes_B]], dim=-1).expand(members, -1, -1)
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = torch.baddbmm(bias.view(members, 1, -1), x if layer == 0 else x.relu(), weight)
        return x[..., 0].float()

    def values(self, observation_NO: Tensor, codes_NC: Tensor) -> Tensor:
        """The ensemble's mean for C codes at each state: (N, C)."""
        C = codes_NC.shape[1]
        parts = []
        step = max(1, VALUED_AT_ONCE // C)
        for first in range(0, len(codes_NC), step):
            rows = slice(first, first + step)
            values_GR = self(observation_NO[rows].repeat_interleave(C, dim=0), codes_NC[rows].flatten())
            parts.append(values_GR.mean(dim=0).view(-1, C))
        return torch.cat(parts)

    def loss(self, observation_BO: Tensor, codes_B: Tensor, return_B: Tensor, seen_GB: Tensor) -> dict[str, Tensor]:
        """This process's share of the mean squared error over the global batch; sum it over processes.

        `return_B` is the normalised return-to-go that followed: Monte Carlo targets. `seen_GB` (bool) marks which windows each
        member is trained on.
        """
        count = all_reduce_sum(seen_GB.sum().float()).clamp(min=1)
        return {"loss": ((self(observation_BO, codes_B) - return_B).square() * seen_GB).sum() / count}


def sample_episodes(params: TrainCriticParams, episodes: int, generator: torch.Generator) -> Tensor:
    """Which episodes each member is trained on: (G, E) bool, the params' share of them for each, at least one."""
    ranks_GE = torch.rand(params.members, episodes, generator=generator).argsort(dim=1).argsort(dim=1)
    return ranks_GE < max(1, round(params.episode_share * episodes))


class CriticDescription(Section):
    """critic.json."""

    params: TrainCriticParams
    held_out_error: PositiveFloat


def save_critic(folder: Path, critic: Critic) -> None:
    """Write critic.safetensors and critic.json."""
    description = {"params": critic.params.model_dump(mode="json"), "held_out_error": critic.held_out_error}
    save_model(folder, "critic", critic, description)


def load_critic(folder: Path, vqvae: VQVAE, device: torch.device) -> Critic:
    """Read what `save_critic` wrote, for the VQ-VAE it was trained with. Raises ValueError if the folder holds no critic."""
    description = load_description(folder, "critic", CriticDescription)
    critic = load_weights(folder, "critic", lambda: Critic(description.params, vqvae), device)
    critic.held_out_error = description.held_out_error
    return critic
