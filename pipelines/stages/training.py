"""What the training stages share: data, device, tracking, checkpoint, curves."""

import csv
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pipelines.command_line import main
from pipelines.stages.params import TrainActorStage, TrainCriticStage, TrainMethodStage, TrainPriorStage, TrainVqvaeStage
from tap.data.episodes import Episodes, Selection
from tap.data.sampling import by_return
from tap.device import choose_device
from tap.distributed import process_group, rank
from tap.files import read_json, sha256, write_atomically, write_json
from tap.model.transformer import compile_blocks
from tap.results import IMITATION, TrainingMetrics, ValidationReport, instance_key, lineage_path, metrics_path, weights_folder
from tap.settings import FitParams, Runtime
from tap.tracking import run as tracking
from tap.training import History, LossFunction, Values, checkpoint_folder, fit

DATA = Path("data")
SPEED = "updates_per_second"  # depends on the machine, so it is not part of the results
# The code that determines weights and curves, as prefixes of module names; dvc.yaml lists the same code as dependencies.
DECISIVE_CODE = (
    "pipelines.stages.train",
    "pipelines.stages.actor_critic",
    "tap.averaging",
    "tap.cuda_graph",
    "tap.data.chunks",
    "tap.data.episodes",
    "tap.data.history",
    "tap.data.observations",
    "tap.data.sampling",
    "tap.data.windows",
    "tap.device",
    "tap.distributed",
    "tap.methods.",
    "tap.model.",
    "tap.planning.",
    "tap.traced",
    "tap.training",
)


@dataclass
class Job:
    """One training run of one stage: its inputs, and `fit`, which trains and writes everything but the weights."""

    stage: str
    key: str
    seed: int
    params: FitParams
    training: Selection
    held_out: Selection
    device: torch.device
    run: tracking.Run | None  # in the first process, which tracks for all
    checkpoint: Path
    digest: str
    minutes: float | None = 0.0  # of all models that it has trained; None if unknown

    def fit(
        self,
        model: nn.Module,
        loss: LossFunction,
        num_held_out: int,
        save: Callable[[Path], None],
        refit: Callable[[], None] = lambda: None,
        measure: Callable[[], dict[str, float]] = dict,
        sample: Callable[[int, torch.Generator], Tensor] | None = None,
    ) -> None:
        """Train `model`, then write the stage's curves, metrics and lineage, and the model by `save(folder)`.

        `refit` completes averaged weights, as in `tap.training.fit`. `measure` returns further metrics of the trained model; it
        is called before `save`, in the first process only. `sample` draws what `loss` gets; by default the first rows of
        windows, by the return of their episodes.
        """
        if self.run and not num_held_out:
            why = "fit.held_out is 0" if self.params.held_out == 0 else "the dataset has one"
            print(f"{self.stage} {self.key}: no episode is held out ({why}), so there is no held-out loss", flush=True)
        sample = sample or by_return(self.training, self.params.effective_share)
        history = self.train(model, loss, self.params, num_held_out, sample, refit)
        if self.run is None:
            return
        curves = [{"step": step} | {key: value for key, value in values.items() if key != SPEED} for step, values in history]
        write_atomically(Path(f"data/plots/{self.stage}/{self.key}.csv"), _csv(curves))
        parameters = sum(p.numel() for p in model.parameters())
        measured = measure()
        self.run.log_metrics(self.params.updates, measured)
        final = curves[-1] | measured | {"parameters": parameters}
        TrainingMetrics.model_validate(final).write(metrics_path(DATA, self.stage, self.key))
        tracking.lineage(self.stage, self.run, self.digest, self.minutes).write(lineage_path(self.stage, self.key))
        save(weights_folder(self.stage, self.key))

    def train(
        self,
        model: nn.Module,
        loss: LossFunction,
        params: FitParams,
        num_held_out: int,
        sample: Callable[[int, torch.Generator], Tensor],
        refit: Callable[[], None] = lambda: None,
        part: str | None = None,
    ) -> History:
        """Train `model`, and add to `minutes`; returns what `tap.training.fit` does.

        `part` names a model that the job trains before its own: its checkpoint, and what is logged of it.
        """
        if self.device.type == "cuda":
            compile_blocks(model)
        prefix = f"{part}_" if part else ""

        def log(update: int, values: Values) -> None:
            if self.run:
                self.run.log_metrics(update, {prefix + name: value for name, value in values.items()})

        history = fit(
            model,
            loss,
            params,
            sample=sample,
            num_held_out=num_held_out,
            seed=self.seed,
            device=self.device,
            checkpoint=self.checkpoint.with_name(f"{part}.pt") if part else self.checkpoint,
            log=log,
            description=f"{self.stage} {self.key} {part or ''}".rstrip(),
            refit=refit,
        )
        speed = history[-1][1][SPEED]  # 0 if all updates were made before a resume
        self.minutes = self.minutes + params.updates / speed / 60 if speed and self.minutes is not None else None
        return history


