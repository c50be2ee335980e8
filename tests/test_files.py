import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from stat import S_ISDIR

import pytest

from tap.files import atomic_file, explain_disk, read_json, write_atomically, write_json

ROOT = Path(__file__).parent.parent


def test_a_file_is_written_with_its_folders(tmp_path: Path) -> None:
    path = tmp_path / "a/b/c.json"
    write_json(path, {"x": [1.5]})
    assert read_json(path) == {"x": [1.5]} and [each.name for each in path.parent.iterdir()] == ["c.json"]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, float("nan"))
    assert path.read_bytes() == b"old"


def test_a_file_written_in_parts_appears_at_the_end_and_not_where_a_part_fails(tmp_path: Path) -> None:
    path = tmp_path / "folder/file"
    with atomic_file(path) as file:
        file.write(b"first ")
        assert not path.exists()
        file.write(b"second")
    assert path.read_bytes() == b"first second"
    with pytest.raises(KeyError), atomic_file(path) as file:
        file.write(b"third")
        raise KeyError
    assert path.read_bytes() == b"first second" and list(path.parent.iterdir()) == [path]


def test_a_process_killed_while_it_writes_leaves_the_old_file(tmp_path: Path) -> None:
    """kill -9 once all bytes are on the disk, but before the file has its name."""
    path = tmp_path / "file"
    write_atomically(path, b"old")
    script = (
        "import os, signal, sys; from pathlib import Path; from tap.files import write_atomically;"
        "os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL); write_atomically(Path(sys.argv[1]), b'new' * 100_000)"
    )
    assert subprocess.run([sys.executable, "-c", script, str(path)], cwd=ROOT).returncode == -signal.SIGKILL
    assert path.read_bytes() == b"old"


def test_the_next_write_removes_what_a_killed_process_left_and_nothing_of_one_at_work(tmp_path: Path) -> None:
    path = tmp_path / "file"
    script = (
        "import os, signal, sys; from pathlib import Path; from tap.files import write_atomically;"
        "os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL); write_atomically(Path(sys.argv[1]), b'new')"
    )
    for _ in range(2):
        assert subprocess.run([sys.executable, "-c", script, str(path)], cwd=ROOT).returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 1  # the second removed the first one's
    with atomic_file(tmp_path / "other") as file:
        file.write(b"x")
        at_work = list(tmp_path.glob(".other.*"))
        write_atomically(path, b"new")
        assert sorted(tmp_path.iterdir()) == sorted([path, *at_work])
        write = "import sys; from pathlib import Path; from tap.files import write_atomically as w; w(Path(sys.argv[1]), b'y')"
        subprocess.run([sys.executable, "-c", write, str(tmp_path / "other")], cwd=ROOT, check=True)
    assert (tmp_path / "other").read_bytes() == b"x"  # the last to end


def to_a_full_disk(path: Path) -> None:
    """Let this process write `path` to a device that is always full, until its name is settled."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name(f".{path.name}.{os.getpid()}.tmp").symlink_to("/dev/full")


def test_a_full_disk_is_explained_with_the_files_name(tmp_path: Path) -> None:
    path = tmp_path / "metrics.json"
    for size in (1, 1_000_000):  # the first fails when it is flushed, the second when it is written
        to_a_full_disk(path)
        with pytest.raises(OSError) as caught:
            write_atomically(path, b"x" * size)
        sentence = explain_disk(caught.value)
        assert (
            sentence == f"{path}: No space left on device: free some space there, then run the same command again: it resumes"
        )
        assert list(tmp_path.iterdir()) == []


def test_only_a_disks_errors_are_explained() -> None:
    assert explain_disk(OSError(errno.EROFS, "", "x")) == (
        "x: Read-only file system: make its file system writable, then run the same command again: it resumes"
    )
    for other in (OSError(errno.ENOENT, "", "x"), OSError("no number"), PermissionError(errno.EPERM, "kill"), TimeoutError()):
        assert explain_disk(other) is None


def test_the_first_error_is_told_where_the_disk_becomes_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(number: int) -> object:
        def call(*_: object, **__: object) -> None:
            raise OSError(number, os.strerror(number))

        return call

    monkeypatch.setattr(os, "fsync", fails(errno.EIO))
    monkeypatch.setattr(os, "unlink", fails(errno.EROFS))
    with pytest.raises(OSError, match=f"Input/output error: '{tmp_path}/file'"):
        write_atomically(tmp_path / "file", b"")


def test_a_file_is_on_the_disk_before_its_name_and_its_name_before_the_write_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, synced, fsync = tmp_path / "file", list[tuple[bool, bool]](), os.fsync

    def record(descriptor: int) -> None:
        synced.append((S_ISDIR(os.fstat(descriptor).st_mode), path.exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    write_atomically(path, b"new")
    assert synced == [(False, False), (True, True)]
