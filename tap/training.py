"""The one training loop: updates, held-out loss, atomic checkpoints, resume.

Knows no model and no data: it draws window indices, and a loss function turns them into numbers.
"""

import fcntl
import hashlib
import io
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from tap.cuda_graph import Graphed
from tap.distributed import all_reduce_sum, rank, world_size
from tap.files import write_atomically
from tap.settings import FitParams

HELD_OUT_WINDOWS = 1024  # spread evenly over the held-out episodes

# Window indices (B,) and whether they are held-out ones -> this process's share of the loss over the global batch, under
# "loss", and anything else to log: scalars, which are averaged over updates, and "code_counts" (K,), the uses of each code.
LossFunction = Callable[[Tensor, bool], dict[str, Tensor]]
# Means since the last such call, at an update.
Values = dict[str, float]
History = list[tuple[int, Values]]


@contextmanager
def checkpoint_folder(root: Path, name: str, inputs: dict[str, Any]) -> Iterator[Path]:
    """A folder for this very training run, locked against a second one.

    Its name ends in a hash of `inputs`, JSON-able and all that decides the weights, so that a run with other params, data or
    code never resumes from it. Raises ValueError while another run trains the same; the processes of one run share the folder.
    """
    key = hashlib.sha256(json.dumps([inputs, torch.__version__], sort_keys=True).encode()).hexdigest()[:16]
    folder = root / f"{name}-{key}"
    folder.mkdir(parents=True, exist_ok=True)
    if rank() > 0:
        yield folder
        return
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{folder} is in use: another run trains the same model; wait for it or stop it") from None
        yield folder


def make_optimizer(model: nn.Module, params: FitParams) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": params.weight_decay},
        {"params": others, "weight_decay": 0},
    ]
    capturable = matrices[0].is_cuda  # by a CUDA graph
    return torch.optim.AdamW(groups, lr=params.learning_rate, betas=params.betas, fused=True, capturable=capturable)


def fit(
    model: nn.Module,
    loss: LossFunction,
    params: FitParams,
    *,
    num_windows: int,
    num_held_out: int,
    seed: int,
    device: torch.device,
    checkpoint: Path,
    log: Callable[[int, Values], None],
    description: str,
) -> History:
    """Train `model` in place for `params.updates` updates, from `checkpoint` where that file exists.

    A resumed run ends with the same weights as an uninterrupted one: the checkpoint holds model, optimiser, update and all
    random state. Every `params.log_every` updates, the means since the last time and the held-out loss go to `log`; returns all
    of them, those from before a resume included. Torch's default generator is seeded here: dropout can draw from no other.
    Raises ValueError on a loss that is not finite, and where the batch cannot be shared among the processes.
    """
    local_batch = params.batch_size_per_process(world_size())
    optimizer = make_optimizer(model, params)
    batches = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed + rank())
    update, history, sums = _load(checkpoint, model, optimizer, batches) if checkpoint.exists() else (0, [], {})
    make_update: Callable[[Tensor], dict[str, Tensor]] = partial(step, model, loss, optimizer, params)
    if device.type == "cuda" and world_size() == 1:
        make_update = Graphed(make_update, warm_up=3)
    model.train()
    started, first = time.monotonic(), update
    with tqdm(total=params.updates, initial=update, desc=description, unit="update", disable=rank() > 0, mininterval=1) as bar:
        while update < params.updates:
            starts = torch.randint(num_windows, (params.batch_size,), generator=batches)
            local = _to(device, starts[rank() * local_batch : (rank() + 1) * local_batch])
            losses = make_update(local)
            update += 1
            for name, value in losses.items():
                sums[name] = sums[name] + value.detach() if name in sums else value.detach().clone()
            bar.update()

            if update % params.log_every == 0 or update == params.updates:
                values = _summarize(sums, (update - 1) % params.log_every + 1)
                values["updates_per_second"] = (update - first) / (time.monotonic() - started)
                sums = {}
                if num_held_out:
                    values["held_out_loss"] = _held_out_loss(model, loss, num_held_out, local_batch, device)
                if not math.isfinite(values["loss"]):
                    raise ValueError(
                        f"the loss is {values['loss']} at update {update}: lower fit.learning_rate, or look for outliers"
                    )
                history.append((update, values))
                log(update, values)
                shown = ("loss", "held_out_loss", "codebook_usage")
                bar.set_postfix({name: f"{values[name]:.3f}" for name in shown if name in values})
            if update % params.checkpoint_every == 0 or update == params.updates:
                _save(checkpoint, model, optimizer, batches, update, history, sums)
    model.eval()
    return history


