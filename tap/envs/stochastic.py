"""Hopper and Walker2d with stochastic dynamics, which the paper leaves open (section "Limitations").

The task is that of 1R2R (Rigter et al., NeurIPS 2023) and L-MAP (Luo et al., ICLR 2025), as in L-MAP's published environments
(github.com/BaitingLuo/L-MAP, MIT): a random horizontal force acts on every body. Physics and rewards are otherwise those of
gymnasium's `-v4` environments.

    f_0 = 0,   f_t = clip(f_{t-1} + u_t, -F, F),   u_t uniform in [-F/10, F/10]

f_t (newtons) acts on each body in step t. It is not part of the observation.
"""

import warnings
from typing import Any

import gymnasium
import numpy as np

# The environment without the force, and F in newtons: L-MAP's high noise. Its moderate noise is 2.5 N and 7 N.
STOCHASTIC = {"tap/StochasticHopper-v0": ("Hopper-v4", 5.0), "tap/StochasticWalker2d-v0": ("Walker2d-v4", 12.0)}
MAX_CHANGE = 0.1  # of the force in one step, as a fraction of F


class RandomForce(gymnasium.Wrapper[np.ndarray, np.ndarray, np.ndarray, np.ndarray]):
    """A MuJoCo environment in which a random force along x acts on every body.

    The force is sampled from the environment's own generator, so that a reset's seed and the actions determine an episode.
    """

    def __init__(self, env: gymnasium.Env[np.ndarray, np.ndarray], max_force: float) -> None:
        super().__init__(env)
        self.max_force, self.force = max_force, 0.0  # newtons

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode, without a force."""
        self.force = 0.0
        return self.env.reset(seed=seed, options=options)

    def step(self, action: np.ndarray) -> tuple[np.ndarray, Any, bool, bool, dict[str, Any]]:
        """Take one step under the next force."""
        change = MAX_CHANGE * self.max_force * self.np_random.uniform(-1, 1)
        self.force = float(np.clip(self.force + change, -self.max_force, self.max_force))
        simulator: Any = self.unwrapped
        simulator.data.xfrc_applied[:, 0] = self.force
        return self.env.step(action)


def make(environment: str, max_force: float, **options: Any) -> RandomForce:
    """The environment of a gymnasium id with random forces of up to `max_force` newtons, without a step limit."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*out of date", category=DeprecationWarning)  # v5 has other rewards
        env = gymnasium.make(environment, disable_env_checker=True, **options)
    return RandomForce(env.unwrapped, max_force)
