"""A policy that acts on the present observation alone.

Shapes: N states, B batch, O observation, A action.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

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


class ReactivePolicy(nn.Module):
    """An action for each observation, without memory.

    A subclass sets `name` and `params_type`, and its `forward` maps observations (B, O) to actions (B, A), both normalised.
    """

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

    @torch.no_grad()
    def plan(self, observations: np.ndarray, generators: Sequence[torch.Generator]) -> Action:
        """The action at each of N raw observations (N, O); `generators` are not used. Raises ValueError as `check` does."""
        self.check(observations)
        raw_NO = torch.as_tensor(observations, dtype=torch.float32, device=next(self.parameters()).device)
        normal_NA: Tensor = self(self.normalizer.normalize(raw_NO, self.layout.observation))
        return Action(self.normalizer.denormalize(normal_NA, self.layout.action)[:, None].cpu().numpy())

    def act(self, observations: np.ndarray, generators: Sequence[torch.Generator]) -> np.ndarray:
        """The action (N, A) at each observation; as `plan`."""
        return self.plan(observations, generators).actions[:, 0]

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
