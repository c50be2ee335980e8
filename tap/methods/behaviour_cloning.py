"""Behaviour cloning: a network that imitates the data's actions, the yardstick for methods that plan.

Actions are deterministic: the network predicts the mean of the data's actions given the observation, the minimiser of the
squared error. Observations and actions are normalised; `plan` and `act` take and return them in the environment's units.

Shapes: N states, B batch, O observation, A action.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn

from tap.data.observations import check_observations, ood_reasons
from tap.data.windows import Layout, Normalizer
from tap.distributed import all_reduce_sum
from tap.model.serialization import load_description, load_weights, save_model
from tap.settings import Section, TrainBcParams


@dataclass(frozen=True)
class Action:
    """An action for each of N states, in the environment's units: a plan of one step."""

    actions: np.ndarray  # (N, 1, A)


class BcDescription(Section):
    """bc.json."""

    params: TrainBcParams
    layout: Layout
    normalizer: dict[str, list[float] | None]


class BehaviourCloning(nn.Module):
    """A multilayer perceptron from observations to actions, and the Normalizer of both."""

    def __init__(self, params: TrainBcParams, layout: Layout, normalizer: Normalizer) -> None:
        super().__init__()
        self.params, self.layout, self.normalizer = params, layout, normalizer
        widths = [layout.observation_dim, *[params.network.width] * params.network.layers]
        hidden = [module for pair in itertools.pairwise(widths) for module in (nn.Linear(*pair), nn.GELU())]
        self.network = nn.Sequential(*hidden, nn.Linear(widths[-1], layout.action_dim))

    @property
    def observation_dim(self) -> int:
        return self.layout.observation_dim

    @property
    def action_dim(self) -> int:
        return self.layout.action_dim

    def forward(self, observation_BO: Tensor) -> Tensor:
        """Normalised actions (B, A) for normalised observations."""
        action_BA: Tensor = self.network(observation_BO)
        return action_BA

    def loss(self, observation_BO: Tensor, action_BA: Tensor) -> dict[str, Tensor]:
        """This process's share of the mean squared error over the global batch, both normalised; sum it over processes."""
        count = all_reduce_sum(torch.full((), action_BA.numel(), device=action_BA.device))
        return {"loss": (self(observation_BO).float() - action_BA).square().sum() / count}

    @torch.no_grad()
    def plan(self, observations: np.ndarray, generators: Sequence[torch.Generator]) -> Action:
        """The action at each of N raw observations (N, O); `generators` are not used. Raises ValueError as `check` does."""
        self.check(observations)
        raw_NO = torch.as_tensor(observations, dtype=torch.float32, device=next(self.parameters()).device)
        action_NA = self.normalizer.denormalize(
            self(self.normalizer.normalize(raw_NO, self.layout.observation)), self.layout.action
        )
        return Action(action_NA[:, None].cpu().numpy())

    def act(self, observations: np.ndarray, generators: Sequence[torch.Generator]) -> np.ndarray:
        """The action (N, A) at each observation; as `plan`."""
        return self.plan(observations, generators).actions[:, 0]

    def check(self, observations: np.ndarray) -> None:
        """Raise ValueError as `check_observations` does."""
        check_observations(observations, self.observation_dim)

    def ood_reasons(self, observations: np.ndarray) -> list[dict[str, str]]:
        """Why each of N raw observations (N, O) is out of distribution; as the function `ood_reasons`."""
        return ood_reasons(observations, self.normalizer, self.layout.observation)

    def save(self, folder: Path) -> None:
        """Write bc.safetensors and bc.json."""
        layout = {"observation_dim": self.observation_dim, "action_dim": self.action_dim}
        facts = {"params": self.params.model_dump(mode="json"), "layout": layout, "normalizer": self.normalizer.to_json()}
        save_model(folder, "bc", self, facts)

    @classmethod
    def load(cls, folder: Path, device: str = "cpu") -> Self:
        """Read what `save` wrote, in evaluation mode. Raises ValueError if files are missing or damaged."""
        description = load_description(folder, "bc", BcDescription)
        params, layout = description.params, description.layout
        try:
            normalizer = Normalizer.from_json(description.normalizer, layout.transition_dim)
        except ValueError as error:
            raise ValueError(f"{folder / 'bc.json'} is damaged ({error}): train again with `tap run`") from None
        return load_weights(folder, "bc", lambda: cls(params, layout, normalizer), torch.device(device))
