"""Conservative Q-learning (Kumar et al., NeurIPS 2020), with torchrl's loss.

Soft actor-critic, whose Q networks are also trained to give recorded actions higher values than others, by a penalty. For the
first updates the actor imitates the recorded actions instead, as in the authors' implementation.

Shapes: B batch, K sampled actions of each kind, S = 3 K of all, E = 2 Q networks, O observation, A action.
"""

import math

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl.objectives import CQLLoss, SoftUpdate

from tap.distributed import all_reduce_sum
from tap.methods.networks import make_clipped_actor, make_q, transitions_dict
from tap.methods.squashed_policy import CqlPolicy
from tap.methods.transitions import Batch


class ConservativeLoss(CQLLoss):  # type: ignore[misc]  # torchrl is untyped where it is not installed
    """torchrl's loss with the paper's penalty: ln of the mean of exp(Q) / density over sampled actions, less Q of the recorded.

    The actions are uniform ones, the actor's, and the actor's at the next state (the paper's equation 4 and appendix F).
    torchrl 0.14.1 takes each logarithm over three actions, however many it samples, and values those of the next state there.
    """

    def cql_loss(self, tensordict: TensorDictBase) -> tuple[Tensor, dict[str, Tensor]]:
        """The penalty, after `q_loss` has written Q of the recorded actions."""
        action_BSA, density_BS = self.sampled_actions(tensordict)
        observation_BSO = tensordict["observation"][:, None].expand(-1, action_BSA.shape[1], -1)
        every = TensorDict({"observation": observation_BSO, "action": action_BSA}, action_BSA.shape[:2])
        q_EBS = self._vmap_qvalue_networkN0(every, self.qvalue_network_params)["state_action_value"].squeeze(-1)
        recorded_EB = torch.stack([tensordict["pred_q1"], tensordict["pred_q2"]]).squeeze(-1)
        soft_maximum_EB = torch.logsumexp(q_EBS - density_BS, dim=-1) - math.log(action_BSA.shape[1])
        penalty_B = self.min_q_weight * (soft_maximum_EB - recorded_EB).sum(dim=0)
        return self._reduce_loss(penalty_B, tensordict=tensordict), {}

    @torch.no_grad()
    def sampled_actions(self, tensordict: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Actions (B, S, A) between -1 and 1, and the logarithm (B, S) of the density there of what each was drawn from."""
        batch, action_dim = tensordict["action"].shape
        uniform_KBA = 2 * torch.rand(self.num_random, batch, action_dim, device=tensordict["action"].device) - 1
        actions, densities = [uniform_KBA], [torch.full_like(uniform_KBA[..., 0], -action_dim * math.log(2))]
        for state in (tensordict, tensordict["next"]):
            with self.actor_network_params.data.to_module(self.actor_network, preserve_module_state=False):
                distribution = self.actor_network.get_dist(state.select("observation"))
            actions.append(distribution.rsample((self.num_random,)))
            densities.append(distribution.log_prob(actions[-1]))
        return torch.cat(actions).transpose(0, 1), torch.cat(densities).T


class ConservativeQLearning(nn.Module):
    """The actor, which is the policy's network, two Q networks with targets, the entropy's weight, and the loss of them all."""

    updates: Tensor

    def __init__(self, policy: CqlPolicy, device: torch.device) -> None:
        super().__init__()
        params, layout = policy.params, policy.layout
        self._squash, self._imitating_updates = policy.squash, params.imitating_updates
        self.losses = ConservativeLoss(
            make_clipped_actor(policy),
            [make_q(params.network, layout, device) for _ in range(2)],
            loss_function="l2",
            target_entropy=-float(layout.action_dim),
            deterministic_backup=True,  # Q is of the rewards alone, without the entropy (the paper's equation 3)
            min_q_weight=params.penalty_weight,
            num_random=params.sampled_actions,
            reduction="sum",
        )
        self.losses.make_value_estimator(gamma=params.discount, device=device)
        self._targets = SoftUpdate(self.losses, tau=params.target_rate)
        self.register_buffer("updates", torch.zeros((), dtype=torch.long, device=device))

    def loss(self, batch: Batch, training: bool) -> dict[str, Tensor]:
        """This process's share of the losses over the global batch; sum them over processes.

        The parts share no parameter and treat each other's networks as constant, so one optimiser of their sum is one for each.
        In training, the target networks first follow the last update of the others, and updates are counted.
        """
        imitates = self.updates < self._imitating_updates
        if training:
            self._targets.step()
            self.updates += 1
        count = all_reduce_sum(torch.full((), len(batch.reward_B), device=batch.reward_B.device))
        losses = self.losses(transitions_dict(batch, self._squash(batch.action_BA)))
        parts = {
            "actor_loss": torch.where(imitates, losses["loss_actor_bc"], losses["loss_actor"]),
            "q_loss": losses["loss_qvalue"],
            "penalty": losses["loss_cql"],
            "entropy_loss": losses["loss_alpha"],
        }
        shares = {name: part / count for name, part in parts.items()}
        return {"loss": torch.stack([*shares.values()]).sum(), **shares}
