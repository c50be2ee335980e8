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
from tap.methods.squashed_policy import IqlPolicy, SquashedPolicy
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


class SharedScale(nn.Module):
    """Location, bounded to between -1 and 1, and scale of a Gaussian; the scale is trained, and the same for all states."""

    def __init__(self, action_dim: int, device: torch.device) -> None:
        super().__init__()
        self.log_scale_A = nn.Parameter(torch.zeros(action_dim, device=device))

    def forward(self, location_BA: Tensor) -> tuple[Tensor, Tensor]:
        return location_BA.tanh(), self.log_scale_A.exp().clamp(min=LEAST_SCALE).expand_as(location_BA)


def make_actor(policy: SquashedPolicy) -> ProbabilisticTensorDictSequential:
    """The policy's network with its distribution over actions between -1 and 1, a squashed Gaussian."""
    extractor = NormalParamExtractor(scale_mapping=SCALE_MAPPING, scale_lb=LEAST_SCALE)
    return _actor(TanhNormal, policy.network, extractor)


def make_imitator(policy: IqlPolicy) -> ProbabilisticTensorDictSequential:
    """The policy's network with a Gaussian around its action, as the authors of IQL have it.

    Where recorded actions are clipped to a bound, a squashed Gaussian is likeliest with a location far out: an actor that only
    imitates them would act nearer to the bound than they do in the mean. And a scale that depends on the state lets it neglect
    the states where actions vary, since it divides their errors.
    """
    return _actor(IndependentNormal, policy.network, SharedScale(policy.action_dim, policy.centre_A.device))


def make_q(params: NetworkParams, layout: Layout, device: torch.device) -> ValueOperator:
    """Q of an observation and an action between -1 and 1."""
    network = _mlp(params, layout.observation_dim + layout.action_dim, device)
    return ValueOperator(network, in_keys=["observation", "action"], out_keys=["state_action_value"])


def make_value(params: NetworkParams, layout: Layout, device: torch.device) -> ValueOperator:
    """V of an observation."""
    return ValueOperator(_mlp(params, layout.observation_dim, device), in_keys=["observation"])


def _actor(distribution: type, *modules: nn.Module) -> ProbabilisticTensorDictSequential:
    parameters = TensorDictModule(nn.Sequential(*modules), in_keys=["observation"], out_keys=["loc", "scale"])
    action = ProbabilisticTensorDictModule(in_keys=["loc", "scale"], out_keys=["action"], distribution_class=distribution)
    return ProbabilisticTensorDictSequential(parameters, action)


def _mlp(params: NetworkParams, inputs: int, device: torch.device) -> MLP:
    cells = [params.width] * params.layers
    return MLP(in_features=inputs, out_features=1, num_cells=cells, activation_class=nn.ReLU, device=device)
