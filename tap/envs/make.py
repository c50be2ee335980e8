"""Makes the simulator of a dataset.

- Locomotion runs in gymnasium's `-v4` environments; `-v5` changes the rewards.
- Adroit runs in gymnasium-robotics' `AdroitHand*-v1` with D4RL's rewards (tap/envs/adroit.py).
- AntMaze runs in D4RL's geometry (tap/envs/antmaze.py).
- Stochastic locomotion runs in the `-v4` environments under a random force (tap/envs/stochastic.py).
- `d4rl` means D4RL's own environment of the dataset (tap/envs/d4rl_gym.py).
- Any other gymnasium id runs unchanged.
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
from tap.envs.flatten import FlatObservations, is_flat
from tap.envs.stochastic import STOCHASTIC

Environment = gymnasium.Env[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class State:
    """A simulator's state, as the seed of its last reset and the actions since.

    Replaying them restores everything in an environment: the solver's warm start, a randomised body, a step counter.
    """

    seed: int
    actions: tuple[np.ndarray, ...] = ()


class Simulator(gymnasium.Wrapper[np.ndarray, np.ndarray, np.ndarray, np.ndarray]):
    """A dataset's environment, which clips actions to the action space, records its State and computes D4RL's score.

    Arrays are copied on both sides: an environment may return the same array each step, or change its action.
    """

    def __init__(self, env: Environment, info: DatasetInfo) -> None:
        super().__init__(env)
        self.info = info
        assert isinstance(env.action_space, gymnasium.spaces.Box)
        self.box = env.action_space
        self.seed: int | None = None
        self.actions: list[np.ndarray] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode. `get_state` needs an episode that was started with a seed."""
        self.seed, self.actions = seed, []
        observation, info = self.env.reset(seed=seed, options=options)
        return np.array(observation), info

    def step(self, action: np.ndarray) -> Step:
        """Take one step with an action (A,) of finite numbers."""
        assert np.shape(action) == self.box.shape and np.isfinite(action).all(), action
        action = np.clip(action, self.box.low, self.box.high).astype(self.box.dtype)
        self.actions.append(action)
        observation, reward, terminated, truncated, info = self.env.step(action.copy())
        return np.array(observation), float(reward), bool(terminated), bool(truncated), info

    def get_normalized_score(self, score: float) -> float:
        """D4RL's method of this name: `normalized_score` / 100, so 0 for a random policy and 1 for an expert.

        Raises ValueError if the dataset has no reference scores.
        """
        return float(normalized_score(self.info, np.asarray(score))) / 100


def require_environment(info: DatasetInfo) -> str:
    """The name of a dataset's environment. Raises ValueError if it has none."""
    if info.environment is None:
        raise ValueError(f"{info.id} has no environment to evaluate in: set {environment_key(info)} to a gymnasium id")
    return info.environment


def environment_key(info: DatasetInfo) -> str:
    """Where params.yaml names a dataset's environment."""
    return f"datasets.{info.id}.fetch.environment in params.yaml"


def make_environment(info: DatasetInfo, **options: Any) -> Simulator:
    """The simulator of a dataset, truncated after `info.max_episode_steps` steps, or after the environment's own limit.

    Observations are (O,), flattened as in tap/envs/flatten.py; actions are (A,). `info.environment` is any gymnasium id;
    "package.module:Id" imports the module first; "d4rl" is D4RL's own environment. `info.environment_kwargs` and `options`,
    such as render_mode, go to `gymnasium.make`. Raises ValueError if the simulator does not exist, if its observations are not
    numbers in boxes, or if its actions are no flat box of floats.
    """
    environment = require_environment(info)
    mujoco.set_mju_user_warning(_log_mujoco_warning)
    for module in (registration, antmaze, d4rl_gym):  # registered by name; imported so that DVC tracks them
        gymnasium.register_envs(module)
    rule = D4RL_RULES.get(environment)
    if rule is not None:
        _register_robotics(info)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*out of date", category=DeprecationWarning)  # "use v5"
            name, options = environment, dict(info.environment_kwargs) | options
            if environment == "d4rl":
                name, options = "tap/D4RL-v0", options | {"dataset": info.id}
            env = gymnasium.make(name, max_episode_steps=info.max_episode_steps, disable_env_checker=True, **options)
    except Exception as error:  # users' code may raise anything
        reason, key = f"{type(error).__name__}: {error}", environment_key(info)
        raise ValueError(
            f"{info.id}: gymnasium cannot make {environment!r} ({reason}): correct {key}, or environment_kwargs beside it, the "
            "arguments of its constructor"
        ) from error
    if not is_flat(env.observation_space):
        env = FlatObservations(env, info)
    _check_actions(env, info)
    if env.spec is None or env.spec.max_episode_steps is None:
        raise ValueError(
            f"{info.id}: {environment} has no limit of its own: set datasets.{info.id}.fetch.max_episode_steps in params.yaml"
        )
    return Simulator(env if rule is None else D4RLReward(env, rule), info)


def make_known_environment(dataset: str, **options: Any) -> Simulator:
    """The simulator of a known dataset by its id: the entry point of `gymnasium.make("tap/DATASET")`."""
    return make_environment(known_datasets()[dataset], **options)


def _check_actions(env: Environment, info: DatasetInfo) -> None:
    if not is_flat(env.action_space):
        raise ValueError(
            f"{info.id}: {info.environment} has actions in {env.action_space}, but TAP needs a flat Box of floats: register a "
            f"wrapped environment and set {environment_key(info)} to its id"
        )


def _register_robotics(info: DatasetInfo) -> None:
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # it prints that rewards changed; D4RLReward restores them
            gymnasium.register_envs(importlib.import_module("gymnasium_robotics"))
    except ImportError as error:
        raise ValueError(f"{info.id}: {info.environment} needs gymnasium-robotics: pip install -e '.[robotics]'") from error


def _log_mujoco_warning(message: str) -> None:
    """Log a warning of MuJoCo, whose default handler writes a file MUJOCO_LOG.TXT into the current folder."""
    if "deprecated" not in message:
        logging.getLogger("mujoco").warning(message)


def get_state(env: Environment) -> State:
    """The current state of a simulator from `make_environment` that was reset with a seed."""
    assert isinstance(env, Simulator) and env.seed is not None
    return State(env.seed, tuple(env.actions))


def set_state(env: Environment, state: State) -> np.ndarray:
    """Bring a simulator of the same dataset into `state`; returns its observation."""
    observation, _ = env.reset(seed=state.seed)
    for action in state.actions:
        observation, *_ = env.step(action)
    return observation


def simulator(environment: str | None) -> str:
    """The package releases that the physics of `DatasetInfo.environment` depends on, and its random force, in one line."""
    packages = ("d4rl", "gym", "mujoco-py") if environment == "d4rl" else ("gymnasium", "gymnasium-robotics", "mujoco")
    installed = versions()
    facts = [f"{name} {installed[name]}" for name in packages if name in installed]
    if environment in STOCHASTIC:
        facts.append(f"random force of up to {STOCHASTIC[environment][1]:g} N")
    return ", ".join(facts)


def versions() -> dict[str, str]:
    """Release of each installed package that a score may depend on; the last three are for `environment: d4rl`."""
    found = {}
    for package in ("gymnasium", "gymnasium-robotics", "mujoco", "numpy", "torch", "d4rl", "gym", "mujoco-py"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
