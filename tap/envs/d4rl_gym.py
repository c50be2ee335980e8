"""D4RL's own environments: an adapter from the interface of gym before 0.26 to gymnasium's.

They need MuJoCo 2.1 and a Python version that mujoco-py supports. `fetch.environment: d4rl` in params.yaml selects them.
"""

import contextlib
import importlib
import io
from typing import Any

import gymnasium
import numpy as np

from tap.data.catalog import ANT_OBSERVATION_DIM
from tap.settings import suite_of


class OldGym(gymnasium.Env[np.ndarray, np.ndarray]):
    """Adapts an environment whose `reset()` returns an observation and whose `step` returns observation, reward, done, info.

    With `goal`, the environment's `target_goal` (G,) is appended to the observation (O,), as in AntMaze's data. With
    `max_observation_dim`, only that many leading dimensions of the observation are kept.
    """

    def __init__(self, old: Any, goal: bool, max_observation_dim: int | None = None) -> None:
        self.old, self.goal, self.max_observation_dim = old, goal, max_observation_dim
        dim = len(range(old.observation_space.shape[0])[:max_observation_dim]) + (len(old.target_goal) if goal else 0)
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (dim,), np.float64)
        self.action_space = gymnasium.spaces.Box(old.action_space.low, old.action_space.high, dtype=np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode; equal seeds give equal episodes."""
        super().reset(seed=seed)
        if seed is not None:
            self.old.seed(seed)
            inner = self.old.unwrapped
            while hasattr(inner, "wrapped_env"):  # `seed` of D4RL's locomotion proxies does not reach it
                inner = inner.wrapped_env
                inner.seed(seed)
            np.random.seed(seed)  # D4RL samples starts and goals from numpy's global generator
        with contextlib.redirect_stdout(io.StringIO()):  # AntMaze prints its goals
            if self.goal:
                self.old.set_target()  # v0 samples its goal when it is made, before any seed is set
            return self._observation(self.old.reset()), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Take one step; an episode ended by gym's TimeLimit is truncated, any other terminated."""
        observation, reward, done, info = self.old.step(action)
        truncated = bool(info.get("TimeLimit.truncated", False))
        return self._observation(observation), float(reward), bool(done) and not truncated, truncated, info

    def close(self) -> None:
        """Close the old environment."""
        self.old.close()

    def _observation(self, observation: np.ndarray) -> np.ndarray:
        parts = [observation[: self.max_observation_dim], *([self.old.target_goal] if self.goal else [])]
        return np.concatenate(parts, dtype=np.float64)


def make(dataset: str) -> OldGym:
    """D4RL's environment of a dataset. Raises ValueError if d4rl cannot be imported or has no such dataset."""
    try:
        # d4rl prints missing dependencies, and mujoco-py raises a plain Exception if it finds no MuJoCo 2.1
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            importlib.import_module("d4rl")
            old = importlib.import_module("gym").make(dataset)
    except Exception as error:
        (reason, *_) = [line for line in str(error).splitlines() if line] or [type(error).__name__]
        raise ValueError(
            f"{dataset}: D4RL's own environment cannot be made here ({reason}): install d4rl with MuJoCo 2.1, "
            f"or remove `environment: d4rl` from datasets.{dataset}.fetch in params.yaml to use the current simulator"
        ) from error
    return OldGym(old, suite_of(dataset) == "antmaze", ANT_OBSERVATION_DIM if dataset.startswith("ant-") else None)
