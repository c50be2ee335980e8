"""Updates per second and memory of training: by model and suite, against the naive version; by batch, width and window length.

Whole updates are measured, as in the stages: batch, loss, gradients, clipping, optimiser. All at the paper's sizes, but with
smaller batches on a CPU. "share_of_peak" compares the update's matrix products (forward and backward) with a large matrix
product of the same type, "speedup" with the naive version; each a median over rounds in which all of them run in turn. On a
GPU, the models by suite are compiled and their updates recorded as CUDA graphs, as in the stages; the others and the naive ones
are not. Memory is the GPU's, or the whole process's. "profile" is the share of an update's time that each operation takes.
"""

import copy
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.measure import Result, in_turn, main, matrix_product, peak_memory, profile, ratio
from benchmarks.naive import make_naive
from benchmarks.sizes import LAYOUTS, params_of, random_windows
from tap.cuda_graph import Graphed
from tap.data.windows import Layout
from tap.model.prior import Prior
from tap.model.transformer import compile_blocks
from tap.model.vqvae import VQVAE
from tap.settings import Params
from tap.training import make_optimizer, step

SUITES = {"locomotion": "hopper", "adroit": "pen"}
Update = Callable[[], Any]


def benchmark(device: torch.device, quick: bool) -> Result:
    on_gpu = device.type == "cuda"
    repetitions = 20 if on_gpu else (1 if quick else 3)
    batches = {"vqvae": 512, "prior": 512} if on_gpu else {"vqvae": 8, "prior": 32} if quick else {"vqvae": 32, "prior": 128}
    result: Result = {"batch_size": batches}
    for suite, task in SUITES.items():
        params = params_of(task, "paper")
        for name, batch in batches.items():
            model, update, gflop = setup(name, params, LAYOUTS[task], batch, device)
            if on_gpu:
                compile_blocks(model)
                update = Graphed(update, warm_up=3)
            with peak_memory(device, memory := Result()):
                update()
            naive, naive_update, _ = setup(name, params, LAYOUTS[task], batch, device)
            make_naive(naive)
            result.setdefault(suite, {})[name] = measure(update, gflop, device, repetitions, naive_update) | memory
            result[suite][name]["profile"] = profile(update, device)

    def growth(batch: int, **overrides: Any) -> Result:
        params = params_of("hopper", "paper", train_vqvae=overrides, evaluate={"planner": {"horizon": 3}})
        _, update, gflop = setup("vqvae", params, LAYOUTS["hopper"], batch, device)
        with peak_memory(device, memory := Result()):
            update()
        return measure(update, gflop, device, repetitions) | memory

    batch = batches["vqvae"]
    transformer = params_of("hopper", "paper").train_vqvae.transformer.model_dump()
    result["vqvae_by_batch"] = {str(size): growth(size) for size in (batch // 4, batch // 2, batch)}
    result["vqvae_by_width"] = {
        str(width): growth(batch, transformer=transformer | {"width": width}) for width in (128, 256, 512)
    }
    result["vqvae_by_window"] = {str(length): growth(batch, windows={"length": length}) for length in (12, 24, 48)}
    return result


def measure(update: Update, gflop: float, device: torch.device, repetitions: int, naive: Update | None = None) -> Result:
    """The speed of one model's updates."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    product, product_flops = matrix_product(device, dtype)
    functions = {"update": update, "product": product} | ({"naive": naive} if naive else {})
    seconds = in_turn(functions, device, repetitions)
    result = {
        "updates_per_second": 1 / statistics.median(seconds["update"]),
        "gflop_per_update": gflop,
        "peak_gflop_per_second": product_flops / statistics.median(seconds["product"]) / 1e9,
        "share_of_peak": 1e9 * gflop / product_flops * ratio(seconds["product"], seconds["update"]),
    }
    if naive:
        result["speedup"] = ratio(seconds["naive"], seconds["update"])
    return result


def setup(name: str, params: Params, layout: Layout, batch: int, device: torch.device) -> tuple[nn.Module, Update, float]:
    """A model in training mode, a function that makes one update, and the GFLOP of the update's matrix products."""
    torch.manual_seed(0)
    windows = random_windows(params, layout, device)
    vqvae, prior = VQVAE(params.train_vqvae, layout), Prior(params.train_prior, params.train_vqvae, layout.observation_dim)
    model = (vqvae if name == "vqvae" else prior).to(device).train()
    fit = params.train_vqvae.fit if name == "vqvae" else params.train_prior.fit
    shape = len(windows), params.train_vqvae.windows.length // params.train_vqvae.latent_step
    codes = torch.randint(params.train_vqvae.codebook.size, shape, device=device)

    def vqvae_loss(starts: Tensor, held_out: bool) -> dict[str, Tensor]:
        return vqvae.loss(*windows.gather(starts))

    def prior_loss(starts: Tensor, held_out: bool) -> dict[str, Tensor]:
        return prior.loss(codes[starts], windows.transitions_NX[starts, layout.observation])

    loss = vqvae_loss if name == "vqvae" else prior_loss
    optimizer = make_optimizer(model, fit)
    starts = torch.randint(len(windows), (batch,), device=device)
    few, counter = starts[:4], FlopCounterMode(display=False)
    state = copy.deepcopy(model.state_dict())
    with counter, sdpa_kernel(SDPBackend.MATH):  # the only attention whose products are counted
        loss(few, False)["loss"].backward()
    model.load_state_dict(state)
    gflop = counter.get_total_flops() / 1e9 * batch / len(few)
    return model, lambda: step(model, loss, optimizer, fit, starts), gflop


if __name__ == "__main__":
    main(__doc__, benchmark)
