import sys
import warnings
from contextlib import closing
from dataclasses import replace

import gymnasium
import h5py
import numpy as np
import pytest
from conftest import custom_dataset

from tap.data.catalog import DatasetInfo, known_datasets
from tap.data.score import normalized_score
from tap.envs.make import get_state, make_environment, set_state, versions

# Reference scores of D4RL's paper, and the measured mean return of a random policy in the current simulators.
TASKS = {
    "hopper": ("Hopper-v4", 1000, -20.272305, 3234.3, 19.4),
    "halfcheetah": ("HalfCheetah-v4", 1000, -280.178953, 12135.0, -290.0),
    "walker2d": ("Walker2d-v4", 1000, 1.629008, 4592.3, 2.7),
    "ant": ("Ant-v4", 1000, -325.6, 3879.7, -73.0),
    "pen": ("AdroitHandPen-v1", 100, 96.262799, 3076.8331017826877, 83.0),
    "door": ("AdroitHandDoor-v1", 200, -56.512833, 2880.5693087298737, -56.7),
    "hammer": ("AdroitHandHammer-v1", 200, -274.856578, 12794.134825156867, -275.4),
    "relocate": ("AdroitHandRelocate-v1", 200, -6.425911, 4233.877797728884, -4.5),
}
STOCHASTIC = ("stochastic-hopper-expert", "stochastic-walker2d-expert")


def dataset(task, **changes):
    environment, limit, low, high, _ = TASKS[task]
    facts = {
        "id": f"{task}-medium-v2",
        "suite": "adroit" if environment.startswith("Adroit") else "locomotion",
        "source": "file",
        "path": None,
        "url": None,
        "environment": environment,
        "max_episode_steps": limit,
        "reference_min_score": low,
        "reference_max_score": high,
    }
    return DatasetInfo(**(facts | changes))


def antmaze():
    environment, limits = "tap/AntMaze-medium-v0", {"reference_min_score": 0.0, "reference_max_score": 1.0}
    return dataset("hopper", id="antmaze-medium-play-v2", suite="antmaze", environment=environment, **limits)


def custom(environment, **changes):
    return dataset("hopper", id="mine", suite="custom", environment=environment, **changes)


def episode_returns(env, act, episodes):
    returns = []
    for seed in range(episodes):
        observation, _ = env.reset(seed=seed)
        total, over = 0.0, False
        while not over:
            observation, reward, terminated, truncated, _ = env.step(act(observation))
            total, over = total + reward, terminated or truncated
        returns.append(total)
    return np.array(returns)


@pytest.mark.parametrize(
    ("task", "episodes"),
    [
        ("hopper", 80),
        ("walker2d", 80),
        ("halfcheetah", 3),
        ("ant", 4),
        ("pen", 20),
        ("door", 2),
        ("hammer", 2),
        ("relocate", 2),
    ],
)
def test_a_random_policy_has_the_measured_return(task, episodes):
    env, rng = make_environment(dataset(task)), np.random.default_rng(0)
    returns = episode_returns(env, lambda _: rng.uniform(-1, 1, env.action_space.shape), episodes)
    spread = {"halfcheetah": 80, "ant": 110, "door": 1, "hammer": 3, "relocate": 3}.get(task, returns.std())
    assert abs(returns.mean() - TASKS[task][-1]) < 4 * spread / np.sqrt(episodes) + 1
    if task not in (
        "hopper",
        "ant",
    ):  # D4RL's minimum as well; in these two, returns are higher than in D4RL's release
        assert abs(returns.mean() - TASKS[task][2]) < 4 * spread / np.sqrt(episodes) + 1
    if task == "hopper":
        assert 0.5 < normalized_score(dataset(task), returns).mean() < 2


def test_observations_are_d4rls():
    dims = {task: make_environment(dataset(task)).reset(seed=0)[0].shape for task in TASKS}
    assert make_environment(antmaze()).reset(seed=0)[0].shape == (31,)
    assert dims == {
        "hopper": (11,), "halfcheetah": (17,), "walker2d": (17,), "ant": (27,),
        "pen": (45,), "door": (39,), "hammer": (46,), "relocate": (39,),
    }  # fmt: skip


@pytest.mark.parametrize("task", [*TASKS, "antmaze", *STOCHASTIC])
def test_state_round_trip(task):
    info = antmaze() if task == "antmaze" else known_datasets()[task] if task in STOCHASTIC else dataset(task)
    env, other, rng = make_environment(info), make_environment(info), np.random.default_rng(1)

    def follow(env, actions):
        steps = [env.step(action) for action in actions]
        return np.array([step[0] for step in steps]), np.array([step[1] for step in steps])

    env.reset(seed=7)
    follow(env, 0.3 * rng.uniform(-1, 1, (10, *env.action_space.shape)))
    state = get_state(env)
    future = rng.uniform(-1, 1, (20, *env.action_space.shape))
    expected = follow(env, future)

    other.reset(seed=99)  # a used simulator in another state
    follow(other, future[:3])
    for again in (env, other):
        set_state(again, state)
        assert get_state(again).seed == 7 and np.array_equal(get_state(again).actions, state.actions)
        for actual, desired in zip(follow(again, future), expected, strict=True):
            np.testing.assert_allclose(actual, desired, rtol=0, atol=1e-9)


