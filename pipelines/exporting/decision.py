"""A decision as one module, from a raw observation and noise to actions within bounds: what is exported.

Shapes: N states, O observation, A action, H steps, M codes, S random numbers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tap.data.action_bounds import ActionBounds
from tap.methods.policy import MethodPolicy
from tap.methods.reactive import ReactivePolicy
from tap.planning.policy import Policy


class Decision(nn.Module):
    """Clips actions to bounds (A,). A subclass's `forward` returns a tensor for each name in `outputs`."""

    outputs: Sequence[str]
    low_A: Tensor
    high_A: Tensor

    def __init__(self, policy: Policy | ReactivePolicy, noise_size: int, bounds: ActionBounds) -> None:
        super().__init__()
        self.policy, self.noise_size = policy, noise_size
        for name, bound in zip(("low_A", "high_A"), bounds, strict=True):
            self.register_buffer(name, torch.from_numpy(bound))

    def clip(self, actions: Tensor) -> Tensor:
        """Actions (..., A) within the bounds."""
        return actions.clamp(self.low_A, self.high_A)

    def inputs(self) -> dict[str, Tensor]:
        """An input of each name for one state: zeros of the shapes (1, O), and (1, S) if decisions are random."""
        sizes = {"observation": self.policy.observation_dim, "noise": self.noise_size}
        return {name: torch.zeros(1, size) for name, size in sizes.items() if size}


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


class ReactiveDecision(Decision):
    """That of a method which acts on the present observation alone."""

    outputs = ("actions",)

    def __init__(self, policy: ReactivePolicy, bounds: ActionBounds) -> None:
        super().__init__(policy, 0, bounds)
        self.decide = policy.decide

    def forward(self, observation_NO: Tensor) -> tuple[Tensor]:
        """Actions (N, 1, A)."""
        return (self.clip(self.decide(observation_NO)[:, None]),)


def decision_of(policy: Policy | MethodPolicy, method: str, bounds: ActionBounds) -> Decision:
    """The decision of a policy on the CPU. Raises ValueError if that of its method is not one graph, or is in int8."""
    match policy:
        case Policy(params=params) if params.precision:
            raise ValueError(f"planner.precision {params.precision} is torch's own: export a version with a planner in float32")
        case Policy():
            return PlannedDecision(policy, bounds)
        case ReactivePolicy() if type(policy).plan is ReactivePolicy.plan:  # not of the Trajectory Transformer, which searches
            return ReactiveDecision(policy, bounds)
    raise ValueError(
        f"{method} cannot be exported: each of its decisions depends on earlier steps, or is a search of many passes; serve it "
        "with `tap serve`, or export a version of TAP or of a method that acts on the present observation alone"
    )