def launch(run: Callable[..., None]) -> None:
    """The command line of a training stage; on a machine with several GPUs, in one process per GPU, which share the batch."""
    module = sys.modules["__main__"].__spec__
    if torch.cuda.device_count() > 1 and Runtime().device == "auto" and "WORLD_SIZE" not in os.environ and module:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=gpu"]
        os.execv(sys.executable, [sys.executable, *torchrun, "-m", module.name, *sys.argv[1:]])
    main(run)


@contextmanager
def training_job(
    stage: TrainVqvaeStage | TrainPriorStage | TrainCriticStage | TrainActorStage | TrainMethodStage,
    dataset: str,
    seed: int,
    ablation: str | None,
    inputs: dict[str, Any],
) -> Iterator[Job]:
    """Everything a training stage needs, for the length of the context; `inputs` determine the weights besides data and params.

    Raises ValueError if data is invalid, or another process is training the same model.
    """
    runtime, key, name = Runtime(), instance_key(dataset, seed, ablation), stage.stage
    validation = ValidationReport.read(DATA / "raw" / dataset / "validation.json")
    recorded = DATA / "raw" / dataset / "episodes"
    episodes = Episodes.load(recorded)
    training, held_out = episodes.split(stage.params.fit.held_out, np.random.default_rng(seed))
    device = choose_device(runtime.device)
    params = {name: stage.params.model_dump(mode="json")}
    decisive = {
        "data": {file.name: sha256(file) for file in sorted(recorded.glob("*.npy"))},
        "seed": seed,
        "device": device.type,
        "params": stage.params.model_dump(mode="json", exclude={"fit": {"checkpoint_every"}}),
        "code": decisive_code(),
        **inputs,
    }
    with process_group(), checkpoint_folder(runtime.checkpoints, f"{name}-{key}", decisive) as folder:
        earlier = folder / "run.json"
        tracked = tracking.start_run(
            name,
            name=f"{name} {key}",
            params={"scale": stage.scale} | params,
            tags={
                "dataset": dataset,
                "seed": seed,
                "scale": stage.scale,
                "dataset_digest": validation.digest,
                "source": validation.source,
            }
            | ({} if validation.has_rewards else {"rewards": IMITATION})
            | ({"ablation": ablation} if ablation else {})
            | ({"method": name.removeprefix("train_")} if isinstance(stage, TrainMethodStage) else {}),
            runtime=runtime,
            resume=read_json(earlier)["run_id"] if earlier.exists() else None,
        )
        with tracked if rank() == 0 else nullcontext() as run:
            if run:
                write_json(earlier, {"run_id": run.id})
                run.log_json(validation.as_json(), "validation.json")
            checkpoint = folder / "checkpoint.pt"
            yield Job(name, key, seed, stage.params.fit, training, held_out, device, run, checkpoint, validation.digest)


def decisive_code() -> dict[str, str]:
    """SHA-256 of the source of each loaded module that determines weights."""
    # By their specs, which have the real name of the module that runs as __main__.
    specs = {spec.name: spec for module in [*sys.modules.values()] if (spec := getattr(module, "__spec__", None))}
    files = {name: spec.origin for name, spec in specs.items() if name.startswith(DECISIVE_CODE)}
    return {name: sha256(Path(file)) for name, file in sorted(files.items()) if file}


def _csv(rows: list[dict[str, float]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
