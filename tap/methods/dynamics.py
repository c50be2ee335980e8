"""An ensemble of probabilistic dynamics models, as in MOPO (Yu et al., NeurIPS 2020, after Chua et al. 2018).

Each member maps a state and an action to a Gaussian of the change of state and the reward, and to the probability that the
episode ends there. It learns this from the data's terminals, so that training needs no simulator and no rule of one. Members
differ in their first weights alone: all are trained on the same batches.

Shapes: E members, B batch, O observation, A action, T = O + 1 targets: the change of each dimension, and the reward.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tap.data.windows import Normalizer
from tap.distributed import all_reduce_sum
from tap.methods.transitions import Batch, Transitions
from tap.settings import DynamicsParams

# The logarithm of the variance of normalised targets, at first; both bounds are trained, and drawn together by this weight.
LEAST_LOG_VARIANCE, GREATEST_LOG_VARIANCE, BOUNDS_WEIGHT = -10.0, 0.5, 0.01
MEASURED = 100_000  # transitions that statistics are taken of, spread evenly over the data


@dataclass(frozen=True)
class Step:
    """What follows B states and actions, in the units of a `Batch`."""

    next_observation_BO: Tensor
    reward_B: Tensor
    terminated_B: Tensor  # bool
    uncertainty_B: Tensor  # the largest norm, over elites, of the standard deviations of the T targets in the data's raw units


class DynamicsEnsemble(nn.Module):
    """The members, MLPs as batched matrices, and which of them are elites.

    Targets are normalised by their mean and standard deviation in `training`.
    """

    units_T: Tensor
    bounds_2O: Tensor  # the data's range of states, widened
    elites: Tensor  # indices of members

    def __init__(self, params: DynamicsParams, training: Transitions, device: torch.device) -> None:
        super().__init__()
        self.params, self.layout = params, training.layout
        self._targets = Normalizer.fit(_targets(batch).cpu().numpy() for batch in training.batches(MEASURED))
        raw = np.append(training.normalizer.std[training.layout.observation], 1 / training.reward_scale)
        self.register_buffer("units_T", torch.from_numpy(raw.astype(np.float32)), persistent=False)
        columns = training.layout.observation
        bounds = np.stack(training.normalizer.support_bounds(columns)).astype(np.float32)
        self.register_buffer("bounds_2O", training.normalizer.normalize(torch.from_numpy(bounds), columns), persistent=False)
        self.register_buffer("elites", torch.arange(params.elites))
        hidden = [params.network.width] * params.network.layers
        layers = list(pairwise([self.layout.observation_dim + self.layout.action_dim, *hidden, 2 * len(raw) + 1]))
        self.weights = nn.ParameterList((2 * torch.rand(params.members, i, o) - 1) / math.sqrt(i) for i, o in layers)
        # Flat, so that weight decay, which is for matrices, leaves them out.
        self.biases = nn.ParameterList(torch.zeros(params.members * o) for _, o in layers)
        self.least_T = nn.Parameter(torch.full((len(raw),), LEAST_LOG_VARIANCE))
        self.greatest_T = nn.Parameter(torch.full((len(raw),), GREATEST_LOG_VARIANCE))
        self.to(device)

    def forward(
        self, observation_BO: Tensor, action_BA: Tensor, members: slice | Tensor = slice(None)
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Mean and logarithm of the variance (E, B, T) of normalised targets, and the logit (E, B) of an end; of `members`."""
        # In float32 on a GPU too: rounding to bfloat16 is coarser than the noise of many simulators.
        with torch.autocast(observation_BO.device.type, enabled=False):
            x = torch.cat([observation_BO, action_BA], dim=-1).float()[None]
            for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
                weight, bias = weight[members], bias.view(self.params.members, 1, -1)[members]
                x = torch.baddbmm(bias, x.expand(len(weight), -1, -1) if layer == 0 else F.silu(x), weight)
            mean_EBT, raw_EBT, end_EB1 = torch.split(x, [len(self.units_T), len(self.units_T), 1], dim=-1)
            below_EBT = self.greatest_T - F.softplus(self.greatest_T - raw_EBT)
            return mean_EBT, self.least_T + F.softplus(below_EBT - self.least_T), end_EB1[..., 0]

    def log_likelihood(self, batch: Batch, beta: float = 0.0) -> Tensor:
        """Of each transition under each member, (E, B). The successor of a terminated one is unknown, and does not count.

        With `beta` the logarithm of a target's density is weighted by variance^beta, as a constant (Seitzer et al., ICLR
        2022): the likelihood divides errors by the variance, so that it learns a mean the slower, the worse that is.
        """
        mean_EBT, log_variance_EBT, end_EB = self(batch.observation_BO, batch.action_BA)
        target_BT = self._targets.normalize(_targets(batch))
        error_EBT = (target_BT - mean_EBT).square() * (-log_variance_EBT).exp()
        density_EBT = -(error_EBT + log_variance_EBT + math.log(2 * math.pi)) / 2 * (beta * log_variance_EBT.detach()).exp()
        known_BT = torch.ones_like(target_BT, dtype=torch.bool)
        known_BT[:, :-1] = ~batch.terminated_B[:, None]
        ended_EB = batch.terminated_B.float().expand_as(end_EB)
        surprise_EB: Tensor = F.binary_cross_entropy_with_logits(end_EB, ended_EB, reduction="none")
        likelihood_EB: Tensor = (density_EBT * known_BT).sum(dim=-1) - surprise_EB
        return likelihood_EB

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """This process's share of the mean negative log-likelihood with `params.beta`, of the global batch and all members."""
        share = all_reduce_sum(torch.full((), len(batch.reward_B), device=batch.reward_B.device))
        bounds = BOUNDS_WEIGHT * (self.greatest_T - self.least_T).sum()
        return {"loss": (len(batch.reward_B) * bounds - self.log_likelihood(batch, self.params.beta).sum()) / share}

    @torch.no_grad()
    def choose_elites(self, transitions: Transitions) -> None:
        """Those are elites under which `transitions` are likeliest."""
        parts = [self.log_likelihood(batch) for batch in transitions.batches(MEASURED)]
        self.elites.copy_(torch.cat(parts, dim=1).mean(dim=1).argsort(descending=True)[: self.params.elites])

    @torch.no_grad()
    def predict(self, observation_BO: Tensor, action_BA: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What elites predict, of the shapes of `forward`: mean and standard deviation of targets, and an end's probability."""
        mean_EBT, log_variance_EBT, end_EB = self(observation_BO, action_BA, self.elites)
        scale_T = torch.as_tensor(self._targets.std, device=mean_EBT.device)
        return self._targets.denormalize(mean_EBT), (log_variance_EBT / 2).exp() * scale_T, end_EB.sigmoid()

    def step(self, observation_BO: Tensor, action_BA: Tensor) -> Step:
        """Draw what follows from a random elite for each row, by torch's default generator.

        States stay within the data's range, widened by a margin: beyond it one error leads to the next, and values diverge.
        """
        mean_EBT, std_EBT, end_EB = self.predict(observation_BO, action_BA)
        rows_B = torch.arange(len(observation_BO), device=observation_BO.device)
        elite_B = torch.randint(len(self.elites), rows_B.shape, device=rows_B.device)
        target_BT = mean_EBT[elite_B, rows_B]
        target_BT = target_BT + std_EBT[elite_B, rows_B] * torch.randn_like(target_BT)
        return Step(
            next_observation_BO=(observation_BO + target_BT[:, :-1]).clamp(*self.bounds_2O),
            reward_B=target_BT[:, -1],
            terminated_B=torch.rand(rows_B.shape, device=rows_B.device) < end_EB[elite_B, rows_B],
            uncertainty_B=self.uncertainty(std_EBT),
        )

    def uncertainty(self, std_EBT: Tensor) -> Tensor:
        """The largest norm over members (B,) of standard deviations of targets, in the data's raw units."""
        norm_EB: Tensor = torch.linalg.vector_norm(std_EBT * self.units_T, dim=-1)
        return norm_EB.amax(dim=0)


def _targets(batch: Batch) -> Tensor:
    """(B, T)"""
    return torch.cat([batch.next_observation_BO - batch.observation_BO, batch.reward_B[:, None]], dim=-1)
