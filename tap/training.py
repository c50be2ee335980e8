"""The training loop: updates, held-out loss, atomic checkpoints, resume.

It is independent of model and data: it samples window indices, for which a function computes the losses.
"""

import fcntl
import hashlib
import io
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from tap.averaging import AveragedWeights
from tap.cuda_graph import Graphed
from tap.distributed import all_reduce_sum, rank, world_size
from tap.files import write_atomically
from tap.settings import FitParams

HELD_OUT_WINDOWS = 1024  # spread evenly over the held-out episodes

# Maps window indices (B,), and whether they are held out, to this process's share of the loss over the global batch, "loss",
# and anything else to log: scalars, which are averaged over updates, and "code_counts" (K,), how often each code is used.
LossFunction = Callable[[Tensor, bool], dict[str, Tensor]]
# Logged values by name: means over the updates since the last log.
Values = dict[str, float]
History = list[tuple[int, Values]]  # by update


@contextmanager
def checkpoint_folder(root: Path, name: str, inputs: dict[str, Any]) -> Iterator[Path]:
    """The folder of one training run, locked against a second process.

    Its name ends in a hash of `inputs`, JSON-able and all that determines the weights, so that a run with other params, data
    or code never resumes from it. Raises ValueError while another run trains the same model; all processes of a run share it.
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
            raise ValueError(f"{folder} is in use: another run is training the same model; wait for it or stop it") from None
        yield folder


def make_optimizer(model: nn.Module, params: FitParams) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019) with weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": params.weight_decay},
        {"params": others, "weight_decay": 0},
    ]
    capturable = matrices[0].is_cuda  # in a CUDA graph
    rate: float | Tensor = params.learning_rate
    if capturable and (params.schedule != "constant" or params.warmup_updates):
        rate = torch.tensor(rate, device=matrices[0].device)  # a graph reads a tensor at every replay, but records a number
    return torch.optim.AdamW(groups, lr=rate, betas=params.betas, fused=True, capturable=capturable)


def learning_rate(update: int, params: FitParams) -> float:
    """The learning rate of update number `update`, counted from 0.

    It rises linearly over `params.warmup_updates`, then is constant or falls along half a cosine to 0 at `params.updates`
    (Loshchilov and Hutter 2017, equation 5, without restarts).
    """
    if update < params.warmup_updates:
        return params.learning_rate * (update + 1) / params.warmup_updates
    if params.schedule == "constant":
        return params.learning_rate
    progress = (update - params.warmup_updates) / (params.updates - params.warmup_updates)
    return params.learning_rate * (1 + math.cos(math.pi * progress)) / 2


def fit(
    model: nn.Module,
    loss: LossFunction,
    params: FitParams,
    *,
    sample: Callable[[int, torch.Generator], Tensor],
    num_held_out: int,
    seed: int,
    device: torch.device,
    checkpoint: Path,
    log: Callable[[int, Values], None],
    description: str,
    refit: Callable[[], None] = lambda: None,
) -> History:
    """Train `model` in place for `params.updates` updates, resuming from `checkpoint` if that file exists.

    A resumed run ends with the same weights as an uninterrupted one: the checkpoint holds model, averaged weights, optimiser,
    update number and all random state. Every `params.log_every` updates, the means since the last log and the held-out loss are
    passed to `log`; returns all of them, including those from before a resume. Where `params.ema_decay` is not 0, held-out
    losses are those of the averaged weights, and `model` ends with these; `refit` is then called once, with the averaged
    weights in the model and before the last held-out loss, to change state that does not follow from averaging.
    Seeds torch's default generator, the only one that dropout uses.
    Raises ValueError if a loss is not finite, and if the batch cannot be divided among the processes.
    """
    local_batch = params.batch_size_per_process(world_size())
    optimizer = make_optimizer(model, params)
    batches = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed + rank())
    average = AveragedWeights(model, params.ema_decay) if params.ema_decay else None
    update, history, sums = _load(checkpoint, model, average, optimizer, batches) if checkpoint.exists() else (0, [], {})
    make_update: Callable[[Tensor], dict[str, Tensor]] = partial(step, model, loss, optimizer, params)
    if device.type == "cuda" and world_size() == 1:
        make_update = Graphed(make_update, warm_up=3)
    model.train()
    started, first = time.monotonic(), update
    with tqdm(total=params.updates, initial=update, desc=description, unit="update", disable=rank() > 0, mininterval=1) as bar:
        while update < params.updates:
            _set_learning_rate(optimizer, learning_rate(update, params))
            losses = make_update(_sample_batch(sample, params.batch_size, local_batch, batches, device))
            update += 1
            if average:
                average.update(update)
            _accumulate(sums, losses)
            bar.update()

            if update % params.log_every == 0 or update == params.updates:
                values = _summarize(sums, (update - 1) % params.log_every + 1)
                values["updates_per_second"] = (update - first) / (time.monotonic() - started)
                with average.in_model() if average else nullcontext():
                    if average and update == params.updates:
                        model.eval()
                        refit()
                    if num_held_out:
                        values["held_out_loss"] = _held_out_loss(model, loss, num_held_out, local_batch, device)
                _check_finite(values["loss"], update)
                sums = {}
                history.append((update, values))
                log(update, values)
                shown = ("loss", "held_out_loss", "codebook_usage")
                bar.set_postfix({name: f"{values[name]:.3f}" for name in shown if name in values})
            if update % params.checkpoint_every == 0 or update == params.updates:
                _save(checkpoint, model, average, optimizer, batches, update, history, sums)
    if average:
        average.apply()
    model.eval()
    return history


def step(
    model: nn.Module, loss: LossFunction, optimizer: torch.optim.Optimizer, params: FitParams, starts: Tensor
) -> dict[str, Tensor]:
    """One update on the windows `starts` (B,), this process's share of the batch; returns the losses.

    It never waits for the GPU, and can be recorded as a CUDA graph.
    """
    with torch.autocast(starts.device.type, torch.bfloat16, enabled=starts.is_cuda):
        losses = loss(starts, False)
    optimizer.zero_grad()
    losses["loss"].backward()  # type: ignore[no-untyped-call]
    _sum_gradients(model)
    nn.utils.clip_grad_norm_(model.parameters(), params.clip_norm)
    optimizer.step()
    return losses


def _sample_batch(
    sample: Callable[[int, torch.Generator], Tensor],
    batch_size: int,
    local_batch: int,
    generator: torch.Generator,
    device: torch.device,
) -> Tensor:
    """This process's share (local_batch,) of a sample of window indices; all processes sample the same whole batch."""
    starts = sample(batch_size, generator)
    local = starts[rank() * local_batch : (rank() + 1) * local_batch]
    # From pinned memory, the copy runs in parallel with work already queued on the GPU.
    return local.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else local.to(device)


