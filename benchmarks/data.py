"""Seconds and memory from an HDF5 file of 1,000,000 of Hopper's transitions to windows that can be trained on.

"raw_bytes" are the file's floating-point columns as float32, next observations included; "peak_memory_to_raw" is what the
process took at most, above what it had before, relative to that.
"""

import tempfile
import time
from pathlib import Path

import h5py
import numpy as np
import torch

from benchmarks.measure import Result, main, peak_memory, resident_memory
from benchmarks.sizes import LAYOUTS, params_of
from tap.data.catalog import lookup
from tap.data.hdf5 import load_episodes
from tap.data.windows import Windows, fit_normalizer

EPISODE = 500


def benchmark(device: torch.device, quick: bool) -> Result:
    rows, result = 100_000 if quick else 1_000_000, Result()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "hopper.hdf5"
        result["transitions"], result["raw_bytes"] = rows, write(path, rows)
        params = params_of("hopper-medium-v2", "paper", fetch={"source": "file", "path": str(path)})
        info = lookup("hopper-medium-v2", params.fetch)
        before = resident_memory()
        with peak_memory(torch.device("cpu"), result):
            started = time.perf_counter()
            episodes, _ = load_episodes(path, info, params.fetch)
            result["load_and_validate_seconds"] = time.perf_counter() - started
            training, held_out = episodes.split(params.train_vqvae.fit.held_out, np.random.default_rng(0))
            normalizer = fit_normalizer(training, params.train_vqvae.windows)
            windows = [Windows(part, params.train_vqvae.windows, normalizer, device) for part in (training, held_out)]
            windows[0].gather(torch.arange(512, device=device))
            result["trainable_seconds"] = time.perf_counter() - started
    result["peak_memory_to_raw"] = (result["peak_memory_bytes"] - before) / result["raw_bytes"]
    return result


def write(path: Path, rows: int) -> int:
    """A file in D4RL's layout; returns the bytes of its floating-point columns."""
    rng, layout = np.random.default_rng(0), LAYOUTS["hopper"]
    total = 0
    with h5py.File(path, "w") as file:
        observations = rng.normal(size=(rows + 1, layout.observation_dim)).astype(np.float32)
        columns = {
            "observations": observations[:-1],
            "next_observations": observations[1:],
            "actions": rng.uniform(-1, 1, (rows, layout.action_dim)).astype(np.float32),
            "rewards": rng.normal(1, 1, rows).astype(np.float32),
        }
        for name, values in columns.items():
            file[name] = values
            total += values.nbytes
        ends = np.arange(1, rows + 1) % EPISODE == 0
        file["terminals"], file["timeouts"] = ends, np.zeros(rows, bool)
    return total


if __name__ == "__main__":
    main(__doc__, benchmark)
