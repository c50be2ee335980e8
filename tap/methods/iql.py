"""Implicit Q-learning (Kostrikov, Nair and Levine, ICLR 2022), with torchrl's loss.

Q is regressed on r + discount V(s'), V on an expectile of Q's target networks, and the actor imitates recorded actions,
weighted by exp(temperature (Q - V)). No action outside the data is ever valued.
"""

import torch
from tensordict import TensorDict
from tensordict.nn import (
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import Tensor, nn
from torchrl.modules import MLP, TanhNormal, ValueOperator
from torchrl.objectives import IQLLoss, SoftUpdate

from tap.distributed import all_reduce_sum
from tap.methods.actor import IqlPolicy, SquashedPolicy
from tap.methods.transitions import Batch
from tap.settings import NetworkParams

# The scale of the Gaussian: softplus of the network's output, biased so that 0 gives 1, and this at least.
SCALE_MAPPING, LEAST_SCALE = "biased_softplus_1.0", 0.1
PARTS = {"actor": "actor", "q": "qvalue", "value": "value"}  # of the loss, with torchrl's names


def transitions_dict(batch: Batch, action_BA: Tensor) -> TensorDict:
    """The batch in torchrl's form, with its actions between -1 and 1."""
    size, terminated_B1 = len(batch.reward_B), batch.terminated_B[:, None]
    following = {
        "observation": batch.next_observation_BO,
        "reward": batch.reward_B[:, None],
        "done": terminated_B1,
        "terminated": terminated_B1,
    }
    return TensorDict({"observation": batch.observation_BO, "action": action_BA, "next": TensorDict(following, size)}, size)


def make_actor(policy: SquashedPolicy) -> ProbabilisticTensorDictSequential:
    """The policy's network with its distribution over actions between -1 and 1."""
    parameters = nn.Sequential(policy.network, NormalParamExtractor(scale_mapping=SCALE_MAPPING, scale_lb=LEAST_SCALE))
    return ProbabilisticTensorDictSequential(
        TensorDictModule(parameters, in_keys=["observation"], out_keys=["loc", "scale"]),
        ProbabilisticTensorDictModule(in_keys=["loc", "scale"], out_keys=["action"], distribution_class=TanhNormal),
    )


def make_critic(params: NetworkParams, inputs: int, device: torch.device) -> MLP:
    """A network for one value."""
    cells = [params.width] * params.layers
    return MLP(in_features=inputs, out_features=1, num_cells=cells, activation_class=nn.ReLU, device=device)


class ImplicitQLearning(nn.Module):
    """The actor, which is the policy's network, two Q networks with their targets, V, and the loss of them all."""

    def __init__(self, policy: IqlPolicy, device: torch.device) -> None:
        super().__init__()
        params, layout = policy.params, policy.layout
        self._squash = policy.squash
        critics = [
            ValueOperator(
                make_critic(params.network, layout.observation_dim + layout.action_dim, device),
                in_keys=["observation", "action"],
                out_keys=["state_action_value"],
            )
            for _ in range(2)
        ]
        self.losses = IQLLoss(
            make_actor(policy),
            critics,
            ValueOperator(make_critic(params.network, layout.observation_dim, device), in_keys=["observation"]),
            loss_function="l2",
            temperature=params.temperature,
            expectile=params.expectile,
            reduction="sum",
        )
        self.losses.make_value_estimator(gamma=params.discount, device=device)
        self._targets = SoftUpdate(self.losses, tau=params.target_rate)

    def loss(self, batch: Batch, update_targets: bool) -> dict[str, Tensor]:
        """This process's share of the losses over the global batch; sum them over processes.

        The parts share no parameter and treat each other's networks as constant, so one optimiser of their sum is one for each.
        With `update_targets`, the target networks first follow the last update of the others: in training, but not to measure.
        """
        if update_targets:
            self._targets.step()
        count = all_reduce_sum(torch.full((), len(batch.reward_B), device=batch.reward_B.device))
        losses = self.losses(transitions_dict(batch, self._squash(batch.action_BA)))
        parts = {f"{name}_loss": losses[f"loss_{key}"] / count for name, key in PARTS.items()}
        return {"loss": torch.stack([*parts.values()]).sum(), **parts}
