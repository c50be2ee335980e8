"""Files that appear completely or not at all, and what helps where the disk refuses them."""

import errno
import fcntl
import glob
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

# What a user can do about the errors of a disk, by errno. With others, such as ENOENT, a program may be at fault.
REMEDIES = {
    errno.ENOSPC: "free some space there",
    errno.EDQUOT: "free some of your quota there",
    errno.EROFS: "make its file system writable",
    errno.EACCES: "allow this user to read and write there",
    errno.EPERM: "allow this user to read and write there",
    errno.EIO: "check that disk, or move the project to another",
}


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write under a temporary name, then flushed to disk and renamed to `path`; missing folders are created.

    After the context, the file survives a loss of power. If the context ends with an exception, `path` is unchanged. An OSError
    names `path`. What an earlier process left when it was killed is removed.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with errors_name(path, instead_of=(None, str(temporary))):
            path.parent.mkdir(parents=True, exist_ok=True)
            _remove_remains(path)
            with temporary.open("w+b") as file:  # HDF5 also reads what it has written
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            _sync_folder(path.parent)
    finally:
        with suppress(OSError):  # of a file system that has become read-only: the first error says so
            temporary.unlink(missing_ok=True)


@contextmanager
def errors_name(path: Path, instead_of: Sequence[str | None] = (None,)) -> Iterator[None]:
    """Make an OSError in the context name `path` if it names one of `instead_of`: that of a write or a flush names no file."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename not in instead_of:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def _sync_folder(folder: Path) -> None:
    """Flush a folder to disk: without it, a loss of power may undo a rename in it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems have no such operation
            raise
    finally:
        os.close(descriptor)


def explain_disk(error: OSError) -> str | None:
    """One sentence with path, cause and remedy, without its full stop; None if the error is not the disk's."""
    if error.errno not in REMEDIES or (isinstance(error, PermissionError) and error.filename is None):  # of a port, for example
        return None
    place = f"{error.filename}: " if error.filename else ""
    return f"{place}{os.strerror(error.errno)}: {REMEDIES[error.errno]}, then run the same command again: it resumes"


def _remove_remains(path: Path) -> None:
    """Remove the temporary files of `path` whose process has ended, as by kill -9."""
    for remains in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        pid = remains.name.split(".")[-2]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            remains.unlink(missing_ok=True)


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
    return files_sha256(folder, [path for path in folder.rglob("*") if path.is_file()])


def files_sha256(root: Path, files: Iterable[Path]) -> str:
    """Hexadecimal SHA-256 digest of the names and bytes of some files below the folder `root`; of a file, if `root` is one."""
    if root.is_file():
        return sha256(root)
    digests = {path.relative_to(root).as_posix(): sha256(path) for path in files}
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def sha256(path: Path) -> str:
    """Hexadecimal SHA-256 digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
