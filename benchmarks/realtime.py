"""Whether a robot's control loop is held at `cpu` scale, on one thread: decisions, and clients of `tap serve` over HTTP.

Of the default planner, of the paper's beam search at the same size, and of the plain planner (tap/planning/reference.py); all in
turn, so that ratios hold on a machine that is shared. "step_by_step" is the same search, not recorded (tap/traced.py). "profile"
is the share of a decision's time that each operation takes.
"""

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.measure import Result, in_turn, main, profile, ratio
from benchmarks.planning import generators
from benchmarks.serving import missed_ticks, server
from benchmarks.sizes import LAYOUTS, params_of, random_observations, random_policy
from tap.planning import reference

LOOPS = {"1_client_50_hz": (1, 1 / 50), "8_clients_20_hz": (8, 1 / 20)}  # clients, seconds of a tick


def benchmark(device: torch.device, quick: bool) -> Result:
    torch.set_num_threads(1)
    cpu, layout = torch.device("cpu"), LAYOUTS["hopper"]
    observations = random_observations(1, layout)
    default, beam = (
        random_policy(params_of("hopper", "cpu", evaluate={"planner": planner}), layout, cpu)
        for planner in ({}, {"search": "beam"})
    )
    planners: dict[str, Callable[[], Any]] = {
        "default": lambda: default.plan(observations, generators(1)),
        "beam": lambda: beam.plan(observations, generators(1)),
        "reference": lambda: reference.plan(beam.planner, torch.from_numpy(observations), generators(1)),
    }
    seconds = in_turn(planners, cpu, 50 if quick else 300)
    result: Result = {
        "decision_ms": {name: spread(each) for name, each in seconds.items()},
        "profile": {name: profile(planners[name], cpu) for name in ("default", "beam")},
    }
    if importlib.util.find_spec("mlflow") is None:
        return result
    with server(params_of("hopper", "cpu")) as url:
        missed_ticks(url, 8, 2.0)  # warms up
        loops = {
            name: missed_ticks(url, clients, 5.0 if quick else 30.0, period) for name, (clients, period) in LOOPS.items()
        }
    return result | {"missed_ticks": loops}


def spread(seconds: list[float]) -> dict[str, float]:
    """Milliseconds."""
    tenth, median, p99 = 1000 * np.percentile(seconds, [10, 50, 99])
    return {"p10": float(tenth), "median": float(median), "p99": float(p99)}


if __name__ == "__main__":
    main(__doc__, benchmark)
