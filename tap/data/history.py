"""What has happened in an episode before the present step, for policies that act on more than the present observation.

Shapes: S steps so far, T the last of them, O observation, A action.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np


@dataclass(frozen=True)
class History:
    """The steps of one episode before the present one, in the environment's units; none at the start of the episode.

    Observations and actions may be those of the last steps alone: as many as the policy remembers.
    """

    observations: np.ndarray  # (T, O)
    actions: np.ndarray  # (T, A), as they were executed
    rewards: np.ndarray  # (S,), of all steps

    @classmethod
    def empty(cls, observation_dim: int, action_dim: int) -> Self:
        """The start of an episode."""
        return cls(np.zeros((0, observation_dim)), np.zeros((0, action_dim)), np.zeros(0))

    def after(self, observation: np.ndarray, action: np.ndarray, reward: float, remembered_steps: int) -> Self:
        """The history one step later: `action` (A,) was executed at `observation` (O,) and earned `reward`.

        It has the observations and actions of the last `remembered_steps` at most.
        """
        first = max(0, len(self.observations) + 1 - remembered_steps)
        return type(self)(
            np.concatenate([self.observations, observation[None]])[first:],
            np.concatenate([self.actions, action[None]])[first:],
            np.append(self.rewards, reward),
        )


def check_histories(
    histories: Sequence[History], count: int, observation_dim: int, action_dim: int, remembered_steps: int
) -> None:
    """Raise ValueError if there are not `count` histories, or one is not finite, of another shape, or lacks steps.

    `remembered_steps` are those whose observations and actions a history must have, as far as the episode has as many.
    """
    if len(histories) != count:
        raise ValueError(f"there are {len(histories)} histories for {count} observations: send one for each")
    for row, history in enumerate(histories):
        arrays = {"observations": history.observations, "actions": history.actions, "rewards": history.rewards}
        for name, dims in (("observations", (observation_dim,)), ("actions", (action_dim,)), ("rewards", ())):
            if arrays[name].ndim != 1 + len(dims) or arrays[name].shape[1:] != dims:
                wanted = f"(t, {dims[0]})" if dims else "(t,)"
                raise ValueError(f"the {name} of history {row} have shape {arrays[name].shape}; this policy needs {wanted}")
            if not (np.abs(arrays[name]) <= np.finfo(np.float32).max).all():
                raise ValueError(f"the {name} of history {row} contain values that are not finite in float32: fix them")
        observed, acted, steps = map(len, arrays.values())
        if not min(remembered_steps, steps) <= observed == acted <= steps:
            raise ValueError(
                f"history {row} has {observed} observations, {acted} actions and {steps} rewards: send the rewards of all "
                f"steps of the episode so far, observations and actions at least of the last {min(remembered_steps, steps)}"
            )
