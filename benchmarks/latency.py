"""Decision latency of the Trajectory Transformer (TT) beside TAP's: by dimensions at horizon 15, and by horizon for Hopper.

Both at the paper's locomotion sizes: TAP with a beam of 64 x 4, TT with one of 128 x 2 over 100 bins a dimension. Weights are
random: neither search's work depends on them, nor on which bins are left out. Each size is measured for itself, after a
decision of each method to warm up: in three rounds, a decision of TT between two of TAP. "ratio" is the median over rounds of
TT's time against the mean of both, by the clock; "processor_ratio" that of processor time, which other work on the machine
changes less. "speedup" compares TT's search with a plain one without a cache, over 3 steps.

--quick measures the smallest sizes, in one round. What is finished is also printed to stderr, so after an interruption --only
measures the rest; `python -m benchmarks.latency_figure OUT.png FILE...` draws the JSON of one or several runs.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from benchmarks.measure import Result, in_turn, machine, ratio, seconds
from benchmarks.planning import generators
from benchmarks.sizes import LAYOUTS, params_of, random_observations, random_policy, random_trajectory_transformer
from tap.device import choose_device
from tap.methods import trajectory_reference
from tap.settings import Params

# Task and horizon, the costliest last. The tasks have 14, 23, 35 and 69 observations and actions.
SIZES = {f"hopper-{horizon}": ("hopper", horizon) for horizon in (3, 9, 15, 21, 27, 33)}
SIZES |= {f"{task}-15": (task, 15) for task in ("halfcheetah", "ant", "pen")}
QUICK = ("hopper-3", "hopper-9")
SPEEDUP = "speedup"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON, as it always does")
    parser.add_argument("--quick", action="store_true", help=f"one round; unless --only is given, of {', '.join(QUICK)}")
    parser.add_argument("--only", nargs="+", choices=[*SIZES, SPEEDUP], help="measure these alone", metavar="SIZE")
    options = parser.parse_args()
    device, result, started = choose_device("auto"), machine(), time.perf_counter()
    rounds = 1 if options.quick else 3
    for name in options.only or (QUICK if options.quick else (*SIZES, SPEEDUP)):
        result[name] = speedup(device, rounds) if name == SPEEDUP else compare(*SIZES[name], device, rounds)
        print(json.dumps({name: result[name]}), file=sys.stderr, flush=True)
    result["wall_seconds"] = time.perf_counter() - started
    print(json.dumps(result, indent=2))


def compare(task: str, horizon: int, device: torch.device, rounds: int) -> Result:
    """Decisions of both methods for one state of a task, as far ahead as `horizon`."""
    params, layout = searching(horizon), LAYOUTS[task]
    observations = random_observations(1, layout)
    policies = random_policy(params, layout, device), random_trajectory_transformer(params, layout, device)
    tap, tt = ((lambda policy=policy: policy.plan(observations, generators(1))) for policy in policies)
    for warm_up in (tap, tt):
        warm_up()
    of_tap, of_tt = [times(tap, device)], []
    for _ in range(rounds):
        of_tt.append(times(tt, device))
        of_tap.append(times(tap, device))
    (tap_wall, tap_processor), (tt_wall, tt_processor) = zip(*of_tap, strict=True), zip(*of_tt, strict=True)
    return {
        "dimensions": layout.observation_dim + layout.action_dim,
        "horizon": horizon,
        "tap_ms": 1000 * statistics.median(tap_wall),
        "tt_ms": 1000 * statistics.median(tt_wall),
        "ratio": ratio(tt_wall, [*map(statistics.fmean, pairwise(tap_wall))]),
        "processor_ratio": ratio(tt_processor, [*map(statistics.fmean, pairwise(tap_processor))]),
    }


def times(function: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """Seconds of one call by the clock, and of processor time."""
    before = time.process_time()
    wall = seconds(function, device)
    return wall, time.process_time() - before


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


def speedup(device: torch.device, rounds: int) -> float:
    """How many times faster TT's search is than the plain one."""
    planner = random_trajectory_transformer(searching(3), LAYOUTS["hopper"], device).planner
    states = torch.from_numpy(random_observations(1, LAYOUTS["hopper"])).to(device)
    functions = {
        "fast": lambda: planner.plan(states, generators(1)),
        "plain": lambda: trajectory_reference.plan(planner, states, generators(1)),
    }
    measured = in_turn(functions, device, rounds)
    return ratio(measured["plain"], measured["fast"])


if __name__ == "__main__":
    main()
