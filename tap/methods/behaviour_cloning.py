"""Behaviour cloning: a network that imitates the data's actions, the yardstick for methods that plan.

Actions are deterministic: the network predicts the mean of the data's actions given the observation, the minimiser of the
squared error. Observations and actions are normalised; `plan` and `act` take and return them in the environment's units.

Shapes: B batch, O observation, A action.
"""

import itertools
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from tap.data.episodes import Selection
from tap.data.windows import Layout, Normalizer
from tap.distributed import all_reduce_sum
from tap.methods.reactive import ReactivePolicy
from tap.settings import Section, TrainBcParams


def best_episodes(episodes: Selection, share: float) -> Selection:
    """The episodes with the highest returns that together have at most `share` of the steps; at least one if there is one.

    Of equal returns, those that come first. The episodes stay in their order.
    """
    order = np.argsort(-episodes.episodes.returns[episodes.indices], kind="stable")
    fitting = np.cumsum(episodes.lengths[order]) <= share * episodes.lengths.sum()
    return Selection(episodes.episodes, episodes.indices[np.sort(order[: max(1, fitting.sum())])])


class BehaviourCloning(ReactivePolicy):
    """A multilayer perceptron from observations to actions, and the Normalizer of both."""

    name: ClassVar[str] = "bc"
    params_type: ClassVar[type[Section]] = TrainBcParams

    def __init__(self, params: TrainBcParams, layout: Layout, normalizer: Normalizer) -> None:
        super().__init__(params, layout, normalizer)
        widths = [layout.observation_dim, *[params.network.width] * params.network.layers]
        hidden = [module for pair in itertools.pairwise(widths) for module in (nn.Linear(*pair), nn.GELU())]
        self.network = nn.Sequential(*hidden, nn.Linear(widths[-1], layout.action_dim))

    def forward(self, observation_BO: Tensor) -> Tensor:
        """Normalised actions (B, A) for normalised observations."""
        action_BA: Tensor = self.network(observation_BO)
        return action_BA

    def loss(self, observation_BO: Tensor, action_BA: Tensor) -> dict[str, Tensor]:
        """This process's share of the mean squared error over the global batch, both normalised; sum it over processes."""
        count = all_reduce_sum(torch.full((), action_BA.numel(), device=action_BA.device))
        return {"loss": (self(observation_BO).float() - action_BA).square().sum() / count}
