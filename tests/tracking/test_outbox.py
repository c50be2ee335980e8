"""Records on disk: what a kill, a full disk and several processes may do to them."""

import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tap.tracking.outbox import Record, record_folders, start_of


def steps(record: Record, position: int = 0) -> list[int]:
    return [event["step"] for _, event in record.events(position)]


def test_events_are_read_from_any_position_and_a_cut_off_line_goes(tmp_path: Path) -> None:
    record = Record.create(tmp_path, "key")
    for step in range(3):
        record.append("metrics", step=step)
    (after_first, _), *_ = record.events()
    assert steps(record) == [0, 1, 2] and steps(record, after_first) == [1, 2]
    file = tmp_path / "key/events.jsonl"
    with file.open("ab") as other:
        other.write(b'{"event": "metr')
    assert steps(record) == [0, 1, 2]  # it may still be being written
    record.close()
    for tail in (b'{"event": "metr', b"\0\0\0\n"):  # a kill, a loss of power
        with file.open("ab") as other:
            other.write(tail)
        record = Record.create(tmp_path, "key")
        record.append("metrics", step=3)
        record.close()
    assert steps(record) == [0, 1, 2, 3, 3]


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    record = Record.create(tmp_path, "key")
    for step in range(3):
        record.append("metrics", step=step)
    file = tmp_path / "key/events.jsonl"
    first, second, third = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(first + second[:-5] + b"\n" + third)
    with pytest.raises(ValueError, match=r"key/events\.jsonl, line 2 is damaged: .* `tap sync`"):
        steps(record)
    with pytest.raises(ValueError, match="line 2"):
        steps(record, len(first))


def test_a_full_disk_spoils_no_line(tmp_path: Path) -> None:
    record = Record.create(tmp_path, "key")
    record.append("metrics", step=0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "key/events.jsonl").stat().st_size + 10, hard))
    try:
        with pytest.raises(OSError):
            record.append("metrics", step=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    record.append("metrics", step=2)
    assert steps(record) == [0, 2]


def test_a_run_that_ended_before_it_wrote_anything_leaves_no_folder(tmp_path: Path) -> None:
    record = Record.create(tmp_path, "key")
    record.append("start")
    (tmp_path / "empty").mkdir()
    assert record_folders(tmp_path) == [tmp_path / "key"] == list(tmp_path.iterdir())


def test_one_holder_at_a_time_and_a_removed_record_is_begun_anew(tmp_path: Path) -> None:
    held = Record.create(tmp_path, "key")
    held.append("start", step=0)
    assert Record.take(tmp_path / "key") is None
    got: list[Record] = []
    waiting = threading.Thread(target=lambda: got.append(Record.create(tmp_path, "key")))
    waiting.start()
    held.remove()
    waiting.join(timeout=10)
    assert steps(got[0]) == [] and start_of(tmp_path / "key") is None
    got[0].append("start", step=1)
    assert steps(got[0]) == [1] and Record.take(tmp_path / "key") is None
    assert Record.take(tmp_path / "other") is None


def test_a_record_can_be_created_while_others_remove_it(tmp_path: Path) -> None:
    def create_and_remove() -> int:
        for _ in range(200):
            Record.create(tmp_path, "key").remove()
        return 200

    with ThreadPoolExecutor(4) as pool:
        assert sum(done.result() for done in [pool.submit(create_and_remove) for _ in range(4)]) == 800
    assert list(tmp_path.iterdir()) == []


def test_records_come_in_the_order_in_which_their_runs_started(tmp_path: Path) -> None:
    for key, time in (("b", 3), ("c", 1), ("a", 2)):
        Record.create(tmp_path, key).append("start", time=time)
    (tmp_path / "d.delivered").mkdir()  # what a crash has left
    (tmp_path / "e").mkdir()
    assert [folder.name for folder in record_folders(tmp_path)] == ["c", "a", "b"]
    assert not (tmp_path / "d.delivered").exists()
    assert record_folders(tmp_path / "none") == []
