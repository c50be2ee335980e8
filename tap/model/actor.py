"""The actor: the action that the dataset's behaviour takes at a state, without a code.

An addition to the paper. The mean of the codes' decoded actions under the prior is a coarse estimate of it: the errors of the
codes and of the prior add up. Networks for the action alone are more exact, which decides where a gait leaves little room.

Shapes: B batch, G ensemble members, O observation, A action.
"""

from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from tap.data.windows import Layout
from tap.distributed import all_reduce_sum
from tap.model.serialization import load_description, load_weights, save_model
from tap.settings import Section, TrainActorParams

# Where the absolute error takes over from the squared one, in stds of the actions. Minimisers of the squared error fall on
# Hopper's expert data after some 400 steps; those of the absolute error are less exact, and turn HalfCheetah over.
LINEAR_BEYOND = 0.5


class Actor(nn.Module):
    """An ensemble of MLPs with two hidden layers, as batched matrices: their mean maps observations to actions, normalised."""

    def __init__(self, params: TrainActorParams, layout: Layout) -> None:
        super().__init__()
        self.params = params
        layers = list(pairwise((layout.observation_dim, params.width, params.width, layout.action_dim)))
        self.weights = nn.ParameterList((2 * torch.rand(params.members, i, o) - 1) / i**0.5 for i, o in layers)
        # Flat, so that weight decay, which is for matrices, leaves them out.
        self.biases = nn.ParameterList(torch.zeros(params.members * o) for _, o in layers)

    def forward(self, observation_BO: Tensor) -> Tensor:
        """The members' mean action (B, A)."""
        return self._each(observation_BO.expand(self.params.members, -1, -1)).mean(dim=0)

    def loss(self, observation_BO: Tensor, action_BA: Tensor) -> dict[str, Tensor]:
        """This process's share of the mean Huber loss over the global batch, of which each member gets an equal part.

        Sum it over processes. B is a multiple of the number of members.
        """
        members, count = self.params.members, all_reduce_sum(torch.full((), action_BA.numel(), device=action_BA.device))
        error = functional.huber_loss(
            self._each(observation_BO.view(members, -1, observation_BO.shape[1])).flatten(0, 1),
            action_BA,
            reduction="sum",
            delta=LINEAR_BEYOND,
        )
        return {"loss": error / count}

    def held_out_loss(self, observation_BO: Tensor, action_BA: Tensor) -> dict[str, Tensor]:
        """As `loss`, of the members' mean."""
        count = all_reduce_sum(torch.full((), action_BA.numel(), device=action_BA.device))
        error = functional.huber_loss(self(observation_BO), action_BA, reduction="sum", delta=LINEAR_BEYOND)
        return {"loss": error / count}

    def _each(self, x: Tensor) -> Tensor:
        """Each member's actions (G, B, A) at its own observations (G, B, O)."""
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = torch.baddbmm(bias.view(len(weight), 1, -1), x if layer == 0 else x.relu(), weight)
        return x.float()


def member_shares(rows_B: Tensor, members: int, processes: int) -> Tensor:
    """A batch's rows (B,) in an order in which each process's share, in turn, has an equal part of each member's.

    So several processes train what one does. Raises ValueError if the batch cannot be divided so.
    """
    if len(rows_B) % (members * processes):
        raise ValueError(
            f"train_actor: fit.batch_size {len(rows_B)} is not a multiple of {members} members times {processes} processes"
        )
    return rows_B.view(members, processes, -1).transpose(0, 1).flatten()


class ActorDescription(Section):
    """actor.json."""

    params: TrainActorParams


def save_actor(folder: Path, actor: Actor) -> None:
    """Write actor.safetensors and actor.json."""
    save_model(folder, "actor", actor, {"params": actor.params.model_dump(mode="json")})


def load_actor(folder: Path, layout: Layout, device: torch.device) -> Actor:
    """Read what `save_actor` wrote, in evaluation mode. Raises ValueError if the folder holds no actor."""
    params = load_description(folder, "actor", ActorDescription).params
    return load_weights(folder, "actor", lambda: Actor(params, layout), device)
