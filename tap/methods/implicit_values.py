"""The critics of implicit Q-learning (Kostrikov, Nair and Levine, ICLR 2022), without its actor.

Q is regressed on r + discount V(s'), V on an expectile of Q's target networks: so V is about the value of the best recorded
actions, whichever episode each is of. No action outside the data is ever valued.

Shapes: B batch.
"""

import copy

import torch
from torch import Tensor, nn

from tap.data.windows import Layout
from tap.distributed import all_reduce_sum
from tap.methods.squashed_policy import mlp
from tap.methods.transitions import Batch
from tap.methods.twin_q import TwinQ, lower
from tap.settings import CriticParams


class ImplicitValues(nn.Module):
    """Q, its target networks, V, and the loss of them all."""

    def __init__(self, q: TwinQ, params: CriticParams, layout: Layout, discount: float) -> None:
        super().__init__()
        self._params, self._discount = params, discount
        self.q = q
        self.targets = copy.deepcopy(q.networks).requires_grad_(False)
        self.value = mlp(params.network, layout.observation_dim, 1)

    def loss(self, batch: Batch, training: bool) -> dict[str, Tensor]:
        """This process's share of the losses over the global batch; sum them over processes.

        The parts share no parameter and treat each other's networks as constant, so one optimiser of their sum is one for each.
        In training, the target networks first follow the last update of Q.
        """
        if training:
            self._follow()
        inputs_BI = torch.cat([batch.observation_BO, batch.action_BA], dim=-1)
        with torch.no_grad():
            next_B = self.value(batch.next_observation_BO)[:, 0].float()
            target_B = batch.reward_B + self._discount * torch.where(batch.terminated_B, 0, next_B)
            q_B = lower(self.targets, inputs_BI)
        q_loss_B = sum((network(inputs_BI)[:, 0].float() - target_B).square() for network in self.q.networks)
        advantage_B = q_B - self.value(batch.observation_BO)[:, 0].float()
        weight_B = torch.where(advantage_B > 0, self._params.expectile, 1 - self._params.expectile)
        count = all_reduce_sum(torch.full((), len(batch.reward_B), device=batch.reward_B.device))
        parts = {"q_loss": q_loss_B.sum() / count, "value_loss": (weight_B * advantage_B.square()).sum() / count}
        return {"loss": parts["q_loss"] + parts["value_loss"], **parts}

    @torch.no_grad()
    def _follow(self) -> None:
        for target, current in zip(self.targets.parameters(), self.q.networks.parameters(), strict=True):
            target.lerp_(current, self._params.target_rate)
