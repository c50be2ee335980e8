"""A policy that acts on the present observation alone.

Shapes: N states, B batch, O observation, A action.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tap.methods.policy import Action, MethodPolicy


class ReactivePolicy(MethodPolicy):
    """An action for each observation, without memory.

    A subclass's `forward` maps observations (B, O) to actions (B, A), both normalised.
    """

    @torch.no_grad()
    def plan(self, observations: np.ndarray, generators: Sequence[torch.Generator]) -> Action:
        """The action at each of N raw observations (N, O); `generators` are not used. Raises ValueError as `check` does."""
        self.check(observations)
        raw_NO = torch.as_tensor(observations, dtype=torch.float32, device=next(self.parameters()).device)
        return Action(self.decide(raw_NO)[:, None].cpu().numpy())

    def decide(self, raw_NO: Tensor) -> Tensor:
        """The action (N, A) at each raw observation (N, O), in the environment's units."""
        normal_NA: Tensor = self(self.normalizer.normalize(raw_NO, self.layout.observation))
        return self.normalizer.denormalize(normal_NA, self.layout.action)

    def act(self, observations: np.ndarray, generators: Sequence[torch.Generator]) -> np.ndarray:
        """The action (N, A) at each observation; as `plan`."""
        return self.plan(observations, generators).actions[:, 0]
