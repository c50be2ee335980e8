"""The Trajectory Transformer (Janner et al. 2021): a policy that models every dimension of a trajectory, and searches it.

It plans from the present observation alone, as every policy here; the search could also be given the transitions before it.

Shapes: N states, B batch, T transitions, O observation, X dimensions of a transition.
"""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from tap.data.windows import Layout, Normalizer
from tap.methods.discretizer import Discretizer
from tap.methods.reactive import ReactivePolicy
from tap.methods.trajectory_model import TrajectoryModel
from tap.methods.trajectory_planner import TrajectoryPlan, TrajectoryPlanner
from tap.settings import Section, TrainTtParams


class TrajectoryTransformer(ReactivePolicy):
    """Bins, model and search. The Normalizer only says how far the data reaches: bins have raw units."""

    name: ClassVar[str] = "tt"
    params_type: ClassVar[type[Section]] = TrainTtParams
    params: TrainTtParams

    def __init__(self, params: TrainTtParams, layout: Layout, normalizer: Normalizer) -> None:
        super().__init__(params, layout, normalizer)
        self.discretizer = Discretizer(layout.transition_dim, params.bins)
        self.model = TrajectoryModel(params.transformer, layout.transition_dim, params.bins, params.windows.length)

    @property
    def planner(self) -> TrajectoryPlanner:
        return TrajectoryPlanner(self.model, self.discretizer, self.layout, self.params.windows.discount, self.params.search)

    def loss(self, raw_BTX: Tensor, valid_BT: Tensor) -> dict[str, Tensor]:
        """As `TrajectoryModel.loss`, of windows of raw transitions."""
        weights_X = raw_BTX.new_ones(self.layout.transition_dim)
        weights_X[self.layout.action] = self.params.action_weight
        return self.model.loss(self.discretizer.tokens(raw_BTX), valid_BT, weights_X)

    def plan(self, observations: np.ndarray, generators: Sequence[torch.Generator]) -> TrajectoryPlan:
        """The best plan from each raw observation (N, O). Raises ValueError as `check` does."""
        self.check(observations)
        device = self.discretizer.edges_XE.device
        return self.planner.plan(torch.as_tensor(observations, dtype=torch.float32, device=device), generators)