def test_set_state_returns_the_observation_there():
    env = make_environment(dataset("door"))
    first, _ = env.reset(seed=3)
    start = get_state(env)
    second, *_ = env.step(np.full(28, 0.2))
    np.testing.assert_array_equal(set_state(env, get_state(env)), second)
    np.testing.assert_array_equal(set_state(env, start), first)


def test_actions_are_clipped():
    env = make_environment(dataset("hopper"))
    outcomes = []
    for action in ([5.0, -3.0, 0.5], [1.0, -1.0, 0.5]):
        env.reset(seed=0)
        outcomes.append(env.step(np.array(action)))
    np.testing.assert_array_equal(outcomes[0][0], outcomes[1][0])
    assert outcomes[0][1] == outcomes[1][1]


def test_time_limit_is_the_datasets():
    env = make_environment(dataset("halfcheetah", max_episode_steps=4))
    env.reset(seed=0)
    ends = [env.step(np.zeros(6))[2:4] for _ in range(4)]
    assert ends == [(False, False)] * 3 + [(False, True)]


def test_dropping_the_pen_ends_the_episode():
    env = make_environment(dataset("pen"))
    env.reset(seed=0)
    rng = np.random.default_rng(0)
    for _ in range(100):
        _, reward, terminated, truncated, _ = env.step(rng.uniform(-1, 1, 24))
        height = env.unwrapped.data.body("Object").xpos[2]
        assert terminated == (height < 0.075)
        if terminated:
            break
    assert terminated and not truncated and reward < -4


# For each Adroit task: what the palm should approach, the joint that the test moves, and its positions, past each bonus.
POSES = {
    "pen": (None, "OBJRx", [1.0, 0.37, 0.0]),
    "door": (("site", "S_handle"), "door_hinge", [0.1, 0.3, 1.1, 1.4]),
    "hammer": (("body", "Object"), "nail_dir", [0.0, 0.075, 0.085]),
    "relocate": (("body", "Object"), "OBJTx", [0.3, 0.08, 0.03]),
}


@pytest.mark.parametrize("task", POSES)
def test_adroit_reward_is_the_raw_one_with_its_fault_fixed(task):
    """D4RL subtracts 0.1 times the distance from palm to object where the raw environment adds it; all else is equal."""
    approached, moved, poses = POSES[task]
    env = make_environment(dataset(task))
    hand, rest = env.unwrapped, np.zeros(env.action_space.shape)

    def step(stepper, pose):
        env.reset(seed=0)
        if task == "pen":
            hand.model.body("target").quat = hand.model.body("Object").quat
        if task == "relocate":  # put the ball at its target first
            for axis, way in zip("xyz", hand.data.site("target").xpos - hand.data.body("Object").xpos, strict=True):
                hand.data.joint(f"OBJT{axis}").qpos = way
        hand.data.joint(moved).qpos += pose
        return np.asarray(stepper.step(rest)[1]).item()

    rewards = []
    for pose in poses:
        fixed, raw, reach = step(env, pose), step(hand, pose), 0.0
        if approached:
            kind, name = approached
            reach = np.linalg.norm(hand.data.site("S_grasp").xpos - getattr(hand.data, kind)(name).xpos)
        assert fixed == pytest.approx(raw - 0.2 * reach, abs=1e-9)
        rewards.append(fixed)
    assert (np.diff(rewards) > 1.5).all()  # the poses reached the bonuses


def published_expert(file):
    """The Gaussian tanh network that produced D4RL's expert datasets."""
    arrays, rng = np.load(file), np.random.default_rng(0)

    def act(observation):
        x = (observation - arrays["in_shift"]) / (arrays["in_scale"] + 1e-6)
        for layer in range(3):
            x = arrays[f"weight_{layer}"] @ x + arrays[f"bias_{layer}"]
            x = np.tanh(x) if layer < 2 else x
        shift, scale = arrays.get("out_shift", 0.0), arrays.get("out_scale", 1.0)
        return x * scale + shift + np.exp(arrays["log_std"]) * rng.standard_normal(len(x))

    return act


@pytest.mark.parametrize(
    ("task", "episodes", "low", "high"),
    [
        ("pen", 12, 45, 145),
        ("door", 6, 80, 110),
        ("hammer", 4, 75, 150),
        ("relocate", 4, 70, 120),
    ],
)
def test_published_expert_scores_like_an_expert(extra_data, task, episodes, low, high):
    """Around 95, 99, 127 and 99; the expert fails occasionally."""
    info, act = dataset(task), published_expert(extra_data / f"policies/adroit-{task}.npz")
    returns = episode_returns(make_environment(info), act, episodes)
    assert low < normalized_score(info, returns).mean() < high


