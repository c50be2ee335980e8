"""What the two training stages share: data, device, tracking, checkpoint, curves."""

import csv
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from pipelines.stages.command_line import main
from tap.data.catalog import lookup
from tap.data.episodes import Episodes
from tap.data.hdf5 import load_episodes
from tap.distributed import process_group, rank
from tap.files import read_json, sha256, write_atomically, write_json
from tap.model.transformer import compile_blocks
from tap.results import instance_key
from tap.settings import Params, Runtime, load_params
from tap.tracking import run as tracking
from tap.training import LossFunction, checkpoint_folder, choose_device, fit

SPEED = "updates_per_second"  # of this machine, so no part of the results


@dataclass
class Job:
    """One training run of one stage: its inputs, and `fit`, which trains and writes everything but the weights."""

    stage: str
    key: str
    seed: int
    params: Params
    training: Episodes
    held_out: Episodes
    device: torch.device
    run: tracking.Run | None  # in the first process, which tracks for all
    checkpoint: Path
    digest: str

    def fit(
        self, model: nn.Module, loss: LossFunction, num_windows: int, num_held_out: int, save: Callable[[Path], None]
    ) -> None:
        """Train `model`, then write the stage's curves, metrics and run.json, and the model by `save(folder)`."""
        params = getattr(self.params, self.stage).fit
        if self.device.type == "cuda":
            compile_blocks(model)
        history = fit(
            model,
            loss,
            params,
            num_windows=num_windows,
            num_held_out=num_held_out,
            seed=self.seed,
            device=self.device,
            checkpoint=self.checkpoint,
            log=self.run.log_metrics if self.run else lambda update, values: None,
            description=f"{self.stage} {self.key}",
        )
        if self.run is None:
            return
        curves = [{"step": step} | {key: value for key, value in values.items() if key != SPEED} for step, values in history]
        write_atomically(Path(f"data/plots/{self.stage}/{self.key}.csv"), _csv(curves))
        parameters = sum(p.numel() for p in model.parameters())
        write_json(Path(f"data/metrics/{self.stage}/{self.key}.json"), curves[-1] | {"parameters": parameters})
        folder = output_folder(self.stage, self.key)
        save(folder)
        write_json(folder / "run.json", tracking.lineage(self.stage, self.run, self.digest))


def launch(run: Callable[..., None]) -> None:
    """The command line of a training stage; on a machine with several GPUs, in one process for each, which share the batch."""
    module = sys.modules["__main__"].__spec__
    if torch.cuda.device_count() > 1 and Runtime().device == "auto" and "WORLD_SIZE" not in os.environ and module:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=gpu"]
        os.execv(sys.executable, [sys.executable, *torchrun, "-m", module.name, *sys.argv[1:]])
    main(run)


def output_folder(stage: str, key: str) -> Path:
    """Where a training stage writes its weights: data/vqvae/KEY and data/prior/KEY."""
    return Path("data") / stage.removeprefix("train_") / key


@contextmanager
def training_job(stage: str, dataset: str, seed: int, ablation: str | None) -> Iterator[Job]:
    """Everything a training stage needs, for the length of the context. Raises ValueError on faulty params or data."""
    params, runtime = load_params(Path("params.yaml"), dataset, ablation=ablation), Runtime()
    key = instance_key(dataset, seed, ablation)
    info = lookup(dataset, params.fetch)
    file = Path("data/raw") / dataset / "dataset.hdf5"
    episodes, validation = load_episodes(file, info, params.fetch)
    digest = validation["digest"]
    fraction = getattr(params, stage).fit.held_out
    training, held_out = episodes.split(fraction, np.random.default_rng(seed))
    device = choose_device(runtime.device)
    inputs = {
        "data": digest,
        "seed": seed,
        "device": device.type,
        "params": params.model_dump(mode="json", exclude={"evaluate"}),
    }
    if stage == "train_vqvae":
        del inputs["params"]["train_prior"]
    else:
        inputs["vqvae"] = sha256(output_folder("train_vqvae", key) / "vqvae.safetensors")
    with process_group(), checkpoint_folder(runtime.checkpoints, f"{stage}-{key}", inputs) as folder:
        earlier = folder / "run.json"
        tracked = tracking.start_run(
            stage,
            name=f"{stage} {key}",
            params=inputs["params"],
            tags={
                "dataset": dataset,
                "seed": seed,
                "scale": params.scale,
                "dataset_digest": digest,
                "source": validation["source"],
            }
            | ({"ablation": ablation} if ablation else {}),
            runtime=runtime,
            resume=read_json(earlier)["run_id"] if earlier.exists() else None,
        )
        with tracked if rank() == 0 else nullcontext() as run:
            if run:
                write_json(earlier, {"run_id": run.id})
                run.log_json(validation, "validation.json")
            yield Job(stage, key, seed, params, training, held_out, device, run, folder / "checkpoint.pt", digest)


def _csv(rows: list[dict[str, float]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
