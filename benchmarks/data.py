"""Seconds and memory from an HDF5 file of Hopper's transitions to a model's first updates, for several numbers of rows.

"fetch" validates the file and writes its episodes, "prepare" goes from these arrays to the first batch, "train" makes 100
updates, whose cost does not depend on the rows. Each has its wall time, and the processor time, which other work on the machine
does not change. "peak_anonymous_bytes" is the most memory that the process held beyond mapped files. "per_row_to_first" is the
time for each row until the first batch, relative to that with the first number of rows. The data are random; their files, in a
temporary folder below .checkpoints, take 200 bytes a row.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import h5py
import numpy as np
import torch
from torch import Tensor

from benchmarks.measure import Result, machine, peak_anonymous_memory
from benchmarks.sizes import LAYOUTS, params_of
from tap.data.catalog import lookup
from tap.data.chunks import row_chunks
from tap.data.episodes import Episodes
from tap.data.recording import open_recording
from tap.data.sampling import WindowSampler
from tap.data.validation import validate
from tap.data.windows import Windows, fit_normalizer
from tap.device import choose_device
from tap.model.vqvae import VQVAE
from tap.training import fit

EPISODE, UPDATES = 500, 100
LAYOUT = LAYOUTS["hopper"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON, as it always does")
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000, 10_000_000])
    options = parser.parse_args()
    device, result = choose_device("auto"), machine()
    (scratch := Path(".checkpoints")).mkdir(exist_ok=True)
    for rows in options.rows:
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            result[str(rows)] = measure(rows, device, Path(folder))
    for clock in ("wall_seconds", "processor_seconds"):
        per_row = [sum(result[str(rows)][step][clock] for step in ("fetch", "prepare")) / rows for rows in options.rows]
        result[f"{clock}_per_row_to_first"] = [value / per_row[0] for value in per_row]
    print(json.dumps(result, indent=2))


def measure(rows: int, device: torch.device, folder: Path) -> Result:
    """Seconds and memory of each step for a file of `rows` rows; all files are written to `folder`."""
    path, result = folder / "hopper.hdf5", Result()
    write(path, rows)
    overrides = {"source": "file", "path": str(path)}
    params = params_of("hopper-medium-v2", "cpu", fetch=overrides, train_vqvae={"fit": {"updates": UPDATES}})
    stage, info = params.train_vqvae, lookup("hopper-medium-v2", params.fetch)

    with peak_anonymous_memory(result):
        with seconds("fetch", result), open_recording(path, info, params.fetch) as recording:
            validate(recording)
            recording.save(folder / "episodes")
        with seconds("prepare", result):
            training, held_out = Episodes.load(folder / "episodes").split(stage.fit.held_out, np.random.default_rng(0))
            normalizer = fit_normalizer(training, stage.windows)
            windows = [Windows(part, stage.windows, normalizer, device, folder) for part in (training, held_out)]
            windows[0].gather(torch.arange(stage.fit.batch_size, device=device))
        vqvae = VQVAE(stage, LAYOUT).to(device)

        def loss(starts: Tensor, is_held_out: bool) -> dict[str, Tensor]:
            return vqvae.loss(*windows[is_held_out].gather(starts))

        with seconds("train", result):
            fit(
                vqvae,
                loss,
                stage.fit,
                sample=WindowSampler(training.lengths),
                num_held_out=len(windows[1]),
                seed=0,
                device=device,
                checkpoint=folder / "checkpoint.pt",
                log=lambda update, values: None,
                description="train",
            )
    return result


@contextmanager
def seconds(step: str, into: Result) -> Iterator[None]:
    """Puts the time that the context takes into `into`."""
    wall, processor = time.perf_counter(), time.process_time()
    yield
    into[step] = {"wall_seconds": time.perf_counter() - wall, "processor_seconds": time.process_time() - processor}


def write(path: Path, rows: int) -> None:
    """A file in D4RL's layout, of episodes of 500 steps that time out."""
    rng, dims = np.random.default_rng(0), {"observations": LAYOUT.observation_dim, "actions": LAYOUT.action_dim}
    with h5py.File(path, "w") as file:
        for name, dim in dims.items():
            file.create_dataset(name, (rows, dim), np.float32)
        for name, dtype in (("rewards", np.float32), ("terminals", bool), ("timeouts", bool)):
            file.create_dataset(name, (rows,), dtype)
        for part in row_chunks(rows):
            size = part.stop - part.start
            file["observations"][part] = rng.standard_normal((size, LAYOUT.observation_dim), np.float32)
            file["actions"][part] = rng.random((size, LAYOUT.action_dim), np.float32) * 2 - 1
            file["rewards"][part] = rng.standard_normal(size, np.float32) + 1
            file["timeouts"][part] = np.arange(part.start + 1, part.stop + 1) % EPISODE == 0


if __name__ == "__main__":
    main()
