"""Collect a dataset from published policies, which act one after the other in any gymnasium environment.

    python -m scripts.collect_policy tap/StochasticHopper-v0 stochastic-hopper-medium-replay.hdf5 --policy snapshots.npz:0-40

A policy is FILE, or FILE:ITERATION or FILE:FIRST-LAST of a file with snapshots of training; FILE alone means all its snapshots.
Each snapshot and each policy collects an equal share of the transitions, in the order given. So the first snapshots of training
make a dataset like D4RL's `-medium-replay`, the last one `-expert`, and a medium and an expert policy `-medium-expert`.

Actions are sampled from the policy and clipped to the environment's range. Episodes are whole; an episode ended by the
environment's step limit has a timeout on its last row.

The file has D4RL's layout. It is not D4RL's data, and no score on it is a D4RL score: its attribute `source`, which every
result states, is "recollected", and a JSON file of the same name records its provenance. The arrays of a policy's file are
listed in scripts/policy_files.py.
"""

import json
import math
import re
from pathlib import Path
from typing import Annotated, Any

import gymnasium
import numpy as np
import typer
from tqdm import tqdm

from pipelines.command_line import main
from scripts.policy_files import Policy, read_policies
from scripts.recording import describe_returns, episode_returns, write_recording
from tap.envs import registration
from tap.envs.make import simulator
from tap.files import sha256

gymnasium.register_envs(registration)


def select_policies(source: str, observation_dim: int, action_dim: int) -> tuple[Path, dict[int | None, Policy]]:
    """The file and the policies, by iteration, that FILE, FILE:ITERATION or FILE:FIRST-LAST means.

    Raises ValueError where the file has no policy of these dimensions, or none of these iterations.
    """
    name, span = source, None
    if match := re.fullmatch(r"(.+):(\d+)(?:-(\d+))?", source):
        name, first, last = match.groups()
        span = range(int(first), int(last or first) + 1)
    policies = read_policies(Path(name), observation_dim, action_dim)
    if span is None:
        return Path(name), policies
    selected = {iteration: policy for iteration, policy in policies.items() if iteration in span}
    if not selected:
        iterations = [str(iteration) for iteration in policies if iteration is not None]
        remedy = f"choose among {', '.join(iterations)}" if iterations else f"it has one policy, so write {name}"
        raise ValueError(f"--policy {source}: {name} has no such iteration: {remedy}")
    return Path(name), selected


def collect(environment: str, out: Path, *, policy: list[str], transitions: int, seed: int) -> dict[str, Any]:
    """Collect whole episodes of at least `transitions` rows into `out`, with the provenance beside it; returns the provenance.

    Raises ValueError where gymnasium cannot make the environment, or a policy cannot be read or does not fit it.
    """
    try:
        env = gymnasium.make(environment)
    except (gymnasium.error.Error, ImportError) as error:
        raise ValueError(f"gymnasium cannot make {environment!r} ({error}): write a registered id, or package:id") from error
    box, observations = env.action_space, env.observation_space
    if not all(isinstance(space, gymnasium.spaces.Box) and len(space.shape) == 1 for space in (box, observations)):
        raise ValueError(f"{environment} has observations in {observations} and actions in {box}: both must be flat boxes")
    assert isinstance(box, gymnasium.spaces.Box) and observations.shape is not None
    selected = [select_policies(source, observations.shape[0], box.shape[0]) for source in policy]
    policies = [each for _, of_file in selected for each in of_file.values()]

    rng = np.random.default_rng(seed)
    rows: list[tuple[np.ndarray, np.ndarray, float, bool, bool]] = []
    with tqdm(total=transitions, unit=" steps", unit_scale=True, desc=out.stem) as progress:
        while len(rows) < transitions:
            actor = policies[math.floor(len(rows) / transitions * len(policies))]
            observation, _ = env.reset(seed=int(rng.integers(2**31)))
            terminated = truncated = False
            while not (terminated or truncated):
                action = np.clip(actor.act(observation, rng), box.low, box.high).astype(np.float32)
                following, reward, terminated, truncated, _ = env.step(action)
                rows.append((observation, action, float(reward), terminated, truncated and not terminated))
                observation = following
            progress.update(len(rows) - progress.n)
    env.close()

    keys = {"observations": np.float32, "actions": np.float32, "rewards": np.float32, "terminals": bool, "timeouts": bool}
    columns = {key: np.array(values, dtype) for (key, dtype), values in zip(keys.items(), zip(*rows, strict=True), strict=True)}
    returns = episode_returns(columns["rewards"], columns["terminals"] | columns["timeouts"])
    provenance = {
        "source": "recollected",
        "script": "python -m scripts.collect_policy",
        "environment": environment,
        "simulator": simulator(environment),
        "policies": [
            {"file": file.name, "sha256": sha256(file), "iterations": [i for i in of_file if i is not None]}
            for file, of_file in selected
        ],
        "seed": seed,
        "transitions": len(rows),
        "finished_episodes": len(returns),
        "return": describe_returns(returns),
    }
    write_recording(out, columns, provenance)
    return provenance


def run(
    environment: Annotated[str, typer.Argument(help="A gymnasium id, or package:id to import the package first.")],
    out: Annotated[Path, typer.Argument(help="The HDF5 file to write; its provenance is written to the same name with .json.")],
    policy: Annotated[list[str], typer.Option(help="FILE, FILE:ITERATION or FILE:FIRST-LAST; repeat it for several policies.")],
    transitions: Annotated[int, typer.Option(min=1, help="Minimum number of rows.")] = 100_000,
    seed: Annotated[int, typer.Option(help="Seed of episodes and sampled actions.")] = 0,
) -> None:
    print(json.dumps(collect(environment, out, policy=policy, transitions=transitions, seed=seed), indent=2))


if __name__ == "__main__":
    main(run)
