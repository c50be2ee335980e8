"""Measuring and printing, shared by all benchmarks."""

import argparse
import ctypes
import gc
import importlib.metadata
import json
import platform
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from tap.device import choose_device

Result = dict[str, Any]


def main(description: str | None, benchmark: Callable[[torch.device, bool], Result]) -> None:
    """The command line of a benchmark: prints what `benchmark(device, quick)` returns, with hardware and versions."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repetitions")
    options = parser.parse_args()
    device = choose_device("auto")
    started = time.perf_counter()
    result = machine() | benchmark(device, options.quick)
    result["wall_seconds"] = time.perf_counter() - started
    print(json.dumps(result, indent=2) if options.json else "\n".join(_table(result)))


def machine() -> Result:
    """Hardware and versions."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    versions = {"python": platform.python_version()}
    for package in ("torch", "numpy", "gymnasium", "mujoco"):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    cpu = platform.processor() or platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        cpu = f"{len(names)} x {names[0]}" if names else cpu
    return {"hardware": {"cpu": cpu, "threads": torch.get_num_threads(), "gpus": gpus}, "versions": versions}


def seconds(function: Callable[[], Any], device: torch.device) -> float:
    """Wall time of one call, including its work on the device."""
    _synchronize(device)
    start = time.perf_counter()
    function()
    _synchronize(device)
    return time.perf_counter() - start


def in_turn(functions: dict[str, Callable[[], Any]], device: torch.device, repetitions: int) -> dict[str, list[float]]:
    """Seconds of each function in each of `repetitions` rounds, which call all functions in turn; after one call to warm up."""
    for function in functions.values():
        function()
    rounds = [{name: seconds(function, device) for name, function in functions.items()} for _ in range(repetitions)]
    return {name: [one[name] for one in rounds] for name in functions}


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """The median of the rounds' ratios."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def matrix_product(device: torch.device, dtype: torch.dtype) -> tuple[Callable[[], Any], float]:
    """A large matrix product, which runs at the device's peak speed, and its number of floating-point operations."""
    size = 2048 if device.type == "cpu" else 8192
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return lambda: a @ b, 2.0 * size**3


def profile(function: Callable[[], Any], device: torch.device) -> Result:
    """The share of one call's time on the device that each operation (on a GPU, each kernel) takes: the ten costliest.

    "busy" is the share of the call's wall time that all operations take together; the rest is idle.
    """
    on_gpu = device.type == "cuda"
    with torch.profiler.profile() as profiler:
        wall = seconds(function, device)
    spent: dict[str, float] = {}
    for event in profiler.key_averages():
        if not on_gpu or event.device_type == torch.autograd.DeviceType.CUDA:
            name = " ".join(event.key.split())[:80]
            spent[name] = spent.get(name, 0) + (event.self_device_time_total if on_gpu else event.self_cpu_time_total)
    total = sum(spent.values())
    costly = sorted(spent, key=lambda name: -spent[name])[:10]
    return {"busy": total / 1e6 / wall} | {name: spent[name] / total for name in costly}


@contextmanager
def peak_memory(device: torch.device, into: Result) -> Iterator[None]:
    """Write the peak memory within the context to `into`: the GPU's, or the whole process's without a GPU."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        yield
        into["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
    else:
        ctypes.CDLL(None).malloc_trim(0)  # return freed memory to the system
        Path("/proc/self/clear_refs").write_text("5")  # reset VmHWM, the high-water mark
        yield
        into["peak_memory_bytes"] = _status("VmHWM")


@contextmanager
def peak_anonymous_memory(into: Result) -> Iterator[None]:
    """Puts the most memory that the process held within the context, beyond mapped files, into `into`: sampled at 100 Hz."""
    peak, done = 0, threading.Event()

    def sample() -> None:
        nonlocal peak
        while not done.wait(0.01):
            peak = max(peak, _status("RssAnon") + _status("RssShmem"))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    into["peak_anonymous_bytes"] = peak


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _table(result: Result, prefix: str = "") -> list[str]:
    lines = []
    for key, value in result.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            lines += _table(value, f"{name}.")
        else:
            lines.append(f"{name:60} {f'{value:.4g}' if isinstance(value, float) else value}")
    return lines