def test_human_door_demonstration_earns_its_recorded_rewards(extra_data):
    env = make_environment(dataset("door"))
    env.reset(seed=0)
    hand = env.unwrapped
    with h5py.File(extra_data / "door-human-v0.hdf5") as data:
        rows = slice(0, 300)  # the first demonstration
        assert data["terminals"][rows].nonzero()[0].tolist() == [299]
        qpos, qvel = (data[f"infos/{key}"][rows].astype(float) for key in ("qpos", "qvel"))
        observations, actions, rewards = (data[key][rows] for key in ("observations", "actions", "rewards"))

    # The file does not record the position of the door, but the first observation has that of its handle.
    frame = hand.model.body("frame").pos.copy()
    hand.set_env_state({"qpos": qpos[0], "qvel": qvel[0], "door_body_pos": frame})
    frame += observations[0, 32:35] - hand.data.site("S_handle").xpos
    replayed = []
    for t in range(300):
        hand.set_env_state({"qpos": qpos[t], "qvel": qvel[t], "door_body_pos": frame})
        replayed.append(env.step(actions[t])[1])
    assert np.mean(np.abs(np.array(replayed) - rewards) < 0.01) > 0.98


def test_normalized_score():
    info = dataset("hopper", reference_min_score=-20.0, reference_max_score=3180.0)
    np.testing.assert_allclose(normalized_score(info, np.array([-20.0, 1580.0, 3180.0, -52.0])), [0, 50, 100, -1])
    np.testing.assert_allclose(normalized_score(dataset("door"), np.array([795.7])), 29.0, atol=0.05)  # door-human
    with pytest.raises(ValueError, match=r"mine has no reference scores: set datasets.mine.fetch.reference_min_score"):
        normalized_score(custom("Hopper-v4", reference_max_score=None), np.zeros(1))


def test_versions_name_the_simulators():
    found = versions()
    assert found["gymnasium"] == gymnasium.__version__ and found["numpy"] == np.__version__
    assert {"mujoco", "torch"} <= set(found)


def test_nothing_is_printed_or_left_behind(tmp_path, monkeypatch, capfd, caplog):
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for task in ("halfcheetah", "door"):
            make_environment(dataset(task)).reset(seed=0)
    assert capfd.readouterr() == ("", "") and not caplog.records and not list(tmp_path.iterdir())


def test_custom_environment_from_a_module(tmp_path, monkeypatch):
    (tmp_path / "my_robots.py").write_text(
        "import gymnasium\n"
        "gymnasium.register('MyRobot-v0', entry_point='gymnasium.envs.classic_control.pendulum:PendulumEnv')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    env = make_environment(custom("my_robots:MyRobot-v0", max_episode_steps=3))
    env.reset(seed=0)
    ends = [env.step(np.array([9.0]))[3] for _ in range(3)]
    assert ends == [False, False, True]
    assert env.actions[0] == 2.0  # Pendulum's bound


@pytest.mark.parametrize(
    ("info", "message"),
    [
        (custom(None), "set datasets.mine.fetch.environment in params.yaml to a gymnasium id"),
        (custom("Hoper-v4"), "cannot make 'Hoper-v4'.*correct datasets.mine.fetch.environment"),
        (custom("no_such_module:Robot-v0"), "cannot make 'no_such_module:Robot-v0'.*no_such_module"),
        (custom("CartPole-v1"), r"CartPole-v1 has actions in Discrete\(2\).*flat Box of floats"),
        (custom("Blackjack-v1"), r"the observation of Blackjack-v1 is in Tuple.*but TAP needs a Box: register a wrapped"),
    ],
)
def test_unsuitable_environments_are_explained(info, message):
    with pytest.raises(ValueError, match=message):
        make_environment(info)


def test_missing_robotics_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium_robotics", None)
    with pytest.raises(ValueError, match=r"pip install -e '\.\[robotics\]'"):
        make_environment(dataset("door"))


def test_without_a_limit_of_the_dataset_the_environments_own_holds() -> None:
    info = replace(custom_dataset("mine", "InvertedPendulum-v5", 10), max_episode_steps=None)
    with closing(make_environment(info)) as env:
        assert env.spec is not None and env.spec.max_episode_steps == 1000
    gymnasium.register("Endless-v0", entry_point="gymnasium.envs.mujoco.inverted_pendulum_v5:InvertedPendulumEnv")
    with pytest.raises(
        ValueError, match=r"mine: Endless-v0 has no limit of its own: set datasets\.mine\.fetch\.max_episode_steps"
    ):
        make_environment(replace(info, environment="Endless-v0"))
