"""What a DVC that is killed leaves behind, byte for byte: the next command repairs it, and computes nothing again."""

from pathlib import Path

import pytest
from dvc.lock import make_lock
from stub_project import make_stub_project, ran

from pipelines.orchestration.repro import TURN, dvc

STAGES = ("params", "fetch@a", "fetch@b-c")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a project in which STAGES are up to date."""
    make_stub_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert output("repro", *STAGES)[0] == 0
    assert sorted(ran(tmp_path)) == sorted(STAGES)
    return tmp_path


def output(*arguments: str) -> tuple[int, str]:
    lines: list[str] = []
    code = dvc(*arguments, show=lambda line, _: lines.append(line))
    return code, "\n".join(lines)


def test_a_lock_file_that_a_kill_cut_off_is_made_whole(project: Path) -> None:
    lock = project / "dvc.lock"
    whole = lock.read_bytes()
    assert output("status", *STAGES) == (0, "Data and pipelines are up to date.")  # which keeps a copy
    for size in (0, len("schema: '2.0'\nstages:\n"), len(whole) // 2, len(whole) - 20):
        lock.write_bytes(whole[:size])
        assert output("repro", *STAGES)[0] == 0
        assert ran(project) == []
        assert lock.read_bytes() == whole

    (project / ".dvc/tmp/dvc.lock").unlink()
    lock.write_bytes(b"")
    assert output("repro", *STAGES)[0] == 0
    assert ran(project) == [] and lock.exists()  # from DVC's run cache


def test_a_conflict_in_the_lock_file_is_the_users(project: Path) -> None:
    lock = project / "dvc.lock"
    assert output("status", *STAGES)[0] == 0
    conflict = b"<<<<<<< HEAD\n" + lock.read_bytes()
    lock.write_bytes(conflict)
    code, text = output("status")
    assert code != 0 and "dvc.lock" in text and lock.read_bytes() == conflict


def test_an_empty_entry_of_the_run_cache_stops_nothing(project: Path) -> None:
    """A DVC that is killed between making an entry's folder and writing the entry."""
    for entry in (project / ".dvc/cache/runs").glob("*/*"):
        (only,) = entry.iterdir()
        only.unlink()
    (project / "dvc.lock").unlink()
    code, text = output("repro", *STAGES)
    assert code == 0, text
    assert sorted(ran(project)) == sorted(STAGES)


def test_temporary_files_in_the_cache_are_removed_unless_a_dvc_is_at_work(project: Path) -> None:
    """A DVC that is killed before it renames a file in its cache."""
    folder = next((project / ".dvc/cache/files/md5").iterdir())
    part, others = folder / ".W3yiViaWlw.tmp", set(folder.iterdir())
    part.write_bytes(b"half a model")
    with make_lock(project / ".dvc/tmp/lock"), TURN.taken(lambda line, passing: None):
        assert part.exists()
    assert output("status", *STAGES)[0] == 0
    assert set(folder.iterdir()) == others


def test_locks_that_a_kill_cut_off_stop_nothing(project: Path) -> None:
    for content in ("", '{"write": {"/a/b": {"pid": 4'):
        (project / ".dvc/tmp/rwlock").write_text(content)
        assert output("repro", "--force", "--single-item", "params")[0] == 0
