"""What policies of methods have in common: a network with its params, layout and Normalizer, in two files.

Shapes: N states, O observation, A action.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

import numpy as np
import torch
from torch import nn

from tap.data.observations import check_observations, ood_reasons
from tap.data.windows import Layout, Normalizer
from tap.model.serialization import load_description, load_weights, save_model
from tap.settings import Section

P = TypeVar("P", bound=Section)


class PolicyDescription(Section, Generic[P]):
    """NAME.json."""

    params: P
    layout: Layout
    normalizer: dict[str, list[float] | None]


@dataclass(frozen=True)
class Action:
    """The next H actions at each of N states, in the environment's units: of a policy that does not plan, one."""

    actions: np.ndarray  # (N, H, A)


class MethodPolicy(nn.Module):
    """A network that acts on raw observations. A subclass sets `name` and `params_type`, and acts by `plan` and `act`."""

    name: ClassVar[str]  # of its files
    params_type: ClassVar[type[Section]]

    def __init__(self, params: Any, layout: Layout, normalizer: Normalizer) -> None:
        super().__init__()
        self.params, self.layout, self.normalizer = params, layout, normalizer

    @property
    def observation_dim(self) -> int:
        return self.layout.observation_dim

    @property
    def action_dim(self) -> int:
        return self.layout.action_dim

    def check(self, observations: np.ndarray) -> None:
        """Raise ValueError as `check_observations` does."""
        check_observations(observations, self.observation_dim)

    def ood_reasons(self, observations: np.ndarray, plan: Action) -> list[dict[str, str]]:
        """Why each of N raw observations (N, O) is out of distribution; as the function `ood_reasons`."""
        return ood_reasons(observations, self.normalizer, self.layout.observation)

    def save(self, folder: Path) -> None:
        """Write NAME.safetensors and NAME.json."""
        layout = {"observation_dim": self.observation_dim, "action_dim": self.action_dim}
        facts = {"params": self.params.model_dump(mode="json"), "layout": layout, "normalizer": self.normalizer.to_json()}
        save_model(folder, self.name, self, facts)

    @classmethod
    def load(cls, folder: Path, device: str = "cpu") -> Self:
        """Read what `save` wrote, in evaluation mode. Raises ValueError if files are missing or damaged."""
        description = load_description(folder, cls.name, PolicyDescription[cls.params_type])  # type: ignore[name-defined]
        params, layout = description.params, description.layout
        try:
            normalizer = Normalizer.from_json(description.normalizer, layout.transition_dim)
        except ValueError as error:
            raise ValueError(f"{folder / cls.name}.json is damaged ({error}): train again with `tap run`") from None
        return load_weights(folder, cls.name, lambda: cls(params, layout, normalizer), torch.device(device))
