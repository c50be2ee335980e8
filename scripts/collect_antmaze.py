"""Recollect an AntMaze dataset: an ant that knows how to walk is sent from goal to goal through a maze.

    python -m scripts.collect_antmaze umaze-diverse antmaze-umaze-diverse.hdf5 --policy antmaze-goal-direction.npz

This is how D4RL made its files, repeated in today's simulator. A search on the maze's map gives the next cell on the shortest
way to the goal, and the policy, a network trained to walk in a given direction, goes to its centre (D4RL: to a point beside
it, drawn at each step); its actions are sampled and get noise N(0, 0.2) on top. Now and then the ant falls on its back, or is
caught at a corner, and stays there to the episode's end. Starts and goals, each with D4RL's noise around its cell's centre
(ultra's shifted, see tap/envs/mazes.py), are by task

    umaze      the evaluation's start and goal
    *-play     any cell but a goal; the goals that D4RL, or for ultra its authors, picked by hand
    *-diverse  any cell; any cell

An episode goes on at the goal, and has 1,001 rows (umaze: 701). Then rewards and terminals are set against one goal of the
evaluation's cell, drawn once for the file: 1 and true on rows that end within 0.5 m of it. `infos/goal` is the goal that the
ant went for. AntMaze-Ultra's authors collected in a maze with two more open cells, at its edge; so does this.

The file has D4RL's layout, `infos/qpos` and `infos/qvel` being the state that the row's action was taken in. It is not D4RL's
data, and no score on it is a D4RL score: its attribute `source`, which every result quotes, is "recollected", and a JSON file
of the same name beside it says how it was made.

The weights are an .npz of arrays weight_0, bias_0, ... of a ReLU network with 29 inputs (the ant's positions but x and y, its
velocities, ten times the direction to go), whose last layer gives the mean, and log_std_weight, log_std_bias, the logarithm of
the deviation of a Gaussian that tanh squashes to 8 actions. Needs the `d4rl` extra, for its ant.
"""

import argparse
import importlib.metadata
import json
import math
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from scripts.recording import describe_returns, episode_returns, write_recording
from tap.envs.antmaze import GOAL_RADIUS, AntMaze
from tap.envs.mazes import MAZES, Cell, Maze
from tap.files import sha256

PLAY_GOALS: dict[str, tuple[Cell, ...]] = {
    "medium": ((2, 6), (5, 1), (6, 5)),
    "large": ((1, 6), (3, 5), (3, 10), (5, 2), (7, 4), (7, 6), (7, 9)),
    "ultra": (
        *((1, 4), (1, 11), (1, 14), (2, 5), (2, 9), (3, 7), (4, 3), (4, 12), (5, 1), (5, 7), (5, 10), (5, 14)),
        *((6, 5), (7, 3), (7, 11), (8, 1), (8, 7), (8, 13), (9, 5), (10, 9), (10, 14)),
    ),
}
TASKS = ("umaze", "umaze-diverse", *(f"{maze}-{kind}" for maze in PLAY_GOALS for kind in ("play", "diverse")))
ULTRA_OPENINGS = ((11, 7), (11, 9))
ACTION_NOISE = 0.2