def _set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def _accumulate(sums: dict[str, Tensor], losses: dict[str, Tensor]) -> None:
    for name, value in losses.items():
        sums[name] = sums[name] + value.detach() if name in sums else value.detach().clone()


def _check_finite(loss: float, update: int) -> None:
    if not math.isfinite(loss):
        raise ValueError(f"the loss is {loss} at update {update}: lower fit.learning_rate, or check the data for outliers")


def _sum_gradients(model: nn.Module) -> None:
    """Sum gradients over processes, in one message: each process's loss is a share of the global one."""
    if world_size() > 1:
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        total = all_reduce_sum(torch.cat([gradient.flatten() for gradient in gradients]))
        for gradient, part in zip(gradients, total.split([g.numel() for g in gradients]), strict=True):  # type: ignore[no-untyped-call]
            gradient.copy_(part.view_as(gradient))


def _summarize(sums: dict[str, Tensor], updates: int) -> Values:
    """Means over `updates` of sums over processes; code counts become usage (share of codes used) and perplexity."""
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
    """The mean loss over at most HELD_OUT_WINDOWS held-out windows; each batch is divided among the processes."""
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
    average: AveragedWeights | None,
    optimizer: torch.optim.Optimizer,
    batches: torch.Generator,
    update: int,
    history: History,
    sums: dict[str, Tensor],
) -> None:
    """Write the checkpoint atomically, from rank 0 only; on resume, `_load` reseeds dropout on the other ranks."""
    if rank() > 0:
        return
    state = {
        "model": model.state_dict(),
        "average": average.tensors if average else [],
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
    checkpoint: Path,
    model: nn.Module,
    average: AveragedWeights | None,
    optimizer: torch.optim.Optimizer,
    batches: torch.Generator,
) -> tuple[int, History, dict[str, Tensor]]:
    """Restore what `_save` wrote, and return update, history and sums. Raises ValueError if the file is damaged."""
    try:
        state = torch.load(checkpoint, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"{checkpoint} cannot be read ({error}): delete it to train from the start") from error
    model.load_state_dict(state["model"])
    if average:
        average.restore(state["average"])
    rate = optimizer.param_groups[0]["lr"]  # on the model's device, where the checkpoint's is not
    optimizer.load_state_dict(state["optimizer"])
    for group in optimizer.param_groups:
        group["lr"] = rate
    batches.set_state(state["batches"])
    torch.set_rng_state(state["default"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    if rank() > 0:
        torch.manual_seed(batches.initial_seed() + rank() + state["update"])
    device = next(model.parameters()).device
    return state["update"], state["history"], {name: value.to(device) for name, value in state["sums"].items()}
