"""Gymnasium ids, and the adapter for D4RL's own environments."""

import subprocess
import sys
import types
import warnings
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
from conftest import ROOT

import tap.envs.registration  # noqa: F401
from tap.data.catalog import known_datasets
from tap.envs.make import get_state, make_environment, set_state


def make(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "v0 is out of date"
        return gymnasium.make(name)


def test_every_d4rl_dataset_has_an_id() -> None:
    ids = {f"tap/{name}" for name, info in known_datasets().items() if info.source != "bundled"}
    assert ids <= set(gymnasium.registry) and len(ids) > 50


@pytest.mark.parametrize(
    ("name", "observation_dim", "action_dim", "limit", "low", "high"),
    [
        ("hopper-medium-v2", 11, 3, 1000, -20.272305, 3234.3),
        ("ant-random-v2", 27, 8, 1000, -325.6, 3879.7),
        ("door-cloned-v0", 39, 28, 200, -56.512833, 2880.5693087298737),
        ("stochastic-walker2d-medium-replay", 17, 6, 1000, 1.629008, 4592.3),
        ("antmaze-umaze-v0", 31, 8, 700, 0, 1),
        ("antmaze-ultra-play-v0", 31, 8, 2000, 0, 1),
    ],
)
def test_a_made_environment_has_d4rls_score(
    name: str, observation_dim: int, action_dim: int, limit: int, low: float, high: float
) -> None:
    env = make(f"tap/{name}")
    assert (env.observation_space.shape, env.action_space.shape) == ((observation_dim,), (action_dim,))
    assert env.spec is not None and env.spec.max_episode_steps == limit
    assert [env.get_normalized_score(score) for score in (low, (low + high) / 2, high)] == pytest.approx([0, 0.5, 1])


def test_an_adroit_id_has_d4rls_reward() -> None:
    env, reference = make("tap/hammer-human-v1"), make_environment(known_datasets()["hammer-human-v1"])
    env.reset(seed=3), reference.reset(seed=3)
    assert env.step(np.zeros(26))[1] == reference.step(np.zeros(26))[1] != env.unwrapped.step(np.zeros(26))[1]


@pytest.mark.parametrize(("maze", "limit"), [("umaze", 700), ("medium", 1000), ("large", 1000), ("ultra", 2000)])
def test_antmaze_is_truncated_at_its_limit(maze: str, limit: int) -> None:
    env = make(f"tap/AntMaze-{maze}-v0")
    env.reset(seed=0)
    env.unwrapped.frame_skip = 1  # for speed
    ends = [env.step(np.zeros(8))[2:4] for _ in range(limit)]
    assert ends == [(False, False)] * (limit - 1) + [(False, True)]


def run(script: str) -> str:
    return subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_registration_imports_no_simulator_and_works_by_the_id() -> None:
    script = "import sys, tap.envs.registration; print({'torch', 'mujoco', 'h5py', 'pydantic'} & set(sys.modules))"
    assert run(script).strip() == "set()"
    script = (
        "import gymnasium; print(gymnasium.make('tap.envs.registration:tap/walker2d-medium-v2').get_normalized_score(1.629008))"
    )
    assert float(run(script)) == 0


class OldMaze:
    """A walk on a line, with the interface of gym before 0.26, which samples goals as D4RL's AntMaze does."""

    observation_space = types.SimpleNamespace(shape=(1,))
    action_space = types.SimpleNamespace(low=-np.ones(1, np.float32), high=np.ones(1, np.float32), shape=(1,))
    limit = 5

    def __init__(self) -> None:
        self.rng = np.random.default_rng()
        self.set_target()

    @property
    def unwrapped(self) -> "OldMaze":
        return self

    def seed(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def set_target(self) -> None:
        self.target_goal = tuple(np.random.uniform(2, 3, 2))
        print("Target Goal: ", self.target_goal)

    def reset(self) -> np.ndarray:
        self.steps, self.position = 0, self.rng.uniform(-1, 1, 1)
        return self.position.copy()

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, dict[str, Any]]:
        self.position, self.steps = self.position + action, self.steps + 1
        reached, info = bool(self.position > 2), {}
        if self.steps >= self.limit:
            info["TimeLimit.truncated"] = not reached
        return self.position.copy(), float(reached), reached or self.steps >= self.limit, info

    def close(self) -> None:
        pass


class OldAnt(OldMaze):
    """An observation of 111 dimensions, as in D4RL's Ant, each with its index as value."""

    observation_space = types.SimpleNamespace(shape=(111,))

    def reset(self) -> np.ndarray:
        super().reset()
        return np.arange(111.0)


class Proxy:
    """Like D4RL's wrapper of AntMaze: it delegates to the wrapped environment, except for `seed`, which does nothing."""

    def __init__(self, wrapped_env: OldMaze) -> None:
        self.wrapped_env = wrapped_env

    @property
    def unwrapped(self) -> "Proxy":
        return self

    def seed(self, seed: int) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["wrapped_env"], name)


@pytest.fixture
def old_gym(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "d4rl", types.ModuleType("d4rl"))
    gym = types.ModuleType("gym")
    made = {"antmaze-umaze-v0": lambda: Proxy(OldMaze()), "hopper-medium-v2": OldMaze, "ant-medium-v2": OldAnt}
    monkeypatch.setattr(gym, "make", lambda name: made[name](), raising=False)
    monkeypatch.setitem(sys.modules, "gym", gym)


def d4rl_environment(name: str) -> Any:
    return make_environment(replace(known_datasets()[name], environment="d4rl"))


def test_an_old_environment_has_gymnasiums_interface(old_gym: None, capsys: pytest.CaptureFixture[str]) -> None:
    env = d4rl_environment("antmaze-umaze-v0")
    observation, _ = env.reset(seed=4)
    assert observation.shape == env.observation_space.shape == (3,)
    assert observation[0] == np.random.default_rng(4).uniform(-1, 1) and (observation[1:] >= 2).all()
    ends = [env.step(np.zeros(1))[1:4] for _ in range(5)]
    assert ends == [(0.0, False, False)] * 4 + [(0.0, False, True)]  # the limit of the old environment
    env.reset(seed=4)
    steps = [env.step(np.ones(1)) for _ in range(3)]
    (before, *_, after) = steps
    assert before[1:4] == (0.0, False, False) and before[0][0] < 2 < after[0][0] and after[1:4] == (1.0, True, False)
    assert capsys.readouterr().out == ""


def test_a_seed_fixes_episode_and_goal_of_an_old_environment(old_gym: None) -> None:
    env, other = d4rl_environment("antmaze-umaze-v0"), d4rl_environment("antmaze-umaze-v0")
    env.reset(seed=1)
    expected = env.step(np.array([0.25]))[0]
    other.reset(seed=2)
    np.testing.assert_array_equal(set_state(other, get_state(env)), expected)


def test_the_goal_is_appended_in_antmaze_only(old_gym: None) -> None:
    assert d4rl_environment("hopper-medium-v2").reset(seed=0)[0].shape == (1,)


def test_ant_observations_are_cut_to_27_dimensions_like_the_data(old_gym: None) -> None:
    np.testing.assert_array_equal(d4rl_environment("ant-medium-v2").reset(seed=0)[0], np.arange(27))


def test_d4rl_that_cannot_be_imported_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "d4rl", None)
    with pytest.raises(ValueError, match=r"hopper-medium-v2: D4RL's own environment cannot be made here .*MuJoCo 2\.1"):
        d4rl_environment("hopper-medium-v2")
