"""Model-based offline policy optimisation (Yu et al., NeurIPS 2020), with torchrl's loss of soft actor-critic.

The actor acts in an ensemble of dynamics models, from recorded states and for a few steps, and each reward there is lowered by
the model's uncertainty. Actor and critics are trained on these transitions and a few recorded ones.

Shapes: B batch, O observation, A action.
"""

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torchrl.objectives import SACLoss, SoftUpdate

from tap.distributed import all_reduce_sum, world_size
from tap.methods.dynamics import DynamicsEnsemble
from tap.methods.model_rollouts import ModelRollouts
from tap.methods.networks import make_q, make_squashed_actor, transitions_dict
from tap.methods.squashed_policy import MopoPolicy
from tap.methods.transitions import Batch, concatenate


class ModelBasedOptimization(nn.Module):
    """The actor, which is the policy's network, two Q networks with targets, the entropy's weight, and the model rollouts.

    The dynamics are not trained here, and no part of the module.
    """

    def __init__(self, policy: MopoPolicy, dynamics: DynamicsEnsemble, reward_scale: float, device: torch.device) -> None:
        super().__init__()
        params, layout = policy.params, policy.layout
        self._policy_squash, self._policy_stretch, self._step = policy.squash, policy.stretch, dynamics.step
        self._penalty_weight, self._real_share = reward_scale * params.penalty_weight, params.real_share
        actor = make_squashed_actor(policy)
        self._distribution = actor.get_dist
        self.losses = SACLoss(
            actor,
            [make_q(params.network, layout, device) for _ in range(2)],
            loss_function="l2",
            target_entropy=-float(layout.action_dim),
            reduction="sum",
        )
        self.losses.make_value_estimator(gamma=params.discount, device=device)
        # torchrl 0.14.1 makes this buffer when it is first read; without it, a checkpoint cannot be loaded.
        assert self.losses.target_entropy == -layout.action_dim
        self._targets = SoftUpdate(self.losses, tau=params.target_rate)
        rollouts = params.fit.batch_size_per_process(world_size())
        self.rollouts = ModelRollouts(layout, params.horizon, rollouts, params.kept_updates, device)

    def loss(self, batch: Batch, training: bool) -> dict[str, Tensor]:
        """This process's share of the losses over the global batch; sum them over processes.

        In training, the target networks first follow the last update of the others, the rollouts take a step, and all but a
        share of the batch is replaced by transitions of the rollouts; those that start anew do so at the batch's states.
        Otherwise the losses are those of the recorded batch.
        The parts share no parameter and treat each other's networks as constant, so one optimiser of their sum is one for each.
        """
        measured = {}
        size = len(batch.reward_B)
        count = all_reduce_sum(torch.full((), size, device=batch.reward_B.device))
        if training:
            self._targets.step()
            penalty_B = self.rollouts.advance(batch.observation_BO, self._act, self._step, self._penalty_weight)
            measured["penalty"] = penalty_B.sum() / count
            recorded = round(self._real_share * size)
            batch = concatenate(batch.first(recorded), self.rollouts.sample(size - recorded))
        losses = self.losses(transitions_dict(batch, self._policy_squash(batch.action_BA)))
        parts = {"actor_loss": losses["loss_actor"], "q_loss": losses["loss_qvalue"], "entropy_loss": losses["loss_alpha"]}
        shares = {name: part / count for name, part in parts.items()}
        return {"loss": torch.stack([*shares.values()]).sum(), **shares, **measured}

    def _act(self, observation_BO: Tensor) -> Tensor:
        """Normalised actions (B, A) that the actor draws."""
        states = TensorDict({"observation": observation_BO}, len(observation_BO))
        action_BA: Tensor = self._distribution(states).sample()
        return self._policy_stretch(action_BA)
