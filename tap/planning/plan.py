"""What planning returns, and what every policy returns."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np


class Planned(Protocol):
    """What a policy is about to do: the next H actions at each of N states, and from a planner more."""

    @property
    def actions(self) -> np.ndarray:
        """(N, H, A), in the environment's units."""
        ...


@dataclass(frozen=True)
class Plan:
    """A plan for each of N states, in the environment's units. Shapes: H steps, M codes, O observation, A action."""

    observations: np.ndarray  # (N, H, O), the first is the model's reconstruction of the given state
    actions: np.ndarray  # (N, H, A)
    rewards: np.ndarray  # (N, H)
    returns_to_go: np.ndarray  # (N, H)
    codes: np.ndarray  # (N, M); of a mean over codes, the one with the highest weight
    log_probability: np.ndarray  # (N,), ln p(z_1..z_M | s_1) of these codes
    predicted_return: np.ndarray  # (N,), discounted
    score: np.ndarray  # (N,), the objective: predicted return and likelihood penalty
