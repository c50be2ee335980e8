"""Updates per second of one process, and of several that share the same batch: two on a CPU, one per GPU otherwise.

The VQ-VAE of locomotion at the paper's size; on a CPU at the `cpu` scale, with one thread per process.
"""

import os
import statistics
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.measure import Result, main, seconds
from benchmarks.sizes import LAYOUTS, params_of, random_windows
from tap.device import choose_device
from tap.distributed import process_group, rank, world_size
from tap.model.vqvae import VQVAE
from tap.training import make_optimizer, step


def benchmark(device: torch.device, quick: bool) -> Result:
    processes = torch.cuda.device_count() if device.type == "cuda" else 2
    if processes == 1:
        return {"skipped": "one GPU: nothing to share the batch with"}
    updates = 20 if quick else 100
    one, several = (updates_per_second(count, updates) for count in (1, processes))
    return {"processes": processes, "updates_per_second": several, "updates_per_second_of_one": one, "speedup": several / one}


def updates_per_second(processes: int, updates: int) -> float:
    """Measured in `processes` subprocesses."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [sys.executable, *launcher, "-m", "benchmarks.scaling", str(updates)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent.parent)}
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    return float(result.stdout)


def worker(updates: int) -> None:
    """One of the processes; the first prints the median updates per second."""
    device = choose_device("auto")
    params, layout = params_of("hopper", "paper" if device.type == "cuda" else "cpu"), LAYOUTS["hopper"]
    with process_group():
        torch.manual_seed(0)
        windows = random_windows(params, layout, device)
        vqvae = VQVAE(params.train_vqvae, layout).to(device).train()
        fit = params.train_vqvae.fit
        optimizer = make_optimizer(vqvae, fit)
        starts = torch.randint(len(windows), (fit.batch_size_per_process(world_size()),), device=device)

        def update() -> None:
            step(vqvae, lambda starts, _: vqvae.loss(*windows.gather(starts)), optimizer, fit, starts)

        for _ in range(5):
            update()
        times = [seconds(update, device) for _ in range(updates)]
        if rank() == 0:
            print(1 / statistics.median(times))


if __name__ == "__main__":
    if "WORLD_SIZE" in os.environ:
        worker(int(sys.argv[1]))
    else:
        main(__doc__, benchmark)
