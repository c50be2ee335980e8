"""D4RL's own environments, where they run: an adapter from the interface of gym before 0.26 to gymnasium's.

They need MuJoCo 2.1 and a Python that mujoco-py builds on. `fetch.environment: d4rl` in params.yaml chooses them.
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
    """An environment of the old interface: `reset()` gives an observation, `step` observation, reward, done and info.

    With `goal`, the environment's `target_goal` (G,) is appended to the observation (O,), as to AntMaze's data. Of an
    observation of more than `most` dimensions the first `most` are given.
    """

    def __init__(self, old: Any, goal: bool, most: int | None = None) -> None:
        self.old, self.goal, self.most = old, goal, most
        dim = len(range(old.observation_space.shape[0])[:most]) + (len(old.target_goal) if goal else 0)
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (dim,), np.float64)
        self.action_space = gymnasium.spaces.Box(old.action_space.low, old.action_space.high, dtype=np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode, which `seed` decides."""
        super().reset(seed=seed)
        if seed is not None:
            self.old.seed(seed)
            inner = self.old.unwrapped
            while hasattr(inner, "wrapped_env"):  # D4RL's locomotion proxies, whose own `seed` stops at them
                inner = inner.wrapped_env
                inner.seed(seed)
            np.random.seed(seed)  # D4RL draws starts and goals from numpy's global generator
        with contextlib.redirect_stdout(io.StringIO()):  # AntMaze prints its goals
            if self.goal:
                self.old.set_target()  # v0 draws a goal when it is made, which no seed would decide
            return self._observation(self.old.reset()), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Take one step; the end of an episode is a truncation where gym's TimeLimit says so."""
        observation, reward, done, info = self.old.step(action)
        truncated = bool(info.get("TimeLimit.truncated", False))
        return self._observation(observation), float(reward), bool(done) and not truncated, truncated, info

    def close(self) -> None:
        """Close the old environment."""
        self.old.close()

    def _observation(self, observation: np.ndarray) -> np.ndarray:
        parts = [observation[: self.most], *([self.old.target_goal] if self.goal else [])]
        return np.concatenate(parts, dtype=np.float64)


def make(dataset: str) -> OldGym:
    """D4RL's environment of a dataset. Raises ValueError where d4rl cannot be imported, or does not know the dataset."""
    try:
        # d4rl prints what it lacks, and mujoco-py raises a plain Exception where it finds no MuJoCo 2.1
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            importlib.import_module("d4rl")
            old = importlib.import_module("gym").make(dataset)
    except Exception as error:
        (reason, *_) = [line for line in str(error).splitlines() if line] or [type(error).__name__]
        raise ValueError(
            f"{dataset}: D4RL's own environment cannot be made here ({reason}): install d4rl with MuJoCo 2.1, "
            f"or remove `environment: d4rl` from datasets.{dataset}.fetch in params.yaml to use today's simulator"
        ) from error
    return OldGym(old, suite_of(dataset) == "antmaze", ANT_OBSERVATION_DIM if dataset.startswith("ant-") else None)
