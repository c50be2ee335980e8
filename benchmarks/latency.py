"""Decision latency of the Trajectory Transformer (TT) beside TAP's: by dimensions at horizon 15, and by horizon for Hopper.

Both at the paper's locomotion sizes: TAP with a beam of 64 x 4, TT with one of 128 x 2 over 100 bins a dimension. Weights are
random: neither search's work depends on them, nor on which bins are left out. All decisions are made in turn, in each of three
rounds after one to warm up; "ratio" is the median over rounds of TT's time against TAP's. "speedup" compares TT's search with a
plain one without a cache, over 3 steps.

On two CPU cores with nothing else running it takes about ten minutes; with --quick (two tasks at horizon 9, horizons 3 and 9,
one round) less than one.
"""

import statistics

import torch

from benchmarks.measure import Result, in_turn, main, ratio
from benchmarks.planning import generators
from benchmarks.sizes import LAYOUTS, params_of, random_observations, random_policy, random_trajectory_transformer
from tap.methods import trajectory_reference
from tap.methods.trajectory_transformer import TrajectoryTransformer
from tap.planning.policy import Policy
from tap.settings import Params

TASKS = ("hopper", "halfcheetah", "ant", "pen")  # 14, 23, 35 and 69 observations and actions
HORIZONS = (3, 9, 15, 21, 27, 33)


def benchmark(device: torch.device, quick: bool) -> Result:
    tasks, horizons = (TASKS[:2], HORIZONS[:2]) if quick else (TASKS, HORIZONS)
    sizes = {f"task {task}": (searching(9 if quick else 15), LAYOUTS[task]) for task in tasks}
    sizes |= {f"horizon {horizon}": (searching(horizon), LAYOUTS["hopper"]) for horizon in horizons}
    policies: dict[tuple[str, str], Policy | TrajectoryTransformer] = {}
    for name, (params, layout) in sizes.items():
        policies["tap", name] = random_policy(params, layout, device)
        policies["tt", name] = random_trajectory_transformer(params, layout, device)
    functions = {}
    for (method, name), policy in policies.items():
        observations = random_observations(1, sizes[name][1])
        functions[f"{method} {name}"] = lambda policy=policy, observations=observations: policy.plan(
            observations, generators(1)
        )
    seconds = in_turn(functions, device, 1 if quick else 3)
    result: Result = {}
    for name, (_, layout) in sizes.items():
        tap, tt = seconds[f"tap {name}"], seconds[f"tt {name}"]
        result[name] = {
            "dimensions": layout.observation_dim + layout.action_dim,
            "tap_ms": 1000 * statistics.median(tap),
            "tt_ms": 1000 * statistics.median(tt),
            "ratio": ratio(tt, tap),
        }
    return result | {"speedup": speedup(device, 1 if quick else 3)}


def searching(horizon: int) -> Params:
    """The paper's params, with this horizon for both methods."""
    search = {"horizon": horizon}
    return params_of(
        "hopper",
        "paper",
        train_vqvae={"windows": {"length": 33}},
        evaluate={"planner": search},
        train_tt={"search": search},
    )


def speedup(device: torch.device, repetitions: int) -> float:
    """How many times faster TT's search is than the plain one."""
    planner = random_trajectory_transformer(searching(3), LAYOUTS["hopper"], device).planner
    states = torch.from_numpy(random_observations(1, LAYOUTS["hopper"])).to(device)
    functions = {
        "fast": lambda: planner.plan(states, generators(1)),
        "plain": lambda: trajectory_reference.plan(planner, states, generators(1)),
    }
    seconds = in_turn(functions, device, repetitions)
    return ratio(seconds["plain"], seconds["fast"])


if __name__ == "__main__":
    main(__doc__, benchmark)
