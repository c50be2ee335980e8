"""Recollect an AntMaze dataset: a policy that walks in a given direction is guided from goal to goal through a maze.

    python -m scripts.collect_antmaze umaze-diverse antmaze-umaze-diverse.hdf5 --policy antmaze-goal-direction.npz

This repeats D4RL's procedure in the current simulator. A search on the map gives the next cell on the shortest path to the
goal, and the policy walks to the centre of that cell (D4RL: to a point near it, sampled at each step). Its actions are sampled,
plus noise N(0, 0.2). Occasionally the ant falls on its back or gets stuck at a corner and stays there until the episode ends.
Starts and goals depend on the task, each with D4RL's noise around the centre of its cell (for ultra shifted, see
tap/envs/mazes.py):

    umaze      start and goal of the evaluation
    *-play     start in any cell that is not a goal; goals hand-picked by D4RL, for ultra by its authors
    *-diverse  start and goal in any cell

An episode continues at the goal and has 1,001 rows (umaze: 701). Rewards and terminals refer to a single goal in the
evaluation's goal cell, sampled once per file: they are 1 and true on rows that end within 0.5 m of it. `infos/goal` is the goal
that the ant walked to. As in AntMaze-Ultra's own collection, two cells at the edge of the ultra maze are open.

The file has D4RL's layout; `infos/qpos` and `infos/qvel` are the state in which the row's action was taken. It is not D4RL's
data, and no score on it is a D4RL score: its attribute `source`, which every result states, is "recollected", and a JSON file
of the same name records its provenance.

The weights are an .npz file of arrays weight_0, bias_0, ... of a ReLU network with 29 inputs (the ant's positions without x and
y, its velocities, ten times the unit vector to the waypoint). Its last layer gives the mean, and log_std_weight, log_std_bias
the log std, of a Gaussian that tanh maps to 8 actions. Needs the `d4rl` extra for its ant model.
"""

import importlib.metadata
import json
import math
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from tqdm import tqdm

from pipelines.command_line import main
from scripts.policy_files import Policy, read_policies
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


def act_towards(policy: Policy, observation: np.ndarray, direction: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A sampled action (8,) for an observation (31,) and a direction (2,) of any length above 0."""
    return policy.act(np.concatenate([observation[2:29], 10 * direction / np.linalg.norm(direction)]), rng)


class Guide:
    """Shortest paths through a maze to one goal."""

    def __init__(self, maze: Maze, goal: np.ndarray) -> None:
        self.maze, self.goal = maze, goal
        target, free = maze.cell(goal), set(maze.free)
        self.steps, queue = {target: 0}, deque([target])  # from each cell to the goal's cell
        while queue:
            cell = queue.popleft()
            for neighbour in _neighbours(cell):
                if neighbour in free and neighbour not in self.steps:
                    self.steps[neighbour] = self.steps[cell] + 1
                    queue.append(neighbour)

    def waypoint(self, position: np.ndarray) -> np.ndarray:
        """The next point (2,) on the path from a position (2,): the next cell's centre, or the goal if at most a cell away."""
        cell = self.maze.cell(position)
        if self.steps[cell] <= 1:
            return self.goal
        return self.maze.centre(min((c for c in _neighbours(cell) if c in self.steps), key=self.steps.__getitem__))


def _neighbours(cell: Cell) -> list[Cell]:
    i, j = cell
    return [(i, j - 1), (i, j + 1), (i + 1, j), (i - 1, j)]


@dataclass(frozen=True)
class Task:
    """A maze, and the cells in which episodes start and have their goals."""

    name: str
    maze_name: str
    maze: Maze
    starts: tuple[Cell, ...]  # empty: start as in an evaluation
    goals: tuple[Cell, ...]
    episode_length: int  # rows


def task_of(name: str) -> Task:
    """The task called `name`. Raises ValueError where it is not one of TASKS."""
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}: choose one of {', '.join(TASKS)}")
    maze_name, _, kind = name.partition("-")
    maze = MAZES[maze_name].opened(*ULTRA_OPENINGS) if maze_name == "ultra" else MAZES[maze_name]
    goals = {"": (maze.goal,), "play": PLAY_GOALS.get(maze_name, ()), "diverse": tuple(maze.free)}[kind]
    starts = {"": (), "play": tuple(cell for cell in maze.free if cell not in goals), "diverse": tuple(maze.free)}[kind]
    return Task(name, maze_name, maze, starts, goals, episode_length=701 if maze_name == "umaze" else 1001)


