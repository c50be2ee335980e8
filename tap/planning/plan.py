"""What planning returns, and what every policy returns; policies that remember, and those that plan within a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from tap.data.history import History


class Planned(Protocol):
    """What a policy is about to do: the next H actions at each of N states, and from a planner more."""

    @property
    def actions(self) -> np.ndarray:
        """(N, H, A), in the environment's units."""
        ...


@runtime_checkable
class Remembering(Protocol):
    """A policy that acts on the steps before an observation, too. Others have no `remembered_steps`, and get no histories."""

    @property
    def remembered_steps(self) -> int:
        """How many of the last steps it reads the observations and actions of; it reads all rewards."""
        ...

    def plan(
        self, observations: np.ndarray, generators: Sequence[torch.Generator], histories: Sequence[History] | None = None, /
    ) -> Planned:
        """Plans from raw observations (N, O), each with its history; without any, each at the start of an episode."""
        ...

    def check(self, observations: np.ndarray, histories: Sequence[History] | None = None, /) -> None:
        """Raise ValueError for observations or histories that it cannot act on."""
        ...


@runtime_checkable
class Searched(Planned, Protocol):
    """What a policy is about to do, found within a budget of time."""

    @property
    def searched(self) -> np.ndarray:
        """(N,) which search found each: a name of `searches_within` (tap/planning/anytime.py), or "reflex"."""
        ...


@runtime_checkable
class Timed(Protocol):
    """A policy that can plan within a budget of time."""

    @property
    def budget_ms(self) -> float:
        """The budget of a request that states none; 0: no budget."""
        ...

    def plan_within(self, observations: np.ndarray, generators: Sequence[torch.Generator], seconds: float, /) -> Searched:
        """The best plans from raw observations (N, O) that are found in `seconds` for all of them."""
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


@dataclass(frozen=True)
class TimedPlan(Plan):
    """A plan that was found within a budget of time."""

    searched: np.ndarray  # (N,) which search found it
