"""What the benchmarks count and compare with. Nothing is timed here."""

import copy
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.latency import SIZES, searching
from benchmarks.latency_figure import latency_figure
from benchmarks.naive import make_naive
from benchmarks.planning import flops, generators
from benchmarks.sizes import LAYOUTS, params_of, random_observations, random_policy, random_windows
from tap.model.vqvae import VQVAE


@pytest.mark.parametrize("task", ["hopper", "pen"])
def test_the_work_of_a_decision_is_what_the_planner_computes(task: str) -> None:
    params, layout = params_of(task, "cpu", evaluate={"planner": {"search": "beam"}}), LAYOUTS[task]
    policy = random_policy(params, layout, torch.device("cpu"))
    states, noise = torch.from_numpy(random_observations(1, layout)), policy.planner.noise(generators(1))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        policy.planner.solve(states, noise, best=True)  # a trace hides its operations
    assert flops(params, layout) == pytest.approx(counter.get_total_flops(), rel=0.05)


def test_the_naive_models_loss_and_gradients_are_the_models_own() -> None:
    params, layout = params_of("hopper", "cpu"), LAYOUTS["hopper"]
    torch.manual_seed(0)
    model = VQVAE(params.train_vqvae, layout).train()
    naive = copy.deepcopy(model)
    make_naive(naive)
    batch = random_windows(params, layout, torch.device("cpu")).gather(torch.arange(16))
    for _ in range(2):
        losses = []
        for one in (model, naive):
            torch.manual_seed(1)
            losses.append(one.loss(*batch)["loss"])
            losses[-1].backward()
        torch.testing.assert_close(losses[0], losses[1])
    for one, other in zip(model.parameters(), naive.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(model.codebook.vectors_KD, naive.codebook.vectors_KD, rtol=1e-3, atol=1e-4)


def test_each_size_of_the_latency_benchmark_plans_as_far_ahead_with_both_methods() -> None:
    for task, horizon in SIZES.values():
        params, layout = searching(horizon), LAYOUTS[task]
        assert params.train_tt and params.train_tt.search.horizon == params.evaluate.planner.horizon == horizon
        assert layout.observation_dim + layout.action_dim in (14, 23, 35, 69)


def test_the_latency_figure_shows_each_size_at_its_dimensions_and_horizon() -> None:
    measured = [(14, 3), (69, 15), (14, 15)]
    sizes = [
        {"dimensions": dim, "horizon": horizon, "tap_ms": 10.0 * horizon, "tt_ms": 100.0 * dim, "ratio": dim / horizon}
        for dim, horizon in measured
    ]
    by_dimensions, by_horizon = latency_figure(sizes).axes
    tt, tap = by_dimensions.lines
    assert tt.get_xydata().tolist() == [[14, 1.4], [69, 6.9]]
    assert tap.get_xydata().tolist() == [[14, 0.15], [69, 0.15]]
    assert [text.get_text() for text in by_dimensions.texts] == ["× 0.93", "× 4.6"]
    tt, tap = by_horizon.lines
    assert tt.get_xydata().tolist() == [[3, 1.4], [15, 1.4]]
    assert tap.get_xydata().tolist() == [[3, 0.03], [15, 0.15]]


FAULTS_OF_FIVE_PLANS = """
import resource

import torch

from benchmarks.planning import generators
from benchmarks.sizes import LAYOUTS, params_of, random_observations, random_policy

torch.set_num_threads(1)
policy = random_policy(params_of("hopper", "cpu"), LAYOUTS["hopper"], torch.device("cpu"))
for _ in range(5):
    policy.plan(random_observations(10, LAYOUTS["hopper"]), generators(10))
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    policy.plan(random_observations(10, LAYOUTS["hopper"]), generators(10))
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have no such thresholds")
def test_decisions_do_not_fault_their_memory_in_again() -> None:
    """With glibc's own thresholds ten states' plans cost some 8,000 page faults, each time."""
    root = Path(__file__).parent.parent
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", FAULTS_OF_FIVE_PLANS]
    run = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=True)
    assert int(run.stdout) < 5 * 500
