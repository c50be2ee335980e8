"""Collect a medium-replay dataset: all transitions of a SAC agent until its policy is medium.

    python -m scripts.collect data/bundled/hopper-medium-replay.hdf5 --seed 2

This repeats the procedure of D4RL's `-medium-replay` files in the current simulator: train soft actor-critic from scratch and
keep the whole replay buffer up to the point where the policy is medium. The file has D4RL's layout, but it is not D4RL's data,
and no score on it is a D4RL score. A JSON file of the same name records its provenance. Needs the `collect` extra.
"""

import importlib.metadata
import json
from collections import deque
from pathlib import Path
from typing import Annotated, Any

import gymnasium
import numpy as np
import torch
import typer
from stable_baselines3 import SAC
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.monitor import Monitor

from pipelines.command_line import main
from scripts.recording import describe_returns, episode_returns, write_recording

MEDIUM_EPISODES = 20  # the policy is medium when the mean return of this many consecutive episodes is high enough
# Networks that train in minutes on one CPU core, and random actions at the start, as usual for SAC on MuJoCo tasks.
SAC_OPTIONS: dict[str, Any] = {"policy_kwargs": {"net_arch": [128, 128]}, "learning_rate": 1e-3, "learning_starts": 10_000}


class UntilMedium(BaseCallback):
    """Stops training after `at_least` steps, once the last MEDIUM_EPISODES episodes reach `medium_return` on average."""

    def __init__(self, medium_return: float, at_least: int) -> None:
        super().__init__()
        self.medium_return, self.at_least = medium_return, at_least
        self.recent: deque[float] = deque(maxlen=MEDIUM_EPISODES)

    def _on_step(self) -> bool:
        for info in self.locals["infos"]:
            if "episode" in info:
                self.recent.append(info["episode"]["r"])
        if self.num_timesteps % 5_000 == 0:
            print(f"step {self.num_timesteps}: mean return of the last episodes {np.mean(self.recent):.0f}", flush=True)
        medium = len(self.recent) == MEDIUM_EPISODES and np.mean(self.recent) >= self.medium_return
        return not (medium and self.num_timesteps >= self.at_least)


def collect(out: Path, *, environment: str, at_least: int, at_most: int, medium_return: float, seed: int) -> dict[str, Any]:
    """Train SAC, write its replay buffer to `out` and the provenance beside it as .json; returns the provenance."""
    torch.set_num_threads(1)  # the result depends on the number of threads
    agent = SAC("MlpPolicy", Monitor(gymnasium.make(environment)), seed=seed, buffer_size=at_most, **SAC_OPTIONS)
    agent.learn(at_most, callback=UntilMedium(medium_return, at_least))

    buffer = agent.replay_buffer
    assert buffer is not None
    rows = buffer.size()  # without the step at which the callback stopped training
    columns = {
        "observations": buffer.observations[:rows, 0].astype(np.float32),
        "actions": buffer.actions[:rows, 0].astype(np.float32),
        "rewards": buffer.rewards[:rows, 0].astype(np.float32),
        "timeouts": buffer.timeouts[:rows, 0].astype(bool),
    }
    ends = buffer.dones[:rows, 0].astype(bool)
    columns["terminals"] = ends > columns["timeouts"]
    returns = episode_returns(columns["rewards"], ends)
    counts, edges = np.histogram(returns, bins=20)
    packages = ("stable-baselines3", "gymnasium", "mujoco", "torch", "numpy")
    provenance = {
        "source": "bundled",
        "script": "python -m scripts.collect",
        "algorithm": f"SAC of stable-baselines3, whole replay buffer; differs from its defaults in {SAC_OPTIONS}",
        "environment": environment,
        "seed": seed,
        "stopped": f"mean of {MEDIUM_EPISODES} episodes >= {medium_return}, after at least {at_least} steps, at most {at_most}",
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "transitions": rows,
        "finished_episodes": len(returns),
        "return": describe_returns(returns),
        "return_histogram": {"counts": counts.tolist(), "edges": edges.round(1).tolist()},
    }
    write_recording(out, columns, provenance)
    return provenance


def run(
    out: Annotated[Path, typer.Argument(help="The HDF5 file to write; its provenance is written to the same name with .json.")],
    environment: Annotated[str, typer.Option(help="A gymnasium id with actions in [-1, 1].")] = "Hopper-v4",
    at_least: Annotated[int, typer.Option(help="Minimum number of steps.")] = 60_000,
    at_most: Annotated[int, typer.Option(help="Maximum number of steps.")] = 150_000,
    medium_return: Annotated[float, typer.Option(help="Mean return of a medium policy.")] = 1_400.0,
    seed: Annotated[int, typer.Option(help="Seed of training and episodes.")] = 0,
) -> None:
    limits = {"at_least": at_least, "at_most": at_most}
    print(json.dumps(collect(out, environment=environment, **limits, medium_return=medium_return, seed=seed), indent=2))


if __name__ == "__main__":
    main(run)
