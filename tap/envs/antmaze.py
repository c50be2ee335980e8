"""AntMaze: an ant walks through a maze to a goal, with D4RL's geometry in the current MuJoCo.

The task is that of the paper's appendix "AntMaze Details". AntMaze in gymnasium-robotics is a different task: frame time,
torque, contacts, start, goal and success radius differ. This environment follows D4RL: the ant is that of the d4rl package
(`ant.xml`, located without importing d4rl, which needs MuJoCo 2.1), a step lasts 0.1 s, actions in [-1, 1] are torques of +-30,
and walls are boxes of 4 x 4 x 2 m.

D4RL's observation has 29 numbers. The paper appends the goal, so this observation has 31: the first 15 positions, the first 14
velocities, and the goal's x and y. D4RL's v0 environments sample one goal when they are made, its v2 environments one per
episode; this one samples one per episode. Within 0.5 m of the goal the reward is 1 and the episode ends; a fall does not end
it.
"""

import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
from gymnasium.envs.mujoco import MujocoEnv
from gymnasium.spaces import Box

from tap.data.catalog import d4rl_file
from tap.envs.mazes import CELL_SIZE, MAZES, Maze

FRAME_SKIP = 5  # simulation steps of 0.02 s
GOAL_RADIUS = 0.5  # metres
WALL_HEIGHT = 2.0  # metres
OBSERVATION_DIM = 31


def ant_xml() -> Path:
    """Path of D4RL's ant model. Raises ValueError if the d4rl package is not installed."""
    path = d4rl_file("d4rl/locomotion/assets/ant.xml")
    if path is None:
        raise ValueError("AntMaze needs the ant model of the d4rl package: pip install -e '.[d4rl]'")
    return path


class AntMaze(MujocoEnv):
    """The ant in one of MAZES (by name) or in another maze.

    Observations (31,) float64, actions (8,) float32 in [-1, 1]. Raises ValueError if the d4rl package is not installed.
    """

    metadata = {"render_modes": ["human", "rgb_array"], "render_fps": 10}  # noqa: RUF012 (gymnasium's convention)

    def __init__(self, maze: Maze | str, render_mode: str | None = None) -> None:
        self.maze = MAZES[maze] if isinstance(maze, str) else maze
        self.goal = np.zeros(2)
        space = Box(-np.inf, np.inf, (OBSERVATION_DIM,), np.float64)
        rows, columns = len(self.maze.rows), len(self.maze.rows[0])
        middle = (self.maze.centre((0, 0)) + self.maze.centre((rows - 1, columns - 1))) / 2
        view: Any = {
            "lookat": np.array([*middle, 0.0]),
            "distance": CELL_SIZE * max(rows, columns) * 1.3,
            "elevation": -90.0,
            "azimuth": 90.0,
        }
        super().__init__(str(ant_xml()), FRAME_SKIP, space, render_mode, default_camera_config=view)

    def _initialize_simulation(self) -> tuple[Any, Any]:
        root = ET.parse(self.fullpath).getroot()
        compiler, world = root.find("compiler"), root.find("worldbody")
        assert compiler is not None and world is not None
        compiler.attrib.pop("coordinate", None)  # an attribute that MuJoCo no longer accepts
        half = CELL_SIZE / 2
        for i, j in self.maze.walls:
            x, y = self.maze.centre((i, j))
            wall = {"type": "box", "pos": f"{x} {y} {WALL_HEIGHT / 2}", "size": f"{half} {half} {WALL_HEIGHT / 2}"}
            ET.SubElement(world, "geom", wall, name=f"wall_{i}_{j}", contype="1", conaffinity="1", rgba="0.7 0.5 0.3 1")
        model = mujoco.MjModel.from_xml_string(ET.tostring(root, encoding="unicode"))
        return model, mujoco.MjData(model)

    def _set_action_space(self) -> Box:
        self.torque = self.model.actuator_ctrlrange[:, 1].copy()
        self.action_space = Box(-1.0, 1.0, self.torque.shape, np.float32)
        return self.action_space

    def reset_model(self) -> np.ndarray:
        """Place the ant at the start, within 0.1 in each position, and sample a goal; both from `np_random`."""
        positions = self.init_qpos + self.np_random.uniform(-0.1, 0.1, self.model.nq)
        velocities = self.init_qvel + 0.1 * self.np_random.standard_normal(self.model.nv)
        self.set_state(positions, velocities)  # type: ignore[no-untyped-call]
        self.goal = self.maze.sample_goal(self.maze.goal, self.np_random)
        return self.observation()

    def step(self, action: np.ndarray) -> tuple[np.ndarray, np.float64, bool, bool, dict[str, np.float64]]:
        """Simulate 0.1 s with torques 30 * `action` (8,)."""
        self.do_simulation(self.torque * np.clip(action, -1, 1), self.frame_skip)
        reached = bool(np.linalg.norm(self.data.qpos[:2] - self.goal) <= GOAL_RADIUS)
        if self.render_mode == "human":
            self.render()  # type: ignore[no-untyped-call]
        return self.observation(), np.float64(reached), reached, False, {}

    def observation(self) -> np.ndarray:
        """The current observation (31,)."""
        return np.concatenate([self.data.qpos[:15], self.data.qvel[:14], self.goal])
