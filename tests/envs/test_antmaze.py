"""The AntMaze environment against a hand-stepped ant, D4RL's maps, and a recording of another implementation."""

import ast
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import h5py
import mujoco
import numpy as np
import pytest
from conftest import ROOT

from scripts.collect_antmaze import PLAY_GOALS, Guide, act_towards
from scripts.policy_files import read_policies
from tap.data.catalog import d4rl_file
from tap.envs.antmaze import AntMaze, ant_xml
from tap.envs.mazes import MAZES
from tap.reporting.figures import mazes_figure


def d4rl_maps() -> dict[str, list[list[int | str]]]:
    """The maps in D4RL's source, which cannot be imported."""
    source = d4rl_file("d4rl/locomotion/maze_env.py")
    assert source is not None
    maps = {}
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.List) and isinstance(node.targets[0], ast.Name):
            maps[node.targets[0].id] = eval(ast.unparse(node.value), {"R": "R", "G": "G"})
    return maps


def test_mazes_and_hand_picked_goals_are_those_of_d4rl() -> None:
    maps = d4rl_maps()
    for name, d4rl_name in {"umaze": "U_MAZE_TEST", "medium": "BIG_MAZE_TEST", "large": "HARDEST_MAZE_TEST"}.items():
        assert ["".join(map(str, row)) for row in maps[d4rl_name]] == list(MAZES[name].rows)
    for name, d4rl_name in {"medium": "BIG_MAZE", "large": "HARDEST_MAZE"}.items():
        goals = {(i, j) for i, row in enumerate(maps[d4rl_name]) for j, letter in enumerate(row) if letter == "G"}
        assert goals == set(PLAY_GOALS[name])
    ultra = MAZES["ultra"]  # the paper: 10 x 14 cells within the outer walls
    assert (len(ultra.rows) - 2, len(ultra.rows[0]) - 2) == (10, 14) and set(PLAY_GOALS["ultra"]) <= set(ultra.free)


def test_cells_lie_where_d4rl_puts_them() -> None:
    goals = {name: maze.centre(maze.goal).tolist() for name, maze in MAZES.items()}
    assert goals == {"umaze": [0, 8], "medium": [20, 20], "large": [32, 24], "ultra": [52, 36]}
    maze = MAZES["umaze"]
    assert [maze.cell(np.array(xy)) for xy in ([1.9, -1.9], [2.1, 0], [8, 4], [8, 6.1])] == [(1, 1), (1, 2), (2, 3), (3, 3)]
    assert maze.cell(np.array([-2.5, 0])) == (1, 1)  # in a wall: the free cell beside it


@pytest.mark.parametrize("name", MAZES)
def test_walls_stand_on_the_map(name: str) -> None:
    env = AntMaze(name)
    boxes = np.flatnonzero(env.model.geom_type == mujoco.mjtGeom.mjGEOM_BOX)
    assert len(boxes) == "".join(MAZES[name].rows).count("1")
    np.testing.assert_array_equal(env.model.geom_size[boxes], np.tile([2.0, 2.0, 1.0], (len(boxes), 1)))
    assert (env.model.geom_pos[boxes, 2] == 1).all()
    rows, columns = (env.model.geom_pos[boxes, axis] / 4 + 1 for axis in (1, 0))  # all mazes start in cell (1, 1)
    assert all(MAZES[name].rows[int(i)][int(j)] == "1" for i, j in zip(rows, columns, strict=True))
    assert len(set(zip(rows, columns, strict=True))) == len(boxes)


def test_starts_and_goals_are_distributed_as_in_d4rl() -> None:
    env, rest = AntMaze("ultra"), AntMaze("medium").init_qpos
    assert rest.tolist() == [0, 0, 0.75, 1, *[0] * 11]
    starts = np.array([env.reset(seed=seed)[0] for seed in range(400)])
    offsets, velocities = starts[:, :15] - rest, starts[:, 15:29]
    assert 0.099 < np.abs(offsets).max() <= 0.1 and offsets.std() == pytest.approx(0.1 / 3**0.5, rel=0.03)
    assert velocities.std() == pytest.approx(0.1, rel=0.03) and np.abs(velocities).max() > 0.3
    goals = starts[:, 29:] - [52, 36]
    assert (goals >= -1).all() and (goals <= 0.5).all()
    np.testing.assert_allclose(goals.mean(axis=0), -0.25, atol=0.07)
    assert goals.var() == pytest.approx(1 / 12 + 0.25 / 12, rel=0.15)  # the sum of U(0, 1) and U(0, 0.5)
    env = AntMaze("medium")
    goals = np.array([env.reset(seed=seed)[0][29:] for seed in range(100)]) - [20, 20]
    assert (goals >= 0).all() and (goals <= 1.5).all()


