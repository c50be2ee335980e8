"""The simulators that stand for D4RL's environments, and its normalised score.

Locomotion runs on gymnasium's `-v4` environments: `-v5` changes the rewards. Adroit runs on gymnasium-robotics'
`AdroitHand*-v1` with D4RL's rewards put back: release 1.4.2 pays for distance between palm and object in door, hammer and
relocate, and does not end a pen episode when the pen is dropped. AntMaze is this project's own (tap/envs/antmaze.py). Any other
gymnasium id runs as it is, and `d4rl` stands for D4RL's own environment of the dataset (tap/envs/d4rl_gym.py).
"""

import contextlib
import importlib
import importlib.metadata
import io
import logging
import warnings
from dataclasses import dataclass
from typing import Any

import gymnasium
import mujoco
import numpy as np

from tap.data.catalog import DatasetInfo, known_datasets
from tap.data.score import normalized_score
from tap.envs import antmaze, d4rl_gym, registration
from tap.envs.adroit import D4RL_RULES, D4RLReward, Step


@dataclass(frozen=True)
class State:
    """How a simulator came to its present state: the seed of its reset and the actions since.

    Replaying them restores whatever an environment holds, be it the solver's warm start, a randomised body or a step counter.
    """

    seed: int
    actions: tuple[np.ndarray, ...] = ()


class Simulator(gymnasium.Wrapper[np.ndarray, np.ndarray, np.ndarray, np.ndarray]):
    """A dataset's environment: clips actions into the action space, remembers its State, knows D4RL's score."""

    def __init__(self, env: gymnasium.Env[np.ndarray, np.ndarray], info: DatasetInfo) -> None:
        super().__init__(env)
        self.info = info
        assert isinstance(env.action_space, gymnasium.spaces.Box)
        self.box = env.action_space
        self.seed: int | None = None
        self.actions: list[np.ndarray] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode; its State exists only if `seed` is given."""
        self.seed, self.actions = seed, []
        return self.env.reset(seed=seed, options=options)

    def step(self, action: np.ndarray) -> Step:
        """Take one step with an action (A,) of finite numbers."""
        assert np.shape(action) == self.box.shape and np.isfinite(action).all(), action
        action = np.clip(action, self.box.low, self.box.high).astype(self.box.dtype)
        self.actions.append(action)
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, float(reward), bool(terminated), bool(truncated), info

    def get_normalized_score(self, score: float) -> float:
        """D4RL's method of this name: a return as a fraction, 0 for a random policy, 1 for an expert.

        It is `normalized_score` / 100. Raises ValueError where the dataset has no reference scores.
        """
        return float(normalized_score(self.info, np.asarray(score))) / 100


def require_environment(info: DatasetInfo) -> str:
    """The name of a dataset's environment. Raises ValueError where it has none."""
    if info.environment is None:
        raise ValueError(f"{info.id} has no environment to evaluate in: set {_key(info)} to a gymnasium id")
    return info.environment


def _key(info: DatasetInfo) -> str:
    return f"datasets.{info.id}.fetch.environment in params.yaml"


def make_environment(info: DatasetInfo, **options: Any) -> Simulator:
    """The simulator of a dataset, truncated after `info.max_episode_steps` steps.

    Observations are (O,), actions (A,). `info.environment` is any gymnasium id; "package.module:Id" imports the module first;
    "d4rl" is D4RL's own environment. `options`, such as render_mode, go to `gymnasium.make`.
    Raises ValueError where there is no such simulator, or where it does not speak in flat vectors of real numbers.
    """
    environment, key = require_environment(info), _key(info)
    mujoco.set_mju_user_warning(_log_mujoco_warning)
    for module in (registration, antmaze, d4rl_gym):  # registered by name; imported to let DVC see what a score depends on
        gymnasium.register_envs(module)
    rule = D4RL_RULES.get(environment)
    if rule is not None:
        _register_robotics(info)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*out of date", category=DeprecationWarning)  # "use v5"
            if environment == "d4rl":
                name, options = "tap/D4RL-v0", options | {"dataset": info.id}
            else:
                name = environment
            env = gymnasium.make(name, max_episode_steps=info.max_episode_steps, disable_env_checker=True, **options)
    except (gymnasium.error.Error, ImportError) as error:
        raise ValueError(f"{info.id}: gymnasium cannot make {info.environment!r} ({error}): correct {key}") from error
    for name, space in (("observations", env.observation_space), ("actions", env.action_space)):
        flat = isinstance(space, gymnasium.spaces.Box) and len(space.shape) == 1 and np.issubdtype(space.dtype, np.floating)
        if not flat:
            raise ValueError(
                f"{info.id}: {info.environment} has {name} in {space}, but TAP needs a flat Box of floats: register a wrapped "
                f"environment (by gymnasium.wrappers.FlattenObservation, for one) and name it as {key}"
            )
    return Simulator(env if rule is None else D4RLReward(env, rule), info)


def make_known_environment(dataset: str, **options: Any) -> Simulator:
    """The simulator of a known dataset, by its id: what `gymnasium.make("tap/DATASET")` gives (tap/envs/registration.py)."""
    return make_environment(known_datasets()[dataset], **options)


def _register_robotics(info: DatasetInfo) -> None:
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # the import prints that the rewards changed, which D4RLReward mends
            gymnasium.register_envs(importlib.import_module("gymnasium_robotics"))
    except ImportError as error:
        raise ValueError(
            f"{info.id}: {info.environment} needs gymnasium-robotics, this project's extra: pip install -e '.[robotics]'"
        ) from error


def _log_mujoco_warning(message: str) -> None:
    """MuJoCo's own handler would write a file MUJOCO_LOG.TXT into the current folder."""
    if "deprecated" not in message:
        logging.getLogger("mujoco").warning(message)


def get_state(env: gymnasium.Env[np.ndarray, np.ndarray]) -> State:
    """The present state of a simulator from `make_environment` that was reset with a seed."""
    assert isinstance(env, Simulator) and env.seed is not None
    return State(env.seed, tuple(env.actions))


def set_state(env: gymnasium.Env[np.ndarray, np.ndarray], state: State) -> np.ndarray:
    """Bring a simulator of the same dataset into `state`; returns its observation there."""
    observation, _ = env.reset(seed=state.seed)
    for action in state.actions:
        observation, *_ = env.step(action)
    return observation


def simulator(environment: str | None) -> str:
    """The releases that the physics of `DatasetInfo.environment` depends on, in one line."""
    packages = ("d4rl", "gym", "mujoco-py") if environment == "d4rl" else ("gymnasium", "gymnasium-robotics", "mujoco")
    installed = versions()
    return ", ".join(f"{name} {installed[name]}" for name in packages if name in installed)


def versions() -> dict[str, str]:
    """Release of each installed package that a score may depend on; the last three run `environment: d4rl`."""
    found = {}
    for package in ("gymnasium", "gymnasium-robotics", "mujoco", "numpy", "torch", "d4rl", "gym", "mujoco-py"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
