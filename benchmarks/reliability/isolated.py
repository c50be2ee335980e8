"""A function in a child process with bounded memory and time: a crash, a hang or a bomb is an outcome like any other."""

import faulthandler
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

PREPARING = 256 << 20  # bytes


def outcome_of(prepare: Callable[[], None], function: Callable[[], str], memory: Callable[[], int], seconds: int) -> str:
    """What `function` returns in a forked child, after `prepare`, in `seconds` and mapping at most `memory()` more bytes.

    `prepare` may map PREPARING more bytes.

    Otherwise how it ended: "raised ...", with the exception, or "died ...", with the signal: 14 is the end of its time.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _run(prepare, function, writer, memory, seconds)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        said = answer.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return str(json.loads(said)) if status == 0 else f"died of signal {-status}"


def _limit(more: int) -> None:
    """Let this process map that many more bytes than now."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + more, resource.RLIM_INFINITY))


def _run(
    prepare: Callable[[], None], function: Callable[[], str], writer: int, memory: Callable[[], int], seconds: int
) -> NoReturn:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)  # a crash of a library is reported as an outcome
    faulthandler.disable()
    sys.unraisablehook = lambda error: None
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.alarm(seconds)
    try:
        _limit(PREPARING)
        prepare()
        _limit(memory())
        outcome = function()
    except BaseException as error:
        outcome = f"raised {type(error).__name__}: {str(error)[:2000]}"
    os.write(writer, json.dumps(outcome).encode())
    os._exit(0)
