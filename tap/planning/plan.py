"""What planning returns."""

from dataclasses import dataclass

import numpy as np


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
