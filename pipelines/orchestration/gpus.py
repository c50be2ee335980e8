"""GPUs of a worker's machine as slots: Prefect's global concurrency limits, one for each GPU.

`tap worker` names the GPUs in the variable TAP_GPUS and makes their limits; a run takes as many as it asks for, and its stages
see no other. A run that dies without giving them back loses them when its lease ends.
"""

import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from prefect import get_client
from prefect.concurrency.sync import concurrency

GPUS = "TAP_GPUS"
LEASE = 60  # seconds; Prefect renews it while the run lives


def offer(gpus: Sequence[str], runs_each: int) -> dict[str, str]:
    """Let `runs_each` runs at a time use each of this machine's `gpus`; the environment of the worker that offers them."""
    with get_client(sync_client=True) as client:
        for gpu in gpus:
            client.upsert_global_concurrency_limit_by_name(_limit(gpu), runs_each)
    return {GPUS: ",".join(gpus)}


@contextmanager
def take(count: int) -> Iterator[dict[str, str]]:
    """The environment for stages that may use `count` GPUs, waiting for them; one without GPUs where the worker offers none.

    Raises ValueError where the worker offers fewer than `count`.
    """
    gpus = [gpu for gpu in os.environ.get(GPUS, "").split(",") if gpu]
    if not gpus:
        yield {"CUDA_VISIBLE_DEVICES": ""}
        return
    if count > len(gpus):
        raise ValueError(f"gpus: {count} are asked for, and this worker has {len(gpus)}")
    with ExitStack() as slots:
        while len(taken := _take_free(slots, gpus, count)) < count:
            slots.close()  # all or none: two runs that hold one each and wait for another would wait for ever
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
