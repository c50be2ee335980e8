"""Files that appear completely or not at all."""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write under a temporary name, then flushed to disk and renamed to `path`; missing folders are created.

    If the context ends with an exception, `path` is unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: Path, data: str | bytes) -> None:
    """Write `data` to an `atomic_file`."""
    with atomic_file(path) as file:
        file.write(data.encode() if isinstance(data, str) else data)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically. Raises ValueError on NaN or infinity, which JSON cannot represent."""
    write_atomically(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises ValueError, with the file's name, if it is not JSON, or nested too deeply to be read."""
    try:
        return json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}): delete it and run its stage again") from None


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder's lock, for which other processes wait: for what two must not do there at the same time."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def folder_sha256(folder: Path) -> str:
    """Hexadecimal SHA-256 digest of the names and bytes of all files below a folder."""
    files = {path.relative_to(folder).as_posix(): sha256(path) for path in folder.rglob("*") if path.is_file()}
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def sha256(path: Path) -> str:
    """Hexadecimal SHA-256 digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
