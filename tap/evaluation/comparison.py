"""A plan compared with the simulator: both start in the same state and take the same actions.

Shapes: H plan steps, n <= H simulated steps, O observation, A action.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from tap.envs.make import Environment, State, set_state


@dataclass(frozen=True)
class Comparison:
    """A plan, and the simulator's response to its actions. The simulation has n <= H steps: it stops when the episode ends."""

    title: str
    state: State
    planned_observations: np.ndarray  # (H, O)
    planned_actions: np.ndarray  # (H, A)
    planned_rewards: np.ndarray  # (H,)
    simulated_observations: np.ndarray  # (n, O)
    simulated_rewards: np.ndarray  # (n,)

    @property
    def state_prediction_error(self) -> float:
        """Mean squared error of the planned states, over steps and dimensions."""
        return state_prediction_error(self.planned_observations, self.simulated_observations)

    def as_json(self) -> dict[str, Any]:
        """Nested lists, under the keys "title", "state", "planned" and "simulated"."""
        return {
            "title": self.title,
            "state": {"seed": self.state.seed, "actions": [action.tolist() for action in self.state.actions]},
            "planned": {
                "observations": self.planned_observations.tolist(),
                "actions": self.planned_actions.tolist(),
                "rewards": self.planned_rewards.tolist(),
            },
            "simulated": {"observations": self.simulated_observations.tolist(), "rewards": self.simulated_rewards.tolist()},
        }


def follow(env: Environment, state: State, actions_HA: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Execute `actions_HA` in the simulator from `state`: observations (n, O) before each action, and rewards (n,).

    n <= H: execution stops when the episode ends.
    """
    observation = set_state(env, state)
    observations, rewards = [], []
    for action in actions_HA:
        observations.append(observation)
        observation, reward, terminated, truncated, _ = env.step(action)
        rewards.append(float(reward))
        if terminated or truncated:
            break
    return np.array(observations), np.array(rewards)


def state_prediction_error(planned_HO: np.ndarray, simulated_nO: np.ndarray) -> float:
    """Mean squared error of planned states over the n simulated steps and over dimensions."""
    return float(np.mean((planned_HO[: len(simulated_nO)] - simulated_nO) ** 2))
