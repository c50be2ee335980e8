"""A decision as one module, from a raw observation and noise to actions within bounds: what is exported.

Shapes: N states, O observation, A action, H steps, M codes, S random numbers; T steps of an episode that a policy acts on, the
last of them the present one, U = T - 1.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from pipelines.exporting.trajectory_search import search
from tap.data.action_bounds import ActionBounds
from tap.data.history import History
from tap.methods.decision_transformer import DecisionTransformer
from tap.methods.policy import MethodPolicy
from tap.methods.reactive import ReactivePolicy
from tap.methods.trajectory_transformer import TrajectoryTransformer
from tap.planning.policy import Policy


class Decision(nn.Module):
    """Clips actions to bounds (A,). A subclass's `forward` returns a tensor for each name in `outputs`."""

    outputs: Sequence[str]
    policy: Policy | ReactivePolicy | DecisionTransformer
    low_A: Tensor
    high_A: Tensor

    def __init__(self, policy: Policy | ReactivePolicy | DecisionTransformer, noise_size: int, bounds: ActionBounds) -> None:
        super().__init__()
        self.policy, self.noise_size = policy, noise_size
        for name, bound in zip(("low_A", "high_A"), bounds, strict=True):
            self.register_buffer(name, torch.from_numpy(bound))

    def clip(self, actions: Tensor) -> Tensor:
        """Actions (..., A) within the bounds."""
        return actions.clamp(self.low_A, self.high_A)

    @property
    def remembered_steps(self) -> int:
        """How many of the steps before the present one it depends on."""
        return 0

    def inputs(self, states_NO: np.ndarray, noise_NS: Tensor, histories: Sequence[History]) -> dict[str, Tensor]:
        """The input of each name at N raw float32 states, a row for each: without noise if decisions are not random."""
        return {"observation": torch.from_numpy(states_NO)} | ({"noise": noise_NS} if self.noise_size else {})

    def example(self) -> dict[str, Tensor]:
        """Inputs for one state, of zeros."""
        start = History.empty(self.policy.observation_dim, self.policy.action_dim)
        return self.inputs(np.zeros((1, self.policy.observation_dim), np.float32), torch.zeros(1, self.noise_size), [start])


class PlannedDecision(Decision):
    """TAP's, with any of its searches."""

    outputs = ("actions", "codes", "predicted_return")

    def __init__(self, policy: Policy, bounds: ActionBounds) -> None:
        planner = policy.planner
        super().__init__(policy, planner.noise([torch.Generator()]).shape[1], bounds)
        self.planner = planner
        models = (planner.vqvae, planner.prior, planner.critic, planner.actor)
        self.models = nn.ModuleList(model for model in models if model)  # so that their weights are the module's

    def forward(self, observation_NO: Tensor, noise_NS: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Actions (N, H, A), codes (N, M) and predicted return (N,) of each state's best plan. Noise is uniform in [0, 1)."""
        noise_NS = observation_NO.new_empty(len(observation_NO), 0) if noise_NS is None else noise_NS
        _, actions_NHA, _, _, codes_NM, _, return_N, _ = self.planner.solve(observation_NO, noise_NS, best=True)
        return self.clip(actions_NHA), codes_NM, return_N


class SearchedDecision(Decision):
    """The Trajectory Transformer's, with the bins of its plan as codes."""

    outputs = ("actions", "codes", "predicted_return")

    def __init__(self, policy: TrajectoryTransformer, bounds: ActionBounds) -> None:
        planner = policy.planner
        self.noise_shape = planner.noise([torch.Generator()]).shape[1:]
        super().__init__(policy, self.noise_shape.numel(), bounds)
        self.planner = planner

    def forward(self, observation_NO: Tensor, noise_NS: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Actions (N, H, A), bins (N, M) and predicted return (N,) of each state's best plan. Noise is uniform in [0, 1)."""
        planner = self.planner
        found = search(planner, planner.begin(observation_NO, None), noise_NS.view(-1, *self.noise_shape))
        actions_NHA, _, _, _, return_N, codes_NM = planner.decode(*found)
        return self.clip(actions_NHA), codes_NM, return_N


class ReactiveDecision(Decision):
    """That of a method which acts on the present observation alone."""

    outputs = ("actions",)

    def __init__(self, policy: ReactivePolicy, bounds: ActionBounds) -> None:
        super().__init__(policy, 0, bounds)
        self.decide = policy.decide

    def forward(self, observation_NO: Tensor) -> tuple[Tensor]:
        """Actions (N, 1, A)."""
        return (self.clip(self.decide(observation_NO)[:, None]),)


class RememberingDecision(Decision):
    """The Decision Transformer's, which acts on the last steps of an episode."""

    outputs = ("actions",)

    def __init__(self, policy: DecisionTransformer, bounds: ActionBounds) -> None:
        super().__init__(policy, 0, bounds)
        self.past, self.decide = policy.past, policy.decide
        self.steps = policy.remembered_steps

    @property
    def remembered_steps(self) -> int:
        return self.steps

    def inputs(self, states_NO: np.ndarray, noise_NS: Tensor, histories: Sequence[History]) -> dict[str, Tensor]:
        """As `DecisionTransformer.past`."""
        return self.past(states_NO, histories)

    def forward(self, observations: Tensor, past_actions: Tensor, returns: Tensor, step: Tensor) -> tuple[Tensor]:
        """Actions (N, 1, A), of inputs (N, T, O), (N, U, A), (N, T) and (N,)."""
        return (self.clip(self.decide(observations, past_actions, returns, step)[:, None]),)


def decision_of(policy: Policy | MethodPolicy, bounds: ActionBounds) -> Decision:
    """The decision of a policy on the CPU. Raises ValueError if it is in int8, or a Decision Transformer of one step."""
    match policy:
        case Policy(params=params) if params.precision:
            raise ValueError(f"planner.precision {params.precision} is torch's own: export a version with a planner in float32")
        case Policy():
            return PlannedDecision(policy, bounds)
        case TrajectoryTransformer():
            return SearchedDecision(policy, bounds)
        case ReactivePolicy():
            return ReactiveDecision(policy, bounds)
    assert isinstance(policy, DecisionTransformer)
    if not policy.remembered_steps:
        raise ValueError("a Decision Transformer with train_dt.context 1 is not exported: export a version with a longer one")
    return RememberingDecision(policy, bounds)
