"""TT(+Q): the Trajectory Transformer, whose search values the rest of a plan by a critic (Janner et al. 2021, section 4.3).

The return-to-go in the data is that of each recorded episode. Q combines the best parts of several, which matters where few
episodes reach the goal.

Shapes: N states.
"""

from typing import ClassVar

from tap.data.windows import Layout, Normalizer
from tap.methods.trajectory_planner import TrajectoryPlanner
from tap.methods.trajectory_transformer import TrajectoryTransformer
from tap.methods.twin_q import TwinQ
from tap.settings import Section, TrainTtQParams


class TrajectoryTransformerQ(TrajectoryTransformer):
    """The same bins and model, with Q of the same rewards and discount."""

    name: ClassVar[str] = "tt-q"
    params_type: ClassVar[type[Section]] = TrainTtQParams
    params: TrainTtQParams

    def __init__(self, params: TrainTtQParams, layout: Layout, normalizer: Normalizer) -> None:
        super().__init__(params, layout, normalizer)
        self.q = TwinQ(params.critic.network, layout)

    @property
    def planner(self) -> TrajectoryPlanner:
        params = self.params
        return TrajectoryPlanner(self.model, self.discretizer, self.layout, params.windows.discount, params.search, self.q)
