"""A trial of a dataset's environment before hours of training: what is wrong with it is found in a reset and a few steps."""

from collections.abc import Iterator
from contextlib import closing, contextmanager

import numpy as np

from tap.data.action_bounds import ActionBounds
from tap.data.catalog import DatasetInfo
from tap.envs.make import Simulator, environment_key, make_environment

STEPS = 5
INTERFACE = (
    "reset(seed=..., options=...) must return (observation, info), and step(action) must return "
    "(observation, reward, terminated, truncated, info)"
)


def check_environment(info: DatasetInfo, observation_dim: int, action_dim: int) -> ActionBounds | None:
    """The bounds of the actions in the environment for evaluation; None for a dataset without one.

    Raises ValueError if it cannot be made, has other dimensions than the data, does not have gymnasium's interface, or returns
    what is not finite.
    """
    if info.environment is None:
        return None
    with closing(make_environment(info)) as environment:
        for name, space, dim in (
            ("observations", environment.observation_space, observation_dim),
            ("actions", environment.action_space, action_dim),
        ):
            if space.shape != (dim,):
                raise ValueError(
                    f"{info.id}: {name} have {dim} dimensions in the data, but shape {space.shape} in {info.environment}: "
                    f"correct {environment_key(info)}, or use a file of that environment"
                )
        _try_out(environment, info)
        return environment.box.low, environment.box.high


def _try_out(environment: Simulator, info: DatasetInfo) -> None:
    rng = np.random.default_rng(0)
    with _explained("reset(seed=0)", info):
        observation, facts = environment.reset(seed=0)
        if not isinstance(facts, dict):
            raise TypeError(f"the info is {facts!r}")
    _require_finite(observation, 0.0, "reset(seed=0)", environment, info)
    for _ in range(STEPS):
        action = rng.normal(size=environment.box.shape)
        with _explained("step", info):
            observation, reward, terminated, truncated, _ = environment.step(action)
        _require_finite(observation, reward, "step", environment, info)
        if terminated or truncated:
            with _explained("reset(seed=0)", info):
                environment.reset(seed=0)


@contextmanager
def _explained(call: str, info: DatasetInfo) -> Iterator[None]:
    """Whatever users' code raises, as a ValueError."""
    try:
        yield
    except Exception as error:
        raise ValueError(
            f"{info.id}: {info.environment} fails in {call} with {type(error).__name__}: {error}. {INTERFACE}: correct the "
            f"environment, or {environment_key(info)}"
        ) from error


def _require_finite(observation: np.ndarray, reward: float, call: str, environment: Simulator, info: DatasetInfo) -> None:
    space = environment.observation_space
    if observation.shape != space.shape or not np.isfinite(observation).all() or not np.isfinite(reward):
        raise ValueError(
            f"{info.id}: {info.environment} declares {space}, but {call} returned observation {observation} of shape "
            f"{observation.shape}, and reward {reward}: correct the environment"
        )
