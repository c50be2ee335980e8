"""Decision time of exported policies beside the policy's own, for one state on one thread.

At `cpu` scale for Hopper's dimensions, with random weights: TAP with its default planner and with a beam search, and behaviour
cloning. Each is exported into a temporary folder; then policy, ONNX (by the folder's run.py, its checks and noise included) and
the package for C++ (by torch in Python, noise included) decide in turn, after one decision each to warm up.

"onnx" and "package" say how many times as fast as the policy they are, by medians over rounds of the time on the clock;
"onnx_processor" and "package_processor" of processor time, which other work on the machine changes less. "p99_to_median" is
that of ONNX. --quick measures the default planner alone.
"""

import runpy
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.latency import times
from benchmarks.measure import Result, main
from benchmarks.sizes import LAYOUTS, params_of, random_observations, random_policy
from pipelines.exporting.data import DataFacts
from pipelines.exporting.folder import write_folder
from tap.data.action_bounds import unit_bounds
from tap.data.windows import Normalizer
from tap.methods.behaviour_cloning import BehaviourCloning
from tap.serving.policy import row_generators

LAYOUT = LAYOUTS["hopper"]
FACTS = {"model": "tap-hopper", "version": "0", "method": "tap", "dataset": "hopper", "plan_every": 1}
PLANNERS: dict[str, dict[str, Any]] = {
    "default": {},
    "beam": {"search": "beam", "actor": False, "beam_width": 16, "expansion_factor": 4},
}


def benchmark(device: torch.device, quick: bool) -> Result:
    """Each policy's milliseconds and ratios; `device` must be the CPU."""
    assert device.type == "cpu"
    torch.set_num_threads(1)
    rounds = 50 if quick else 300
    result = {}
    for name in ["default"] if quick else PLANNERS:
        params = params_of("hopper", "cpu", evaluate={"planner": PLANNERS[name]})
        result[name] = compare(random_policy(params, LAYOUT, device), rounds)
    if not quick:
        params = params_of("hopper", "cpu")
        assert params.train_bc
        rows = np.random.default_rng(0).normal(size=(1000, LAYOUT.transition_dim)).astype(np.float32)
        result["bc"] = compare(BehaviourCloning(params.train_bc, LAYOUT, Normalizer.fit([rows])).eval(), rounds)
    return result


def compare(policy: Any, rounds: int) -> Result:
    """A policy and both formats of its folder, in turn."""
    states = random_observations(256, LAYOUT)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "policy"
        checked = write_folder(
            policy, FACTS, DataFacts(states, "a normal distribution", unit_bounds(LAYOUT.action_dim)), folder
        )
        runner = runpy.run_path(str(folder / "run.py"))["Policy"]()
        package = torch._inductor.aoti_load_package(str(folder / "model.pt2"))
        state, size = states[:1], runner.facts["noise_size"]

        def by_package() -> None:
            noise = [torch.rand(1, size, generator=row_generators(0, 1)[0])] if size else []
            package(torch.from_numpy(state), *noise)

        functions = {
            "policy": lambda: policy.plan(state, row_generators(0, 1)),
            "onnx": lambda: runner.plan(state, 0),
            "package": by_package,
        }
        for warm_up in functions.values():
            warm_up()
        measured = [{name: times(function, torch.device("cpu")) for name, function in functions.items()} for _ in range(rounds)]
    result: Result = {}
    for kind, index in (("", 0), ("_processor", 1)):
        medians = {name: statistics.median(one[name][index] for one in measured) for name in functions}
        result |= {f"{name}{kind}_ms": 1000 * median for name, median in medians.items()}
        result |= {f"{name}{kind}": medians["policy"] / medians[name] for name in ("onnx", "package")}
    onnx = [one["onnx"][0] for one in measured]
    return result | {"p99_to_median": float(np.percentile(onnx, 99) / statistics.median(onnx)), "check": checked.as_json()}


if __name__ == "__main__":
    main(__doc__, benchmark)
