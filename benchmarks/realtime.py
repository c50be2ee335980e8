"""Whether a robot's control loop is held at `cpu` scale, on one thread: decisions, and clients of `tap serve` over HTTP.

Decisions of a reflex, of the default planner, of the beam search, of both operation by operation rather than as a trace
(tap/traced.py), and of the plain planner (tap/planning/reference.py); in turn, so that their ratios hold on a machine that is
shared. "times_as_fast" compares with the beam search operation by operation, which was the default before there were traces.
"profile" is the share of a decision's time that each operation takes. "within" is what a budget of so many milliseconds finds,
and how often it is kept.
"""

import importlib.util
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.measure import Result, in_turn, main, profile, ratio
from benchmarks.planning import generators
from benchmarks.serving import missed_ticks, server
from benchmarks.sizes import LAYOUTS, params_of, random_observations, random_policy
from tap.methods.reflex import Reflex
from tap.planning import reference
from tap.planning.anytime import WARM_UP
from tap.planning.policy import Policy

LOOPS = {"1_client_50_hz": (1, 1 / 50), "8_clients_20_hz": (8, 1 / 20)}  # clients, seconds of a tick
BUDGETS_MS = (2, 5, 10, 20, 50)
LATE = 1.2  # times the budget


def benchmark(device: torch.device, quick: bool) -> Result:
    torch.set_num_threads(1)
    cpu, layout, decisions = torch.device("cpu"), LAYOUTS["hopper"], 50 if quick else 300
    observations = random_observations(1, layout)
    states = torch.from_numpy(observations)
    default, beam = (
        random_policy(params_of("hopper", "cpu", evaluate={"planner": planner}), layout, cpu)
        for planner in ({}, {"search": "beam"})
    )

    @torch.no_grad()
    def by_operations(policy: Policy) -> None:
        policy.planner.solve(states, policy.planner.noise(generators(1)), best=True)

    reflex = Reflex(params_of("hopper", "cpu").train_reflex, layout, beam.normalizer).eval()
    planners: dict[str, Callable[[], Any]] = {
        "reflex": lambda: reflex.plan(observations, generators(1)),
        "default": lambda: default.plan(observations, generators(1)),
        "default_by_operations": lambda: by_operations(default),
        "beam": lambda: beam.plan(observations, generators(1)),
        "beam_by_operations": lambda: by_operations(beam),
        "reference": lambda: reference.plan(beam.planner, states, generators(1)),
    }
    for planner in planners.values():
        for _ in range(WARM_UP):
            planner()
    seconds = in_turn(planners, cpu, decisions)
    result: Result = {
        "decision_ms": {name: spread(each) for name, each in seconds.items()},
        "times_as_fast": {name: ratio(seconds["beam_by_operations"], each) for name, each in seconds.items()},
        "profile": {name: profile(planner, cpu) for name, planner in planners.items() if "beam" in name},
        "within": {f"{budget}_ms": within(beam, observations, budget, decisions) for budget in BUDGETS_MS},
    }
    if importlib.util.find_spec("mlflow") is None:
        return result
    for name, planner in (("default", {}), ("beam", {"search": "beam"})):
        with server(params_of("hopper", "cpu", evaluate={"planner": planner})) as url:
            missed_ticks(url, 8, 2.0)  # warms up
            result[f"missed_ticks_{name}"] = {
                loop: missed_ticks(url, clients, 5.0 if quick else 30.0, period) for loop, (clients, period) in LOOPS.items()
            }
    return result


def spread(seconds: list[float]) -> dict[str, float]:
    """Milliseconds."""
    tenth, median, p99 = 1000 * np.percentile(seconds, [10, 50, 99])
    return {"p10": float(tenth), "median": float(median), "p99": float(p99)}


def within(policy: Policy, observations: np.ndarray, budget_ms: float, decisions: int) -> Result:
    """What decisions with a budget take, the share of them that is late, and of each search that was made."""
    searched: Counter[str] = Counter()
    policy.anytime.measure(observations)

    def decide() -> None:
        searched.update(policy.plan_within(observations, generators(1), budget_ms / 1000).searched)

    milliseconds = 1000 * np.array(in_turn({"decide": decide}, policy.device, decisions)["decide"])
    return {
        **spread(list(milliseconds / 1000)),
        "late": float(np.mean(milliseconds > LATE * budget_ms)),
        "searched": {name: count / searched.total() for name, count in searched.most_common()},
    }


if __name__ == "__main__":
    main(__doc__, benchmark)