def step(
    model: nn.Module, loss: LossFunction, optimizer: torch.optim.Optimizer, params: FitParams, starts: Tensor
) -> dict[str, Tensor]:
    """One update with the windows `starts` (B,), this process's share of the batch; returns the losses.

    Never waits for a GPU.
    """
    with torch.autocast(starts.device.type, torch.bfloat16, enabled=starts.is_cuda):
        losses = loss(starts, False)
    optimizer.zero_grad()
    losses["loss"].backward()  # type: ignore[no-untyped-call]
    _sum_gradients(model)
    nn.utils.clip_grad_norm_(model.parameters(), params.clip_norm)
    optimizer.step()
    return losses


def _to(device: torch.device, tensor: Tensor) -> Tensor:
    """A copy to a GPU that runs beside the work already given to it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _sum_gradients(model: nn.Module) -> None:
    """Every loss is a share of the global one, so gradients add up: all in one message."""
    if world_size() > 1:
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        total = all_reduce_sum(torch.cat([gradient.flatten() for gradient in gradients]))
        for gradient, part in zip(gradients, total.split([g.numel() for g in gradients]), strict=True):  # type: ignore[no-untyped-call]
            gradient.copy_(part.view_as(gradient))


def _summarize(sums: dict[str, Tensor], updates: int) -> Values:
    """Means over `updates` and over processes; counts of code uses become usage (share of codes) and perplexity."""
    values: Values = {}
    for name, total in sums.items():
        total = all_reduce_sum(total)
        if name == "code_counts":
            shares = total / total.sum()
            values["codebook_usage"] = float((total > 0).double().mean())
            values["codebook_perplexity"] = float(torch.exp(-(shares * shares.clamp(min=1e-12).log()).sum()))
        else:
            values[name] = float(total) / updates
    return values


@torch.no_grad()
def _held_out_loss(model: nn.Module, loss: LossFunction, num_held_out: int, local_batch: int, device: torch.device) -> float:
    """The mean loss over at most HELD_OUT_WINDOWS held-out windows; every process does its share of each batch."""
    model.eval()
    starts = torch.linspace(0, num_held_out - 1, min(HELD_OUT_WINDOWS, num_held_out)).long()
    total = torch.zeros((), device=device)
    for batch in starts.split(local_batch * world_size()):  # type: ignore[no-untyped-call]
        shares = batch.tensor_split(world_size())
        total += loss(shares[rank()].to(device), True)["loss"].detach() * len(batch)
    model.train()
    return float(all_reduce_sum(total)) / len(starts)


def _save(
    checkpoint: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: torch.Generator,
    update: int,
    history: History,
    sums: dict[str, Tensor],
) -> None:
    """Write the checkpoint atomically, from rank 0. Dropout on other ranks is reseeded by the update on resume."""
    if rank() > 0:
        return
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "batches": batches.get_state(),
        "default": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "update": update,
        "history": history,
        "sums": sums,
    }
    buffer = io.BytesIO()
    torch.save(state, buffer)
    write_atomically(checkpoint, buffer.getvalue())


def _load(
    checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer, batches: torch.Generator
) -> tuple[int, History, dict[str, Tensor]]:
    try:
        state = torch.load(checkpoint, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"{checkpoint} cannot be read ({error}): delete it to train from the start") from error
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    batches.set_state(state["batches"])
    torch.set_rng_state(state["default"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    if rank() > 0:
        torch.manual_seed(batches.initial_seed() + rank() + state["update"])
    device = next(model.parameters()).device
    return state["update"], state["history"], {name: value.to(device) for name, value in state["sums"].items()}
