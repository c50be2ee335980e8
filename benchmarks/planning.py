"""Decision latency: by suite, against the reference planner; by dimensions, horizon and number of states planned for at once.

At the paper's sizes. "speedup" and "share_of_peak" are medians over rounds in which both planners and a large matrix product
of the same type run in turn. The operations counted are those that one decision needs: the new steps of each plan decoded once,
each kept plan continued once. "profile" is the share of a decision's time that each operation takes.
"""

import statistics
from typing import Any

import torch

from benchmarks.measure import Result, in_turn, main, matrix_product, profile, ratio
from benchmarks.sizes import LAYOUTS, params_of, random_observations, random_policy
from tap.data.windows import Layout
from tap.planning import reference
from tap.planning.policy import Policy
from tap.settings import Params

SUITES = {"locomotion": "hopper", "adroit": "pen", "antmaze": "antmaze"}  # one task of each


def benchmark(device: torch.device, quick: bool) -> Result:
    repetitions = (10 if quick else 50) if device.type == "cuda" else (1 if quick else 3)
    result: Result = {suite: against_reference(task, device, repetitions) for suite, task in SUITES.items()}

    tasks = ["hopper", "halfcheetah", "ant", "pen"]
    params = params_of("hopper", "paper")
    policies = {task: random_policy(params, LAYOUTS[task], device) for task in tasks}
    result["latency_ms_by_task"], rounds = latencies(policies, 1, device, repetitions)
    result["pen_to_hopper"] = ratio(rounds["pen"], rounds["hopper"])

    horizons = (3, 15, 33) if quick else (3, 9, 15, 21, 27, 33)
    policies = {str(horizon): random_policy(long_window(horizon), LAYOUTS["hopper"], device) for horizon in horizons}
    result["latency_ms_by_horizon"], _ = latencies(policies, 1, device, repetitions)

    policy = random_policy(params, LAYOUTS["hopper"], device)
    counts = (1, 10) if quick and device.type == "cpu" else (1, 10, 100)
    result["latency_ms_by_states"] = {}
    for count in counts:
        medians, _ = latencies({str(count): policy}, count, device, 1 if count > 10 and device.type == "cpu" else repetitions)
        result["latency_ms_by_states"] |= medians
    return result


def against_reference(task: str, device: torch.device, repetitions: int) -> Result:
    """One suite's decision for one state, compared with the reference planner and with the device's peak speed."""
    params, layout = params_of(task, "paper"), LAYOUTS[task]
    policy = random_policy(params, layout, device)
    observations = random_observations(1, layout)
    states = torch.from_numpy(observations).to(device)
    product, product_flops = matrix_product(device, torch.float32)
    functions: dict[str, Any] = {
        "fast": lambda: policy.plan(observations, generators(1)),
        "reference": lambda: reference.plan(policy.planner, states, generators(1)),
        "product": product,
    }
    if device.type == "cpu":
        in_int8 = policy.params.model_copy(update={"precision": "int8"})
        rounded = Policy(policy.vqvae, policy.normalizer, policy.prior, in_int8, device)
        functions["int8"] = lambda: rounded.plan(observations, generators(1))
    seconds = in_turn(functions, device, repetitions)
    needed = flops(params, layout)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "dimensions": layout.observation_dim + layout.action_dim,
        "latency_ms": 1000 * median["fast"],
        "reference_ms": 1000 * median["reference"],
        "speedup": ratio(seconds["reference"], seconds["fast"]),
        **({"speedup_in_int8": ratio(seconds["reference"], seconds["int8"])} if "int8" in seconds else {}),
        "gflop": needed / 1e9,
        "peak_gflop_per_second": product_flops / median["product"] / 1e9,
        "share_of_peak": needed / product_flops * ratio(seconds["product"], seconds["fast"]),
        "profile": profile(lambda: policy.plan(observations, generators(1)), device),
    }


def latencies(
    policies: dict[str, Policy], states: int, device: torch.device, repetitions: int
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Median milliseconds to plan for `states` states at once, for each policy; and the seconds of all rounds."""
    functions: dict[str, Any] = {}
    for name, policy in policies.items():
        observations = random_observations(states, policy.vqvae.layout)
        functions[name] = lambda policy=policy, observations=observations: policy.plan(observations, generators(states))
    rounds = in_turn(functions, device, repetitions)
    return {name: 1000 * statistics.median(values) for name, values in rounds.items()}, rounds


def long_window(horizon: int) -> Params:
    return params_of("hopper", "paper", train_vqvae={"windows": {"length": 33}}, evaluate={"planner": {"horizon": horizon}})


def generators(states: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in range(states)]


def flops(params: Params, layout: Layout) -> float:
    """Floating-point operations, multiplications and additions, of one state's beam search."""
    vqvae, prior, planner = params.train_vqvae, params.train_prior.transformer, params.evaluate.planner
    decoder, codebook, latent_step = vqvae.transformer, vqvae.codebook, vqvae.latent_step
    candidates = planner.beam_width * planner.expansion_factor
    total = 0.0
    for depth in range(1, planner.horizon // latent_step + 1):
        kept = 1 if depth == 1 else planner.beam_width
        blocks = prior.layers * (24 * prior.width**2 + 4 * prior.width * depth)
        total += kept * (blocks + 2 * prior.width * (layout.observation_dim + prior.width + codebook.size))
        context = depth * latent_step - (latent_step - 1) / 2  # of the new steps, on average
        blocks = decoder.layers * (24 * decoder.width**2 + 4 * decoder.width * context)
        total += candidates * latent_step * (blocks + 2 * decoder.width * layout.token_dim)
        total += candidates * 2 * (layout.observation_dim + codebook.dim) * decoder.width
    return total


if __name__ == "__main__":
    main(__doc__, benchmark)