def test_dynamics_are_those_of_the_ant_stepped_by_hand() -> None:
    """In the middle of its cell the ant touches no wall, so D4RL's ant without a maze moves in the same way."""
    env, rng = AntMaze("umaze"), np.random.default_rng(0)
    observation, _ = env.reset(seed=0)
    model = mujoco.MjModel.from_xml_string(ant_xml().read_text().replace('coordinate="local"', ""))
    data = mujoco.MjData(model)
    data.qpos[:], data.qvel[:] = observation[:15], env.data.qvel
    mujoco.mj_forward(model, data)
    assert env.dt == pytest.approx(0.1)
    for action in rng.uniform(-1, 1, (10, 8)).astype(np.float32):
        observation, *_ = env.step(action)
        data.ctrl[:] = 30 * action.astype(float)
        for _ in range(5):
            mujoco.mj_step(model, data)
        np.testing.assert_allclose(observation[:29], np.concatenate([data.qpos, data.qvel]), rtol=0, atol=1e-9)
    assert data.time == pytest.approx(1.0)


def test_walls_block_and_openings_do_not() -> None:
    env = AntMaze("umaze")

    def slide(velocity: list[float]) -> np.ndarray:
        env.reset(seed=0)
        path = []
        for _ in range(30):
            env.data.qvel[:2] = velocity
            env.step(np.zeros(8))
            path.append(env.data.qpos[:2].copy())
        return np.array(path)

    assert slide([-5, 0]).min() > -2 and slide([0, -5]).min() > -2 and slide([0, 5])[:, 1].max() < 2
    assert slide([5, 0])[:, 0].max() > 4


def test_success_is_within_half_a_metre() -> None:
    env = AntMaze("umaze")

    def step_with_goal(offset: float) -> tuple[float, bool, bool]:
        env.reset(seed=0)
        env.goal = there + np.array([0.6, 0.8]) * offset
        observation, reward, terminated, truncated, _ = env.step(np.full(8, 0.3))
        np.testing.assert_array_equal(observation[29:], env.goal)
        return float(reward), terminated, truncated

    env.reset(seed=0)
    there = env.step(np.full(8, 0.3))[0][:2]
    assert step_with_goal(0.4999) == (1.0, True, False)
    assert step_with_goal(0.5001) == (0.0, False, False)


def test_a_fall_does_not_end_the_episode() -> None:
    env = AntMaze("umaze")
    env.reset(seed=0)
    env.data.qpos[2:7] = [0.3, 0, 1, 0, 0]  # on its back
    assert not any(env.step(np.zeros(8))[2] for _ in range(20))
    assert env.data.body("torso").xmat[8] < 0


def test_a_recording_of_another_implementation_is_reproduced(extra_data: Path, tmp_path: Path) -> None:
    if not (extra_data / "recollect.py").exists():
        pytest.skip("TAP_EXTRA_DATA has no recollect.py")
    file = tmp_path / "umaze.hdf5"
    command = [sys.executable, extra_data / "recollect.py", "antmaze-umaze-diverse", file, "--transitions", "1000"]
    subprocess.run([*map(str, command)], check=True, capture_output=True)
    env = AntMaze("umaze")
    env.reset(seed=0)
    with h5py.File(file) as data:
        keys = ("observations", "actions", "infos/qpos", "infos/qvel")
        observations, actions, positions, velocities = (data[key][:1000].astype(float) for key in keys)
    errors = []
    for t in range(0, 999, 3):
        env.data.qacc_warmstart[:] = 0
        env.set_state(positions[t], velocities[t])
        np.testing.assert_array_equal(env.observation()[:29], observations[t])
        errors.append(np.abs(env.step(actions[t])[0][:29] - observations[t + 1]).max())
    assert max(errors) < 1e-4  # rows are float32


def test_the_policy_that_collected_d4rls_data_reaches_goals(extra_data: Path) -> None:
    (policy,) = read_policies(extra_data / "policies/antmaze-goal-direction.npz", 29, 8).values()
    env, reached = AntMaze("umaze"), 0
    for seed in range(3):
        observation, _ = env.reset(seed=seed)
        guide = Guide(env.maze, env.goal)
        for _ in range(700):
            direction = guide.waypoint(observation[:2]) - observation[:2]
            observation, _, terminated, _, _ = env.step(act_towards(policy, observation, direction, env.np_random))
            if terminated:
                reached += 1
                break
    assert reached >= 2


def test_missing_d4rl_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    with pytest.raises(ValueError, match=r"pip install -e '\.\[d4rl\]'"):
        AntMaze("umaze")


def test_a_figure_shows_each_wall_and_each_path() -> None:
    (axes,) = mazes_figure({"medium": [np.array([[0, 0], [4, 0]]), np.array([[4, 0], [4, 4]])]}).axes
    assert len(axes.lines) == 2 + 2  # the paths, start and goal
    for i, row in enumerate(MAZES["medium"].rows):
        for j, letter in enumerate(row):
            inside = axes.transData.transform([4.0 * (j - 1), 4.0 * (i - 1)])
            assert any(patch.contains_point(inside) for patch in axes.patches) == (letter == "1")


def test_mazes_need_no_simulator() -> None:
    script = "import sys, tap.envs.mazes; print({'torch', 'mujoco', 'gymnasium', 'h5py'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
