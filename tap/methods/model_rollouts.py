"""Rollouts of an actor in a learned model, and the transitions that they leave.

At each update, every rollout takes one step; one that has ended starts anew from a recorded state. All is buffers, so a
checkpoint of the module that has them resumes them.

Shapes: B rollouts, U updates whose transitions are kept, S sampled, C columns, O observation, A action.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tap.data.windows import Layout
from tap.methods.dynamics import Step
from tap.methods.transitions import Batch


class ModelRollouts(nn.Module):
    """B rollouts of at most `horizon` steps, and the transitions of the last U updates."""

    observation_BO: Tensor  # the state that each has come to
    age_B: Tensor  # steps since its start
    kept_UBC: Tensor
    updates: Tensor  # how often all took a step

    def __init__(self, layout: Layout, horizon: int, count: int, kept_updates: int, device: torch.device) -> None:
        super().__init__()
        self._horizon = horizon
        self._columns = [layout.observation_dim, layout.action_dim, 1, layout.observation_dim, 1]
        self.register_buffer("observation_BO", torch.zeros(count, layout.observation_dim, device=device))
        self.register_buffer("age_B", torch.full((count,), horizon, device=device))
        self.register_buffer("kept_UBC", torch.zeros(kept_updates, count, sum(self._columns), device=device))
        self.register_buffer("updates", torch.zeros((), dtype=torch.long, device=device))

    @torch.no_grad()
    def advance(
        self,
        start_BO: Tensor,
        act: Callable[[Tensor], Tensor],
        step: Callable[[Tensor, Tensor], Step],
        penalty_weight: float,
    ) -> Tensor:
        """Take a step in each rollout, and keep it with its reward less `penalty_weight` times the step's uncertainty.

        Rollouts that have ended start at `start_BO`. `act` maps states (B, O) to actions (B, A), `step` both to what follows.
        Returns the penalties (B,).
        """
        ended_B = self.age_B >= self._horizon
        state_BO = torch.where(ended_B[:, None], start_BO, self.observation_BO)
        action_BA = act(state_BO)
        following = step(state_BO, action_BA)
        penalty_B = penalty_weight * following.uncertainty_B
        batch = Batch(
            state_BO, action_BA, following.reward_B - penalty_B, following.next_observation_BO, following.terminated_B
        )
        self.kept_UBC.index_copy_(0, self.updates[None] % len(self.kept_UBC), _columns(batch)[None])
        self.observation_BO.copy_(following.next_observation_BO)
        age_B = torch.where(ended_B, 0, self.age_B) + 1
        self.age_B.copy_(torch.where(following.terminated_B, self._horizon, age_B))
        self.updates += 1
        return penalty_B

    def sample(self, count: int) -> Batch:
        """S = `count` of the kept transitions, drawn alike with replacement, by torch's default generator."""
        updates, rollouts, _ = self.kept_UBC.shape
        # In float64, whose rounding never reaches the bound; not by `randint`, which would wait for its value on a GPU.
        share_S = torch.rand(count, dtype=torch.float64, device=self.kept_UBC.device)
        index_S = (share_S * self.updates.clamp(max=updates) * rollouts).long()
        parts = torch.split(self.kept_UBC.flatten(0, 1)[index_S], self._columns, dim=1)
        return Batch(parts[0], parts[1], parts[2][:, 0], parts[3], parts[4][:, 0] > 0)


def _columns(batch: Batch) -> Tensor:
    """(B, C)"""
    columns = (batch.reward_B[:, None], batch.next_observation_BO, batch.terminated_B[:, None])
    return torch.cat([batch.observation_BO, batch.action_BA, *columns], dim=1)