class GoalPolicy:
    """The network that walks in a given direction."""

    def __init__(self, weights: Path) -> None:
        """Raises ValueError where the file is no .npz of these arrays."""
        try:
            with np.load(weights, allow_pickle=False) as arrays:
                layers = sum(name.startswith("weight_") for name in arrays)
                self.layers = [(arrays[f"weight_{i}"], arrays[f"bias_{i}"]) for i in range(layers)]
                self.log_std = arrays["log_std_weight"], arrays["log_std_bias"]
        except (OSError, KeyError, ValueError) as error:
            raise ValueError(f"{weights} does not hold a policy's weights ({error}): see --help for the arrays") from error

    def act(self, observation: np.ndarray, direction: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """An action (8,), sampled, for an observation (31,) and the way (2,) to go, of any length above 0."""
        x = np.concatenate([observation[2:29], 10 * direction / np.linalg.norm(direction)])
        for weight, bias in self.layers[:-1]:
            x = np.maximum(0.0, weight @ x + bias)
        (weight, bias), (std_weight, std_bias) = self.layers[-1], self.log_std
        std = np.exp(np.clip(std_weight @ x + std_bias, -20, 2))
        return np.asarray(np.tanh(weight @ x + bias + std * rng.standard_normal(len(std))))


class Guide:
    """Shortest ways through a maze to one goal."""

    def __init__(self, maze: Maze, goal: np.ndarray) -> None:
        self.maze, self.goal = maze, goal
        target, free = maze.cell(goal), set(maze.free)
        self.steps, queue = {target: 0}, deque([target])  # steps to the goal's cell, from each cell that it can be reached from
        while queue:
            cell = queue.popleft()
            for neighbour in _neighbours(cell):
                if neighbour in free and neighbour not in self.steps:
                    self.steps[neighbour] = self.steps[cell] + 1
                    queue.append(neighbour)

    def waypoint(self, position: np.ndarray) -> np.ndarray:
        """Where (2,) to go from a position (2,): to the next cell's centre, or to the goal in this cell or the next."""
        cell = self.maze.cell(position)
        if self.steps[cell] <= 1:
            return self.goal
        return self.maze.centre(min((c for c in _neighbours(cell) if c in self.steps), key=self.steps.__getitem__))


def _neighbours(cell: Cell) -> list[Cell]:
    i, j = cell
    return [(i, j - 1), (i, j + 1), (i + 1, j), (i - 1, j)]


def collect(task: str, out: Path, *, policy: Path, transitions: int, seed: int) -> dict[str, Any]:
    """Collect whole episodes of at least `transitions` rows into `out`, its provenance into a .json; returns the provenance.

    Raises ValueError where the policy's file holds no weights, or the d4rl package is not installed.
    """
    name, _, kind = task.partition("-")
    maze = MAZES[name].opened(*ULTRA_OPENINGS) if name == "ultra" else MAZES[name]
    goals = {"": (maze.goal,), "play": PLAY_GOALS.get(name, ()), "diverse": tuple(maze.free)}[kind]
    starts = [cell for cell in maze.free if kind == "diverse" or cell not in goals]
    walker, ant = GoalPolicy(policy), AntMaze(maze)
    ant.reset(seed=seed)
    rng = ant.np_random
    target = maze.draw_goal(maze.goal, rng)

    length = 701 if name == "umaze" else 1001
    episodes = math.ceil(transitions / length)
    widths = {"observations": 29, "actions": 8, "infos/goal": 2, "infos/qpos": 15, "infos/qvel": 14}
    columns: dict[str, np.ndarray] = {key: np.empty((episodes * length, width), np.float32) for key, width in widths.items()}
    reached = np.empty(episodes * length, bool)
    own_goal = np.zeros(episodes, bool)
    progress = tqdm(total=episodes * length, unit=" steps", unit_scale=True, desc=task)
    for episode in range(episodes):
        ant.reset()
        if kind:
            middle = (
                maze.centre(starts[rng.integers(len(starts))]) + maze.goal_shift / 2
            )  # Ultra's shift counts half for starts
            ant.data.qpos[:2] = np.maximum(middle + rng.uniform(0, 1, 2), 0)
            ant.set_state(ant.data.qpos, ant.data.qvel)  # type: ignore[no-untyped-call]
        ant.goal = maze.draw_goal(goals[rng.integers(len(goals))], rng)
        guide, observation = Guide(maze, ant.goal), ant.observation()
        for row in range(episode * length, (episode + 1) * length):
            way = guide.waypoint(observation[:2]) - observation[:2]
            action = walker.act(observation, way, rng) + ACTION_NOISE * rng.standard_normal(8)
            row_values = (observation[:29], action.clip(-1, 1), ant.goal, ant.data.qpos, ant.data.qvel)
            for values, column in zip(row_values, columns.values(), strict=True):
                column[row] = values
            observation, _, at_goal, _, _ = ant.step(columns["actions"][row])
            reached[row] = np.linalg.norm(observation[:2] - target) <= GOAL_RADIUS
            own_goal[episode] |= at_goal
        progress.update(length)
    progress.close()

    timeouts = np.zeros(episodes * length, bool)
    timeouts[length - 1 :: length] = True
    columns |= {"rewards": reached.astype(np.float32), "terminals": reached, "timeouts": timeouts}
    packages = ("mujoco", "gymnasium", "numpy", "d4rl")
    provenance = {
        "source": "recollected",
        "script": "python -m scripts.collect_antmaze",
        "task": f"antmaze-{task}",
        "maze": name,
        "policy": {"file": policy.name, "sha256": sha256(policy), "action_noise": ACTION_NOISE},
        "seed": seed,
        "evaluation_goal": target.tolist(),
        "versions": {package: importlib.metadata.version(package) for package in packages},
        "transitions": episodes * length,
        "finished_episodes": episodes,
        "episodes_that_reached_their_own_goal": int(own_goal.sum()),
        "episodes_that_reached_the_evaluation_goal": int(reached.reshape(episodes, length).any(axis=1).sum()),
        "return": describe_returns(episode_returns(columns["rewards"], timeouts)),
    }
    write_recording(out, columns, provenance)
    return provenance


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS, metavar="TASK", help=", ".join(TASKS))
    parser.add_argument("out", type=Path, help="the HDF5 file to write; its provenance goes to the same name with .json")
    parser.add_argument("--policy", type=Path, required=True, help="the .npz file of weights described above")
    parser.add_argument(
        "--transitions", type=int, default=1_000_000, help="rows to collect, at least; default: as D4RL, %(default)s"
    )
    parser.add_argument("--seed", type=int, default=0)
    try:
        print(json.dumps(collect(**vars(parser.parse_args())), indent=2))
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
