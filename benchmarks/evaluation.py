"""Episodes an hour in Hopper-v4: 20 in lockstep, which share each batched plan, against one at a time. At the `cpu` scale.

Every episode is measured over its first steps and counted as 1000; none ends early, though the policy is random.
"""

import importlib.util
import warnings

import numpy as np
import torch

from benchmarks.measure import Result, main, seconds
from benchmarks.sizes import LAYOUTS, params_of, random_policy
from tap.planning.policy import Policy

EPISODES = 20
WHOLE = 1000  # steps of an episode


def benchmark(device: torch.device, quick: bool) -> Result:
    if importlib.util.find_spec("gymnasium") is None or importlib.util.find_spec("mujoco") is None:
        return {"skipped": "gymnasium[mujoco] is not installed"}
    policy = random_policy(params_of("hopper", "cpu"), LAYOUTS["hopper"], device)
    steps = 20 if quick else 100
    for episodes in (1, EPISODES):
        run(policy, episodes, 2)
    per_hour = {name: [] for name in ("lockstep", "one_at_a_time")}
    for _ in range(3):  # in turn
        for name, episodes in (("lockstep", EPISODES), ("one_at_a_time", 1)):
            taken = seconds(lambda episodes=episodes: run(policy, episodes, steps), device)
            per_hour[name].append(3600 / taken * episodes * steps / WHOLE)
    ratios = [a / b for a, b in zip(*per_hour.values(), strict=True)]
    result: Result = {f"episodes_per_hour_{name}": float(np.median(values)) for name, values in per_hour.items()}
    return result | {"episodes": EPISODES, "speedup": float(np.median(ratios))}


def run(policy: Policy, episodes: int, steps: int) -> None:
    """As tap.evaluation.rollout.rollout does, without what it measures on the way."""
    import gymnasium

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        envs = [gymnasium.make("Hopper-v4", terminate_when_unhealthy=False) for _ in range(episodes)]
    generators = [torch.Generator().manual_seed(episode) for episode in range(episodes)]
    observations = [env.reset(seed=episode)[0] for episode, env in enumerate(envs)]
    for _ in range(steps):
        actions = policy.act(np.stack(observations).astype(np.float32), generators)
        observations = [env.step(np.clip(action, -1, 1))[0] for env, action in zip(envs, actions, strict=True)]
    for env in envs:
        env.close()


if __name__ == "__main__":
    main(__doc__, benchmark)
