"""A reflex: a network distilled from a planner's decisions, for where there is no time to plan.

It imitates as behaviour cloning does, but not the data's actions: those that TAP's planner would take at the data's states. It
carries the planner along: with a budget of time it plans if that is enough, and else acts by reflex.

Shapes: N states, O observation, A action.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Self

import numpy as np
import torch

from tap.methods.behaviour_cloning import BehaviourCloning
from tap.methods.policy import Action
from tap.planning.anytime import Anytime
from tap.planning.plan import Planned
from tap.planning.planner import MAX_BATCH_STATES
from tap.planning.policy import Policy


@dataclass(frozen=True)
class TimedAction(Action):
    """An action that was found within a budget of time."""

    searched: np.ndarray  # (N,) the search of the planner that found it, or "reflex"


class Reflex(BehaviourCloning):
    """A multilayer perceptron from observations to a planner's actions, and the planner."""

    name: ClassVar[str] = "reflex"
    planner: Policy  # set by `load`, and by who trains

    @property
    def budget_ms(self) -> float:
        """The budget of the planner's params: without one, every action is the reflex's."""
        return self.planner.budget_ms

    def plan_within(self, observations: np.ndarray, generators: Sequence[torch.Generator], seconds: float) -> TimedAction:
        """The action of the widest search that fits, at each observation, in `seconds` for all of N; or that of the reflex.

        Raises ValueError as `check` does.
        """
        self.check(observations)
        clock = self.anytime.clock
        end, actions, searched = clock() + seconds, [], []
        for row, generator in enumerate(generators):
            share = (end - clock()) / (len(generators) - row)
            found = self.anytime.plan(observations[row : row + 1], generator, share)
            searched.append(list(found)[-1])
            actions.append(found[searched[-1]].actions[:, :1])
        return TimedAction(np.concatenate(actions), np.array(searched))

    @cached_property
    def anytime(self) -> Anytime[Planned]:
        """The reflex, and the searches of the planner."""

        def reflex(observation: np.ndarray, generator: torch.Generator) -> Planned:
            return self.plan(observation, [generator])

        return Anytime({"reflex": reflex, **self.planner.anytime.searches})

    def save(self, folder: Path) -> None:
        """Write reflex.safetensors and reflex.json, and the planner's files beside them."""
        super().save(folder)
        self.planner.save(folder)

    @classmethod
    def load(cls, folder: Path, device: str = "cpu") -> Self:
        """Read what `save` wrote, in evaluation mode. Raises ValueError if files are missing or damaged."""
        reflex = super().load(folder, device)
        reflex.planner = Policy.load(folder, device)
        return reflex


def decisions(policy: Policy, observations: np.ndarray, generator: torch.Generator) -> np.ndarray:
    """The first action (N, A) of the policy's plan at each of N raw observations (N, O); `generator` is used by all in turn."""
    batches = range(0, len(observations), MAX_BATCH_STATES)
    states = (observations[first : first + MAX_BATCH_STATES] for first in batches)
    return np.concatenate([policy.act(batch, [generator] * len(batch)) for batch in states])
