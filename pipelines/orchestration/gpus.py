"""The GPUs of a worker's machine as slots: one of Prefect's global concurrency limits per GPU.

`tap worker` lists the GPUs in the variable TAP_GPUS and creates their limits. A run takes as many as it requests, and its
stages see no others. The slots of a run that dies without releasing them become free when their lease ends.
"""

import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from prefect import get_client
from prefect.concurrency.sync import concurrency

GPUS = "TAP_GPUS"
LEASE = 60  # seconds; Prefect renews it while the run is alive


def offer(gpus: Sequence[str], runs_each: int) -> dict[str, str]:
    """Let `runs_each` runs at a time use each of this machine's `gpus`; returns the environment for the worker."""
    with get_client(sync_client=True) as client:
        for gpu in gpus:
            client.upsert_global_concurrency_limit_by_name(_limit(gpu), runs_each)
    return {GPUS: ",".join(gpus)}


@contextmanager
def take(count: int) -> Iterator[dict[str, str]]:
    """Wait for `count` GPUs; yields the environment for stages that use them, or one without GPUs if the worker has none.

    Raises ValueError if the worker has fewer than `count`.
    """
    gpus = [gpu for gpu in os.environ.get(GPUS, "").split(",") if gpu]
    if not gpus:
        yield {"CUDA_VISIBLE_DEVICES": ""}
        return
    if count > len(gpus):
        raise ValueError(f"gpus: {count} are requested, but this worker has {len(gpus)}: request fewer")
    with ExitStack() as slots:
        while len(taken := _take_free(slots, gpus, count)) < count:
            slots.close()  # all or none: two runs that each take one of two GPUs and wait for the other would deadlock
            time.sleep(1)
        yield {"CUDA_VISIBLE_DEVICES": ",".join(taken)}


def _take_free(slots: ExitStack, gpus: Sequence[str], count: int) -> list[str]:
    taken: list[str] = []
    for gpu in gpus:
        if len(taken) < count:
            try:
                slots.enter_context(concurrency(_limit(gpu), timeout_seconds=0.5, lease_duration=LEASE, strict=True))
            except TimeoutError:
                continue
            taken.append(gpu)
    return taken


def _limit(gpu: str) -> str:
    return f"gpu-{socket.gethostname()}-{gpu}"
