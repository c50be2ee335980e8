"""The outbox: a record on disk of what each run logs, so that nothing is lost in an outage of the tracking server.

    OUTBOX/KEY/events.jsonl    one event per line: start, metrics, tags, artifact, model, version, end
    OUTBOX/KEY/artifacts/      the logged files
    OUTBOX/KEY/model/          the logged model

A record can be delivered to a store at any time, and any number of times. A process that writes or delivers a record holds a
lock on its events.jsonl, which the operating system releases when the process ends. An unlocked record without an end belongs
to a run that was killed.
"""

import errno
import fcntl
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any, Self

from tap.files import errors_name, write_atomically

EVENTS = "events.jsonl"
DELIVERED = ".delivered"  # suffix of a folder that is being removed


class Record:
    """The record of one run, locked by this process and usable by several threads. Methods that write raise OSError."""

    def __init__(self, folder: Path, file: FileIO) -> None:
        self.folder, self.key = folder, folder.name
        self._file, self._writing = file, threading.Lock()
        os.ftruncate(file.fileno(), _intact_size((folder / EVENTS).read_bytes()))

    @classmethod
    def create(cls, outbox: Path, key: str) -> Self:
        """The record of the run `key`, new or continued. Waits while another process delivers it."""
        folder = outbox / key
        while True:
            with suppress(FileExistsError):  # raised despite exist_ok where another process removes the folder meanwhile
                folder.mkdir(parents=True)
            if record := cls._lock(folder, fcntl.LOCK_EX):
                return record

    @classmethod
    def take(cls, folder: Path) -> Self | None:
        """The record in a folder; None if another process has locked or removed it."""
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
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):  # else it was removed before the lock was taken
                return cls(folder, file)
        except (BlockingIOError, FileNotFoundError):
            pass
        file.close()
        return None

    def append(self, event: str, **content: Any) -> None:
        """Write an event, which survives a kill of this process; its time in ms is now unless `content` has one."""
        line = json.dumps({"event": event, "time": time.time_ns() // 1_000_000} | content).encode() + b"\n"
        with self._writing, errors_name(self.folder / EVENTS):
            size = os.fstat(self._file.fileno()).st_size
            if self._file.write(line) != len(line):
                os.ftruncate(self._file.fileno(), size)  # half a line would damage the next one
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.folder / EVENTS))

    def flush(self) -> None:
        """Sync to disk, so that what was written survives a loss of power."""
        with errors_name(self.folder / EVENTS):
            os.fsync(self._file.fileno())

    def add_artifact(self, name: str, text: str) -> None:
        """Keep a text as a file."""
        write_atomically(self.folder / "artifacts" / name, text)
        self.append("artifact", name=name)

    def add_model(self, save: Callable[[Path], None]) -> None:
        """Keep the model that `save` writes into a folder that does not exist yet."""
        folder = self.folder / "model"
        shutil.rmtree(folder, ignore_errors=True)
        with errors_name(folder):
            save(folder)
        self.append("model")

    def events(self, position: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
        """The events from a byte position on, each with the position after it. Raises ValueError if one is damaged."""
        return events(self.folder / EVENTS, position)

    def end_if_killed(self) -> None:
        """Write the end KILLED, at the time of the last event, unless the run has an end."""
        last, ended = 0, False
        for _, event in self.events():
            last, ended = event["time"], event["event"] == "end"
        if not ended:
            self.append("end", time=last, status="KILLED")

    def remove(self) -> None:
        """Remove the record and release its lock. After a crash the remains no longer count as a record."""
        removed = self.folder.with_name(self.key + DELIVERED)
        shutil.rmtree(removed, ignore_errors=True)
        self.folder.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)
        self.close()

    def close(self) -> None:
        """Release the lock."""
        self._file.close()


def record_folders(outbox: Path) -> list[Path]:
    """The folders of all records in an outbox, in the order in which their runs started; deletes the rest of other folders."""
    for folder in outbox.glob(f"*{DELIVERED}"):
        shutil.rmtree(folder, ignore_errors=True)
    for folder in outbox.glob("*/"):
        with suppress(OSError):  # not empty: only the folder of a run that ended before it wrote anything is
            folder.rmdir()  # `Record.create` makes it again if that run has only just begun
    return [folder for _, folder in sorted((_started(path), path.parent) for path in outbox.glob(f"*/{EVENTS}"))]


def start_of(folder: Path) -> dict[str, Any] | None:
    """A record's first event; None if the record was removed, or its process died before the event. Needs no lock.

    Raises ValueError if the event is damaged.
    """
    try:
        return next((event for _, event in events(folder / EVENTS)), None)
    except FileNotFoundError:
        return None


def events(path: Path, position: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
    """The events in a file; see `Record.events`. A last line without a newline is still being written, or was cut off."""
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
                    f"{path}, line {number} is damaged: fix or delete that line, then run `tap sync`; "
                    f"or delete {path.parent}, and the run will be missing in MLflow"
                )
            yield position, event


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and {"event", "time"} <= event.keys() else None


def _intact_size(content: bytes) -> int:
    """The size of a record's whole lines: a kill or a loss of power may have cut off the last one."""
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
