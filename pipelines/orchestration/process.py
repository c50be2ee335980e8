"""Commands whose processes all end with this one, however it ends: by Ctrl-C, a cancellation, or kill -9."""

import fcntl
import io
import os
import subprocess
import sys
import threading
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


_watchdogs: set[subprocess.Popen[bytes]] = set()  # of all contexts of `running`


def end_all() -> None:
    """End the processes of all contexts of `running`, which other threads wait for."""
    for watchdog in _watchdogs.copy():
        assert watchdog.stdin
        watchdog.stdin.close()


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
    _watchdogs.add(watchdog)
    try:
        yield process
    finally:
        assert watchdog.stdin
        watchdog.stdin.close()
        process.wait()
        watchdog.wait()
        _watchdogs.remove(watchdog)


class Turn:
    """A lock file that one process holds at a time, while any of its threads needs it.

    `taken_over` is called each time the process has got the lock, before anything runs.
    """

    def __init__(self, path: Path, taken_over: Callable[[], None]) -> None:
        self.path, self.taken_over = path, taken_over
        self._guard, self._file, self._threads = threading.Lock(), -1, 0

    @contextmanager
    def taken(self, show: Callable[[str, bool], None]) -> Iterator[int]:
        """Hold the lock; gives the file descriptor. `show(line, False)` is called if another process has it."""
        with self._guard:
            if self._threads == 0:
                self._file = self._lock(show)
            self._threads += 1
        try:
            yield self._file
        finally:
            with self._guard:
                self._threads -= 1
                if self._threads == 0:
                    os.close(self._file)

    def _lock(self, show: Callable[[str, bool], None]) -> int:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                show("another run is active in this folder: waiting for it to end", False)
                fcntl.flock(file, fcntl.LOCK_EX)
            self.taken_over()
        except BaseException:
            os.close(file)
            raise
        return file


def run(
    command: Sequence[str],
    show: Callable[[str, bool], None],
    environment: Mapping[str, str] | None = None,
    keep_open: Sequence[int] = (),
) -> int:
    """Run `command` to its end and return its exit code; `show(line, passing)` is called with each line of its output.

    A passing line ends with a carriage return: the next line replaces it, as in progress bars. If this process is killed, the
    watchdog keeps the file descriptors `keep_open` until the command has ended, and with them the locks.
    """
    with running(command, environment, keep_open, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout
        for line in io.TextIOWrapper(process.stdout, errors="replace", newline=""):
            show(line.rstrip("\r\n"), line.endswith("\r"))
        return process.wait()
