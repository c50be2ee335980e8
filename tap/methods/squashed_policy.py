"""Policies that a critic trains: a network for the parameters of a Gaussian, squashed or clipped, whose mode is the action.

Nothing here imports torchrl, which only training needs.

Shapes: B batch, O observation, A action.
"""

import itertools
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from tap.data.windows import Layout, Normalizer
from tap.methods.reactive import ReactivePolicy
from tap.settings import NetworkParams, Section, TrainCqlParams, TrainIqlParams, TrainMopoParams

# The actions that can be taken reach beyond the recorded ones by this share of half their range: at the very bound of a
# squashed Gaussian, where many recorded actions are, its density is infinite.
MARGIN = 0.01

ActorParams = TrainIqlParams | TrainCqlParams | TrainMopoParams


def mlp(params: NetworkParams, inputs: int, outputs: int) -> nn.Sequential:
    """A multilayer perceptron with ReLUs, as in D4RL's reference implementations."""
    widths = [inputs, *[params.width] * params.layers]
    hidden = [module for pair in itertools.pairwise(widths) for module in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(widths[-1], outputs))


class SquashedPolicy(ReactivePolicy):
    """An action tanh(location), stretched to the range of the recorded actions.

    `network` returns location and raw scale (B, 2 A) of the Gaussian for normalised observations (B, O).
    """

    centre_A: Tensor
    half_A: Tensor

    def __init__(self, params: ActorParams, layout: Layout, normalizer: Normalizer) -> None:
        super().__init__(params, layout, normalizer)
        self.network = mlp(params.network, layout.observation_dim, 2 * layout.action_dim)
        assert normalizer.min is not None and normalizer.max is not None
        mean, std = normalizer.mean[layout.action], normalizer.std[layout.action]
        low, high = ((bound[layout.action] - mean) / std for bound in (normalizer.min, normalizer.max))
        half = np.maximum((high - low) / 2, np.finfo(np.float32).eps) * (1 + MARGIN)
        self.register_buffer("centre_A", torch.from_numpy((low + high) / 2), persistent=False)
        self.register_buffer("half_A", torch.from_numpy(half.astype(np.float32)), persistent=False)

    def forward(self, observation_BO: Tensor) -> Tensor:
        """Normalised actions (B, A), the modes, for normalised observations (B, O)."""
        location_BA: Tensor = self.network(observation_BO)[:, : self.action_dim]
        return self.stretch(location_BA.tanh())

    def squash(self, action_BA: Tensor) -> Tensor:
        """Normalised actions in the units of the squashed Gaussian: recorded ones lie between -1 and 1, with a margin."""
        return (action_BA - self.centre_A) / self.half_A

    def stretch(self, squashed_BA: Tensor) -> Tensor:
        """The inverse of `squash`: normalised actions."""
        return self.centre_A + self.half_A * squashed_BA


class IqlPolicy(SquashedPolicy):
    """The policy of implicit Q-learning."""

    name: ClassVar[str] = "iql"
    params_type: ClassVar[type[Section]] = TrainIqlParams


class CqlPolicy(SquashedPolicy):
    """The policy of conservative Q-learning."""

    name: ClassVar[str] = "cql"
    params_type: ClassVar[type[Section]] = TrainCqlParams


class MopoPolicy(SquashedPolicy):
    """The policy of model-based offline policy optimisation."""

    name: ClassVar[str] = "mopo"
    params_type: ClassVar[type[Section]] = TrainMopoParams
