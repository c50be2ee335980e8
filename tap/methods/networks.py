"""Actor, critics and transitions in the form that torchrl's losses take."""

import torch
from tensordict import TensorDict
from tensordict.nn import (
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import Tensor, nn
from torchrl.modules import MLP, IndependentNormal, TanhNormal, ValueOperator

from tap.data.windows import Layout
from tap.methods.squashed_policy import SquashedPolicy
from tap.methods.transitions import Batch
from tap.settings import NetworkParams

# The scale of the Gaussian: softplus of the network's output, biased so that 0 gives 1, and this at least.
SCALE_MAPPING, LEAST_SCALE = "biased_softplus_1.0", 0.1


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


class TanhLocation(nn.Module):
    """Bounds the location of a Gaussian, given with its scale, to between -1 and 1."""

    def forward(self, parameters: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        location_BA, scale_BA = parameters
        return location_BA.tanh(), scale_BA


class BoundedGaussian(nn.Module):
    """Splits a network's output into a location between -1 and 1 and a scale between LEAST_SCALE and 1."""

    def forward(self, output_BA: Tensor) -> tuple[Tensor, Tensor]:
        location_BA, scale_BA = output_BA.chunk(2, dim=-1)
        return location_BA.tanh(), LEAST_SCALE + (1 - LEAST_SCALE) * scale_BA.sigmoid()


class ClippedNormal(IndependentNormal):  # type: ignore[misc]  # torchrl is untyped where it is not installed
    """A Gaussian whose samples are clipped to between -1 and 1, as recorded actions are to their bounds.

    Densities remain those of the Gaussian, also at a bound, where a share of the samples is.
    """

    def rsample(self, sample_shape: torch.Size | tuple[int, ...] = ()) -> Tensor:
        sample: Tensor = super().rsample(sample_shape)
        return sample.clamp(-1, 1)


def make_squashed_actor(policy: SquashedPolicy) -> ProbabilisticTensorDictSequential:
    """The policy's network with its distribution over actions between -1 and 1, a squashed Gaussian."""
    return _actor(TanhNormal, policy.network, _extractor())


def make_clipped_actor(policy: SquashedPolicy) -> ProbabilisticTensorDictSequential:
    """The policy's network with a clipped Gaussian around its action, not squashed for the reason that `make_imitator` gives.

    Its scale is bounded: otherwise an actor that is rewarded for its entropy widens the Gaussian without end, and all samples
    are at a bound, where they no longer tell it which action is better.
    """
    return _actor(ClippedNormal, policy.network, BoundedGaussian())


def make_imitator(policy: SquashedPolicy) -> ProbabilisticTensorDictSequential:
    """The policy's network with a Gaussian around its action, as the authors of IQL have it.

    Where recorded actions are clipped to a bound, a squashed Gaussian is likeliest with a location far out: an actor that only
    imitates them would act nearer to the bound than they do in the mean.
    """
    return _actor(IndependentNormal, policy.network, _extractor(), TanhLocation())


def make_q(params: NetworkParams, layout: Layout, device: torch.device) -> ValueOperator:
    """Q of an observation and an action between -1 and 1."""
    network = _mlp(params, layout.observation_dim + layout.action_dim, device)
    return ValueOperator(network, in_keys=["observation", "action"], out_keys=["state_action_value"])


def make_value(params: NetworkParams, layout: Layout, device: torch.device) -> ValueOperator:
    """V of an observation."""
    return ValueOperator(_mlp(params, layout.observation_dim, device), in_keys=["observation"])


def _extractor() -> NormalParamExtractor:
    """Splits a network's output into location and scale."""
    return NormalParamExtractor(scale_mapping=SCALE_MAPPING, scale_lb=LEAST_SCALE)


def _actor(distribution: type, *modules: nn.Module) -> ProbabilisticTensorDictSequential:
    parameters = TensorDictModule(nn.Sequential(*modules), in_keys=["observation"], out_keys=["loc", "scale"])
    action = ProbabilisticTensorDictModule(in_keys=["loc", "scale"], out_keys=["action"], distribution_class=distribution)
    return ProbabilisticTensorDictSequential(parameters, action)


def _mlp(params: NetworkParams, inputs: int, device: torch.device) -> MLP:
    cells = [params.width] * params.layers
    return MLP(in_features=inputs, out_features=1, num_cells=cells, activation_class=nn.ReLU, device=device)
