"""What runs log, as records on disk, from which a store can be told of a run at any time, and any number of times.

    SPOOL/KEY/events.jsonl    one event a line: start, metrics, tags, artifact, model, version, end
    SPOOL/KEY/artifacts/      the files that were logged
    SPOOL/KEY/model/          the model that was logged

Whoever writes or delivers a record holds a lock on its events.jsonl, which ends with its process, however that ends. A record
that nobody holds and that has no end is of a run that was killed.
"""

import errno
import fcntl
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any, Self

from tap.files import write_atomically

EVENTS = "events.jsonl"
DELIVERED = ".delivered"  # suffix of a folder that is being removed


class Record:
    """The record of one run, locked by this process; several threads may use it. Methods that write raise OSError."""

    def __init__(self, folder: Path, file: FileIO) -> None:
        self.folder, self.key = folder, folder.name
        self._file, self._writing = file, threading.Lock()
        os.ftruncate(file.fileno(), _intact_size((folder / EVENTS).read_bytes()))

    @classmethod
    def create(cls, spool: Path, key: str) -> Self:
        """The record of the run `key`, new or gone on with. Waits where another process is delivering it."""
        folder = spool / key
        while True:
            folder.mkdir(parents=True, exist_ok=True)
            if record := cls._lock(folder, fcntl.LOCK_EX):
                return record

    @classmethod
    def take(cls, folder: Path) -> Self | None:
        """The record in a folder, unless another process holds it or has removed it."""
        return cls._lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)

    @classmethod
    def _lock(cls, folder: Path, operation: int) -> Self | None:
        path = folder / EVENTS
        try:
            file = FileIO(path, "a")
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(file, operation)
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):  # else it was removed meanwhile
                return cls(folder, file)
        except (BlockingIOError, FileNotFoundError):
            pass
        file.close()
        return None

    def append(self, event: str, **content: Any) -> None:
        """Write an event, which has then outlived this process; with the time in ms unless `content` has it."""
        line = json.dumps({"event": event, "time": time.time_ns() // 1_000_000} | content).encode() + b"\n"
        with self._writing:
            size = os.fstat(self._file.fileno()).st_size
            if self._file.write(line) != len(line):
                os.ftruncate(self._file.fileno(), size)  # half a line would spoil the next one
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.folder / EVENTS))

    def flush(self) -> None:
        """Have the disk keep what was written, should the machine lose its power."""
        os.fsync(self._file.fileno())

    def add_artifact(self, name: str, text: str) -> None:
        """Keep a text as a file."""
        write_atomically(self.folder / "artifacts" / name, text)
        self.append("artifact", name=name)

    def add_model(self, save: Callable[[Path], None]) -> None:
        """Keep the model that `save` writes into a folder that does not exist yet."""
        folder = self.folder / "model"
        shutil.rmtree(folder, ignore_errors=True)
        save(folder)
        self.append("model")

    def events(self, position: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
        """The events from a position on, each with the position after it. Raises ValueError where one is damaged."""
        return events(self.folder / EVENTS, position)

    def end_if_killed(self) -> None:
        """Write the end of a run whose process left none: KILLED, when it was last heard of."""
        last, ended = 0, False
        for _, event in self.events():
            last, ended = event["time"], event["event"] == "end"
        if not ended:
            self.append("end", time=last, status="KILLED")

    def remove(self) -> None:
        """Remove the record, and let go of it. What a crash leaves of it no longer counts as a record."""
        removed = self.folder.with_name(self.key + DELIVERED)
        shutil.rmtree(removed, ignore_errors=True)
        self.folder.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)
        self.close()

    def close(self) -> None:
        """Let go of the record."""
        self._file.close()


def record_folders(spool: Path) -> list[Path]:
    """The folders of all records in a spool, in the order in which their runs started; removes what is left of removed ones."""
    for folder in spool.glob(f"*{DELIVERED}"):
        shutil.rmtree(folder, ignore_errors=True)
    return [folder for _, folder in sorted((_started(path), path.parent) for path in spool.glob(f"*/{EVENTS}"))]


def start_of(folder: Path) -> dict[str, Any] | None:
    """The event with which a record starts; None where it was removed, or its process died before it. Takes no lock.

    Raises ValueError where it is damaged.
    """
    try:
        return next((event for _, event in events(folder / EVENTS)), None)
    except FileNotFoundError:
        return None


def events(path: Path, position: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
    """The events in a file; see `Record.events`. A last line without its end is being written, or was never finished."""
    with path.open("rb") as file:
        file.seek(position)
        for line in file:
            if not line.endswith(b"\n"):
                return
            position += len(line)
            event = _parse(line)
            if event is None:
                number = path.read_bytes()[:position].count(b"\n")
                raise ValueError(
                    f"{path}, line {number} is damaged: mend or delete that line, then run `tap sync`; "
                    f"or delete {path.parent}, and the run is lost to MLflow"
                )
            yield position, event


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and {"event", "time"} <= event.keys() else None


def _intact_size(content: bytes) -> int:
    """How much of a record holds whole lines: the last one may have been cut off by a kill or a loss of power."""
    size = content.rfind(b"\n") + 1
    last = content[:size].splitlines(keepends=True)[-1:]
    return size - sum(len(line) for line in last if _parse(line) is None)


def _started(path: Path) -> float:
    try:
        with path.open("rb") as file:
            event = _parse(file.readline())
    except FileNotFoundError:
        event = None
    return event["time"] if event else 0
