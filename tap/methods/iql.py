"""Implicit Q-learning (Kostrikov, Nair and Levine, ICLR 2022), with torchrl's loss.

Q is regressed on r + discount V(s'), V on an expectile of Q's target networks, and the actor imitates recorded actions,
weighted by exp(temperature (Q - V)). No action outside the data is ever valued.
"""

import torch
from torch import Tensor, nn
from torchrl.objectives import IQLLoss, SoftUpdate

from tap.distributed import all_reduce_sum
from tap.methods.networks import make_imitator, make_q, make_value, transitions_dict
from tap.methods.squashed_policy import IqlPolicy
from tap.methods.transitions import Batch

PARTS = {"actor": "actor", "q": "qvalue", "value": "value"}  # of the loss, with torchrl's names


class ImplicitQLearning(nn.Module):
    """The actor, which is the policy's network, two Q networks with their targets, V, and the loss of them all."""

    def __init__(self, policy: IqlPolicy, device: torch.device) -> None:
        super().__init__()
        params, layout = policy.params, policy.layout
        self._squash = policy.squash
        self.losses = IQLLoss(
            make_imitator(policy),
            [make_q(params.network, layout, device) for _ in range(2)],
            make_value(params.network, layout, device),
            loss_function="l2",
            temperature=params.temperature,
            expectile=params.expectile,
            reduction="sum",
        )
        self.losses.make_value_estimator(gamma=params.discount, device=device)
        self._targets = SoftUpdate(self.losses, tau=params.target_rate)

    def loss(self, batch: Batch, training: bool) -> dict[str, Tensor]:
        """This process's share of the losses over the global batch; sum them over processes.

        The parts share no parameter and treat each other's networks as constant, so one optimiser of their sum is one for each.
        In training, the target networks first follow the last update of the others.
        """
        if training:
            self._targets.step()
        count = all_reduce_sum(torch.full((), len(batch.reward_B), device=batch.reward_B.device))
        losses = self.losses(transitions_dict(batch, self._squash(batch.action_BA)))
        parts = {f"{name}_loss": losses[f"loss_{key}"] / count for name, key in PARTS.items()}
        return {"loss": torch.stack([*parts.values()]).sum(), **parts}
