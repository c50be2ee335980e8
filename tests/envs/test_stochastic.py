"""Stochastic Hopper and Walker2d: the force, against Newton's second law and the documented distribution."""

import warnings
from typing import Any

import gymnasium
import mujoco
import numpy as np
import pytest

import tap.envs.registration  # noqa: F401
from tap.data.catalog import known_datasets
from tap.data.score import normalized_score
from tap.envs.make import make_environment, simulator
from tap.envs.stochastic import make as make_random_force
from tap.envs.trial import check_environment

TASKS = [("StochasticHopper", "Hopper-v4", 5.0), ("StochasticWalker2d", "Walker2d-v4", 12.0)]


def make(name: str, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "v4 is out of date"
        return gymnasium.make(name, **options)


def follow(env: Any, seed: int, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Observations and rewards of an episode with these actions."""
    env.reset(seed=seed)
    steps = [env.step(action) for action in actions]
    return np.array([step[0] for step in steps]), np.array([step[1] for step in steps])


@pytest.mark.parametrize(("name", "base", "max_force"), TASKS)
def test_one_step_in_free_flight_varies_by_the_forces_impulse(name: str, base: str, max_force: float) -> None:
    """From one state without contact, the centre of mass accelerates by the force on all bodies over their mass."""
    stochastic: Any = make_random_force(base, max_force)
    model, data = stochastic.unwrapped.model, stochastic.unwrapped.data
    position = model.qpos0.copy()
    position[1] = 10.0
    velocities = []
    for seed in range(1500):
        stochastic.reset(seed=seed)
        stochastic.unwrapped.set_state(position, np.zeros(model.nv))
        stochastic.step(np.zeros(model.nu))
        mujoco.mj_subtreeVel(model, data)
        velocities.append(data.subtree_linvel[0, 0])
    bodies = model.nbody - 1  # body 0 is the world
    std_of_force = 0.1 * max_force / np.sqrt(3)  # of a uniform distribution
    expected = bodies * std_of_force * stochastic.unwrapped.dt / model.body_mass.sum()
    assert np.std(velocities) == pytest.approx(expected, rel=0.05)
    assert abs(np.mean(velocities)) < 4 * expected / np.sqrt(1500)


@pytest.mark.parametrize(("name", "base", "max_force"), TASKS)
def test_the_force_is_a_bounded_random_walk(name: str, base: str, max_force: float) -> None:
    env: Any = make_random_force(base, max_force)
    env.reset(seed=0)
    forces = []
    for _ in range(3000):
        env.step(np.zeros(env.action_space.shape))
        by_body = env.unwrapped.data.xfrc_applied.copy()
        assert (by_body[:, 0] == by_body[0, 0]).all() and not by_body[:, 1:].any()
        forces.append(by_body[0, 0])
    changes = np.diff([0.0, *forces])
    assert max(np.abs(forces)) == max_force and np.abs(changes).max() <= 0.1 * max_force
    inside = changes[np.abs(forces) < max_force]
    assert inside.std() == pytest.approx(0.1 * max_force / np.sqrt(3), rel=0.05)
    env.reset(seed=1)
    assert not env.unwrapped.data.xfrc_applied.any()


@pytest.mark.parametrize(("name", "base", "max_force"), TASKS)
def test_without_force_the_dynamics_are_gymnasiums(name: str, base: str, max_force: float) -> None:
    still, plain, stochastic = make(f"tap/{name}-v0", max_force=0.0), make(base), make(f"tap/{name}-v0")
    actions = np.random.default_rng(0).uniform(-1, 1, (10, *plain.action_space.shape)).astype(np.float32)
    for actual, desired in zip(follow(still, 3, actions), follow(plain, 3, actions), strict=True):
        np.testing.assert_array_equal(actual, desired)
    assert not np.array_equal(follow(stochastic, 3, actions)[0], follow(plain, 3, actions)[0])


@pytest.mark.parametrize(("name", "base", "max_force"), TASKS)
def test_seeds_reproduce_an_episode_and_differ(name: str, base: str, max_force: float) -> None:
    env, other = make(f"tap/{name}-v0"), make(f"tap/{name}-v0")
    actions = np.random.default_rng(0).uniform(-1, 1, (10, *env.action_space.shape)).astype(np.float32)
    first, again = follow(env, 3, actions), follow(other, 3, actions)
    follow(other, 4, actions)
    for actual, desired in zip((*again, *follow(other, 3, actions)), (*first, *first), strict=True):
        np.testing.assert_array_equal(actual, desired)
    assert not np.array_equal(follow(other, 4, actions)[0], first[0])


@pytest.mark.parametrize(
    ("dataset", "dims", "low", "high"),
    [
        ("stochastic-hopper-medium-replay", (11, 3), -20.272305, 3234.3),
        ("stochastic-hopper-medium-expert", (11, 3), -20.272305, 3234.3),
        ("stochastic-hopper-expert", (11, 3), -20.272305, 3234.3),
        ("stochastic-walker2d-medium-replay", (17, 6), 1.629008, 4592.3),
        ("stochastic-walker2d-medium-expert", (17, 6), 1.629008, 4592.3),
        ("stochastic-walker2d-expert", (17, 6), 1.629008, 4592.3),
    ],
)
def test_datasets_have_the_environment_and_d4rls_score(dataset: str, dims: tuple[int, int], low: float, high: float) -> None:
    info = known_datasets()[dataset]
    check_environment(info, *dims)
    assert (info.suite, info.source) == ("locomotion", "file")
    np.testing.assert_allclose(normalized_score(info, np.array([low, high])), [0, 100])
    env = make_environment(info)
    env.reset(seed=0)
    env.step(np.zeros(dims[1]))
    assert env.unwrapped.data.xfrc_applied[:, 0].any()


def test_results_state_the_force() -> None:
    plain = simulator("Walker2d-v4")
    assert simulator("tap/StochasticWalker2d-v0") == f"{plain}, random force of up to 12 N"
    assert simulator("tap/StochasticHopper-v0") == f"{plain}, random force of up to 5 N"
    assert "force" not in plain
