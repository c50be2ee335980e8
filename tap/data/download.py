"""Where a dataset's file comes from: bundled, a file on this machine, or a download that is resumed and verified."""

import fcntl
import http.client
import os
import re
import urllib.error
import urllib.request
from pathlib import Path

import h5py
from tqdm import tqdm

from tap.data.catalog import DatasetInfo
from tap.data.hdf5 import HDF5_ERRORS
from tap.files import REMEDIES, errors_name, locked, read_json, sha256, write_json
from tap.yaml_file import require_no_conflict

TIMEOUT = 30  # seconds without a response
CHUNK = 1 << 20  # bytes


def obtain(info: DatasetInfo, shared: Path, lock: Path) -> Path:
    """The dataset's file or folder on this machine, downloaded into the folder `shared` if that is its source.

    The path of a Minari dataset may be its id, which names a folder in `shared`.
    The digest of a downloaded file is recorded in `lock` the first time, and must not change after that.
    Raises ValueError if the file is missing, cannot be downloaded, or its digest is not the recorded one; and if a merge left a
    conflict in `lock`.
    """
    key = f"datasets.{info.id}.fetch.path in params.yaml"
    if info.path is not None:
        places = [info.path, shared / info.path] if info.source == "minari" else [info.path]
        for place in places:
            if place.exists():
                return place
        where = " and ".join(f"{place} does not exist" for place in places)
        raise ValueError(f"{info.id}: {where}: run inside the project's folder, or correct {key}")
    assert info.url is not None
    path = shared / Path(info.url).name
    if info.source == "file":
        if not path.is_file():
            raise ValueError(f"{info.id}: {path} does not exist: put it there, or set {key}")
        return path
    if lock.exists():
        require_no_conflict(lock, lock.read_text(errors="replace"))
    shared.mkdir(parents=True, exist_ok=True)
    with path.with_name(path.name + ".lock").open("w") as turn:  # only one process at a time downloads a file
        fcntl.flock(turn, fcntl.LOCK_EX)
        if path.is_file():
            _verify(info, path, lock, f"delete {path} to download it again")
            return path
        fresh = download(info.url, path)
        try:
            _verify(info, fresh, lock, f"it was removed; run again, or put the file at {path} yourself")
        except ValueError:
            fresh.unlink()
            raise
        return fresh.replace(path)


def _verify(info: DatasetInfo, file: Path, lock: Path, remedy: str) -> None:
    """Record the file's digest in `lock` if that has none; raise ValueError if the file is incomplete or has another digest."""
    try:
        h5py.File(file).close()  # detects a web page, or a download that another program did not finish
    except HDF5_ERRORS as error:
        raise ValueError(f"{info.id}: the file from {info.url} is not a complete HDF5 file ({error}): {remedy}") from error
    digest = sha256(file)
    with locked(lock.parent):  # other processes record other datasets' files
        entries = read_json(lock) if lock.exists() else {}
        if info.id not in entries:
            entries[info.id] = {"url": info.url, "sha256": digest, "bytes": file.stat().st_size}
            write_json(lock, dict(sorted(entries.items())))
    expected = entries[info.id]["sha256"]
    if digest != expected:
        raise ValueError(
            f"{info.id}: the file from {info.url} has SHA-256 {digest}, but {lock} expects {expected}: {remedy}; "
            f"if the new file is right, remove {info.id} from {lock}"
        )


def download(url: str, target: Path) -> Path:
    """Download a whole file to `target`.part, resuming where an earlier attempt stopped; returns that path.

    Raises ValueError, with a remedy, if there is no connection, or the server does not send all of the file; OSError if the
    disk refuses it.
    """
    part = target.with_name(target.name + ".part")
    remedy = f"run again to resume, or put the file at {target} yourself"
    while True:
        before = _size(part)
        try:
            total = _receive(url, part)
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, OSError) and error.errno in REMEDIES:  # the disk's, not the connection's
                raise
            raise ValueError(f"cannot download {url}: {error}: {remedy}") from error
        size = _size(part)
        if size == total or total is None:
            break
        if size <= before:
            raise ValueError(f"cannot download {url}: the server sent {size} of {total} bytes: {remedy}")
    return part


def _receive(url: str, part: Path) -> int | None:
    """Append to `part` what the server sends until it stops; returns the whole file's size if the server sends it."""
    have = _size(part)
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code != http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE or not have:
            raise
        part.unlink()  # not the beginning of this file
        return _receive(url, part)
    with response:
        span = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", response.headers.get("Content-Range", ""))
        resumed = response.status == http.HTTPStatus.PARTIAL_CONTENT and span is not None and int(span[1]) == have
        if not resumed and response.status != http.HTTPStatus.OK:
            raise OSError(f"unexpected response {response.status} {response.reason}")
        size = span[2] if span else response.headers.get("Content-Length")
        total = int(size) if size else None
        with (
            errors_name(part),
            part.open("ab" if resumed else "wb") as file,
            tqdm(total=total, initial=have if resumed else 0, unit="B", unit_scale=True, desc=part.stem, disable=None) as bar,
        ):
            while chunk := response.read(CHUNK):
                file.write(chunk)
                bar.update(len(chunk))
            file.flush()
            os.fsync(file.fileno())
    return total


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