def collect(task: str, out: Path, *, policy: Path, transitions: int, seed: int) -> dict[str, Any]:
    """Collect whole episodes of at least `transitions` rows into `out`, with the provenance beside it; returns the provenance.

    Raises ValueError for an unknown task, a file without a policy's weights, or where the d4rl package is not installed.
    """
    spec, walker = task_of(task), list(read_policies(policy, 29, 8).values())[-1]
    ant = AntMaze(spec.maze)
    ant.reset(seed=seed)
    target = spec.maze.sample_goal(spec.maze.goal, ant.np_random)

    length, episodes = spec.episode_length, math.ceil(transitions / spec.episode_length)
    widths = {"observations": 29, "actions": 8, "infos/goal": 2, "infos/qpos": 15, "infos/qvel": 14}
    columns: dict[str, np.ndarray] = {key: np.empty((episodes * length, width), np.float32) for key, width in widths.items()}
    reached_target = np.empty(episodes * length, bool)
    reached_own_goal = np.zeros(episodes, bool)
    with tqdm(total=episodes * length, unit=" steps", unit_scale=True, desc=task) as progress:
        for episode in range(episodes):
            rows = slice(episode * length, (episode + 1) * length)
            in_episode = {key: column[rows] for key, column in columns.items()}
            reset_to_sampled_task(ant, spec)
            positions, reached_own_goal[episode] = walk_to_goal(ant, walker, in_episode)
            reached_target[rows] = np.linalg.norm(positions - target, axis=1) <= GOAL_RADIUS
            progress.update(length)

    timeouts = np.zeros(episodes * length, bool)
    timeouts[length - 1 :: length] = True
    columns |= {"rewards": reached_target.astype(np.float32), "terminals": reached_target, "timeouts": timeouts}
    packages = ("mujoco", "gymnasium", "numpy", "d4rl")
    provenance = {
        "source": "recollected",
        "script": "python -m scripts.collect_antmaze",
        "task": f"antmaze-{task}",
        "maze": spec.maze_name,
        "policy": {"file": policy.name, "sha256": sha256(policy), "action_noise": ACTION_NOISE},
        "seed": seed,
        "evaluation_goal": target.tolist(),
        "versions": {package: importlib.metadata.version(package) for package in packages},
        "transitions": episodes * length,
        "finished_episodes": episodes,
        "episodes_that_reached_their_own_goal": int(reached_own_goal.sum()),
        "episodes_that_reached_the_evaluation_goal": int(reached_target.reshape(episodes, length).any(axis=1).sum()),
        "return": describe_returns(episode_returns(columns["rewards"], timeouts)),
    }
    write_recording(out, columns, provenance)
    return provenance


def reset_to_sampled_task(ant: AntMaze, task: Task) -> None:
    """Reset the ant to a start and a goal of the task, both sampled from the environment's generator."""
    maze, rng = task.maze, ant.np_random
    ant.reset()
    if task.starts:
        # Ultra's shift counts half for starts.
        middle = maze.centre(task.starts[rng.integers(len(task.starts))]) + maze.goal_shift / 2
        ant.data.qpos[:2] = np.maximum(middle + rng.uniform(0, 1, 2), 0)
        ant.set_state(ant.data.qpos, ant.data.qvel)  # type: ignore[no-untyped-call]
    ant.goal = maze.sample_goal(task.goals[rng.integers(len(task.goals))], rng)


def walk_to_goal(ant: AntMaze, walker: Policy, columns: dict[str, np.ndarray]) -> tuple[np.ndarray, bool]:
    """Fill the columns (T, ...) of one episode; returns positions (T, 2) after each step, and whether the goal was reached."""
    guide, observation = Guide(ant.maze, ant.goal), ant.observation()
    positions, reached = np.empty((len(columns["actions"]), 2)), False
    for row in range(len(positions)):
        direction = guide.waypoint(observation[:2]) - observation[:2]
        action = act_towards(walker, observation, direction, ant.np_random) + ACTION_NOISE * ant.np_random.standard_normal(8)
        row_values = (observation[:29], action.clip(-1, 1), ant.goal, ant.data.qpos, ant.data.qvel)
        for values, column in zip(row_values, columns.values(), strict=True):
            column[row] = values
        observation, _, at_goal, _, _ = ant.step(columns["actions"][row])
        positions[row] = observation[:2]
        reached |= at_goal
    return positions, reached


def run(
    task: Annotated[str, typer.Argument(help=f"One of {', '.join(TASKS)}.")],
    out: Annotated[Path, typer.Argument(help="The HDF5 file to write; its provenance is written to the same name with .json.")],
    policy: Annotated[Path, typer.Option(help="The .npz file of weights described above.")],
    transitions: Annotated[int, typer.Option(min=1, help="Minimum number of rows; the default is D4RL's.")] = 1_000_000,
    seed: Annotated[int, typer.Option(help="Seed of starts, goals and sampled actions.")] = 0,
) -> None:
    print(json.dumps(collect(task, out, policy=policy, transitions=transitions, seed=seed), indent=2))


if __name__ == "__main__":
    main(run)
