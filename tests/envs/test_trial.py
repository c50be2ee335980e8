"""What users' environments get wrong, found before training, and what they may do, which must not matter."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest

from tap.data.catalog import DatasetInfo
from tap.envs.make import make_environment
from tap.envs.trial import check_environment

INFO = DatasetInfo("mine", "custom", "file", None, None, "tests/Mine-v0", 100, None, None)


class Point(gymnasium.Env[np.ndarray, np.ndarray]):
    """A point on a line that actions move; bounds of actions are [0, 50]."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = gymnasium.spaces.Box(0, 50, (1,), np.float32)

    def __init__(self, scale: float = 1.0, render_mode: str | None = None) -> None:
        self.scale, self.state = scale, np.zeros(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, ...]:
        super().reset(seed=seed)
        self.state[:] = 0
        return self.state, {}

    def step(self, action: np.ndarray) -> tuple[Any, ...]:
        self.state[0] += self.scale * action[0]  # always the same array
        self.state[1] += 1
        action[:] = -7  # an array of the caller's
        return self.state, -self.state[0], False, False, {}


class WithoutSeed(Point):
    def reset(self) -> tuple[Any, ...]:  # type: ignore[override]
        return self.state, {}


class OldReset(Point):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:  # type: ignore[override]
        return self.state


class OldStep(Point):
    def step(self, action: np.ndarray) -> tuple[Any, ...]:
        return self.state, 0.0, False, {}


class Needy(Point):
    def __init__(self, robot: str, render_mode: str | None = None) -> None:
        super().__init__()
        if robot != "panda":
            raise RuntimeError(f"no robot {robot}")


class Broken(Point):
    def step(self, action: np.ndarray) -> tuple[Any, ...]:
        raise KeyError("gripper")


class Diverges(Point):
    def step(self, action: np.ndarray) -> tuple[Any, ...]:
        return np.full(2, np.nan), 0.0, False, False, {}


class Ragged(Point):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, ...]:
        return np.zeros(3), {}


class Short(Point):
    def step(self, action: np.ndarray) -> tuple[Any, ...]:
        return *super().step(action)[:2], True, False, {}


@pytest.fixture
def register() -> Iterator[Any]:
    def as_mine(environment: type[Point]) -> None:
        gymnasium.register("tests/Mine-v0", entry_point=environment)

    yield as_mine
    gymnasium.registry.pop("tests/Mine-v0", None)


@pytest.mark.parametrize("environment", [Point, Short])
def test_bounds_of_actions_are_the_environments(register: Any, environment: type[Point]) -> None:
    register(environment)
    bounds = check_environment(INFO, 2, 1)
    assert bounds is not None and [float(bound[0]) for bound in bounds] == [0, 50]


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (WithoutSeed, r"fails in reset\(seed=0\) with TypeError: .*seed"),
        (OldReset, r"fails in reset\(seed=0\) with TypeError: the info is .*0"),
        (OldStep, r"fails in step with ValueError: not enough values to unpack"),
        (Broken, r"fails in step with KeyError: 'gripper'"),
        (Diverges, r"declares Box.*, but step returned observation \[nan nan\]"),
        (Ragged, r"declares Box.*, but reset\(seed=0\) returned .* of shape \(3,\)"),
        (Needy, r"gymnasium cannot make 'tests/Mine-v0' \(TypeError: .*robot.*or environment_kwargs beside it"),
    ],
)
def test_what_an_environment_gets_wrong_is_one_sentence(register: Any, environment: type[Point], message: str) -> None:
    register(environment)
    with pytest.raises(ValueError, match=rf"mine: .*{message}") as error:
        check_environment(INFO, 2, 1)
    assert "datasets.mine.fetch.environment in params.yaml" in str(error.value) or environment in (Diverges, Ragged)
    assert str(error.value).count("\n") == 0


def test_arguments_of_the_constructor_come_from_params(register: Any) -> None:
    register(Needy)
    check_environment(replace(INFO, environment_kwargs={"robot": "panda"}), 2, 1)
    with pytest.raises(ValueError, match="RuntimeError: no robot arm"):
        check_environment(replace(INFO, environment_kwargs={"robot": "arm"}), 2, 1)


def test_an_environment_may_reuse_its_arrays_and_change_its_action(register: Any) -> None:
    register(Point)
    environment = make_environment(replace(INFO, environment_kwargs={"scale": 2.0}))
    seen, actions = [environment.reset(seed=0)[0]], np.arange(1, 5, dtype=np.float32)[:, None]
    for action in actions:
        seen.append(environment.step(action)[0])
    assert np.array(seen)[:, 0].tolist() == [0, 2, 6, 12, 20]
    assert actions[:, 0].tolist() == [1, 2, 3, 4]
    assert np.array(environment.actions)[:, 0].tolist() == [1, 2, 3, 4]
