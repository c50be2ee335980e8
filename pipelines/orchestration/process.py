"""Commands whose processes all end with this one, however it ends: by Ctrl-C, a cancellation, or kill -9."""

import fcntl
import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Waits for the end of its standard input, which comes when the process at the other end closes it or dies, even by kill -9.
# Then it signals the target every 10 seconds, the last time by SIGKILL.
WATCHDOG = """
read -r _
for signal in INT TERM KILL; do
  kill -s $signal -- "$1" 2>/dev/null || exit 0
  for _ in $(seq 100); do sleep 0.1; kill -s 0 -- "$1" 2>/dev/null || exit 0; done
done
"""


def watch(target: int, keep_open: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """Start a watchdog that ends `target` as soon as its standard input is closed or this process dies.

    `target` is a process id, or minus a process group's id; the watchdog keeps the file descriptors `keep_open`.
    """
    command = ["sh", "-c", WATCHDOG, "watchdog", str(target)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, pass_fds=keep_open)


@contextmanager
def running(
    command: Sequence[str], environment: Mapping[str, str] | None = None, keep_open: Sequence[int] = (), **streams: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a new group, which ends with the context, or soon after this process if that dies.

    Its environment is this process's, plus the variables of `environment`.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    # PATH: commands of this virtual environment, activated or not. PYTHONUNBUFFERED: output in a pipe without delay.
    variables = os.environ | {"PATH": path, "PYTHONUNBUFFERED": "1"} | dict(environment or {})
    process = subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL, start_new_session=True, **streams)
    watchdog = watch(-process.pid, keep_open)
    try:
        yield process
    finally:
        assert watchdog.stdin
        watchdog.stdin.close()
        process.wait()
        watchdog.wait()


def run(
    command: Sequence[str], show: Callable[[str, bool], None], lock: Path, environment: Mapping[str, str] | None = None
) -> int:
    """Run `command` to its end and return its exit code; `show(line, passing)` is called with each line of its output.

    A passing line ends with a carriage return: the next line replaces it, as in progress bars. One command at a time runs under
    one `lock` file; others wait. If this process is killed, the watchdog keeps the lock until the command has ended.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            show("another run is active in this folder: waiting for it to end", False)
            fcntl.flock(file, fcntl.LOCK_EX)
        with running(command, environment, [file.fileno()], stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            assert process.stdout
            for line in io.TextIOWrapper(process.stdout, errors="replace", newline=""):
                show(line.rstrip("\r\n"), line.endswith("\r"))
            return process.wait()
