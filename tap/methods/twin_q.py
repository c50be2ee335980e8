"""Q of states and actions by two networks, of which the lower value counts (Fujimoto, van Hoof and Meger, ICML 2018).

Shapes: O observation, A action, I = O + A.
"""

import torch
from torch import Tensor, nn

from tap.data.windows import Layout, Normalizer
from tap.methods.squashed_policy import mlp
from tap.settings import NetworkParams


class TwinQ(nn.Module):
    """Q in the environment's units, by networks of normalised inputs that learn from scaled rewards."""

    mean_I: Tensor
    std_I: Tensor
    scale: Tensor  # of the rewards that the networks learn from

    def __init__(self, params: NetworkParams, layout: Layout) -> None:
        super().__init__()
        self._inputs = slice(0, layout.observation_dim + layout.action_dim)
        self.networks = nn.ModuleList(mlp(params, self._inputs.stop, 1) for _ in range(2))
        self.register_buffer("mean_I", torch.zeros(self._inputs.stop))
        self.register_buffer("std_I", torch.ones(self._inputs.stop))
        self.register_buffer("scale", torch.ones(()))

    def set_units(self, normalizer: Normalizer, scale: float) -> None:
        """What the networks learn from: inputs normalised by `normalizer`, and rewards times `scale`."""
        self.mean_I.copy_(torch.from_numpy(normalizer.mean[self._inputs]))
        self.std_I.copy_(torch.from_numpy(normalizer.std[self._inputs]))
        self.scale.fill_(scale)

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        """Q (...) of raw observations (..., O) and actions (..., A)."""
        inputs = (torch.cat([observation, action], dim=-1) - self.mean_I) / self.std_I
        return lower(self.networks, inputs) / self.scale


def lower(networks: nn.ModuleList, inputs: Tensor) -> Tensor:
    """The lower of the networks' values (...) of normalised inputs (..., I)."""
    return torch.cat([network(inputs) for network in networks], dim=-1).float().amin(dim=-1)
