"""The short form of benchmarks/reliability/storage.py, and whether it finds what it looks for."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.reliability.storage import Control, Fault, Outcome, after, campaign, compile_library, problems, spread

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


def test_a_write_that_fails_ends_in_one_sentence_and_the_next_run_in_the_undisturbed_result() -> None:
    result = campaign(8, ["params", "fetch"])
    assert result["wrong"] == []
    assert result["faults"] == sum(result["failed_calls"].values()) == 8 and "none" not in result["failed_calls"]
    assert result["outcomes"]["one sentence"] >= 6


def test_exactly_the_chosen_call_fails_and_after_a_full_disk_all_that_need_space(tmp_path: Path) -> None:
    watched, control = tmp_path / "watched", Control(tmp_path / "control")
    watched.mkdir()
    script = """
import os
def attempt(call, *arguments):
    try:
        return call(*arguments)
    except OSError as error:
        print(error.errno)
elsewhere = os.open("elsewhere", os.O_CREAT | os.O_WRONLY)
file = os.open("watched/file", os.O_CREAT | os.O_WRONLY)
attempt(os.write, elsewhere, b"x")
attempt(os.write, file, b"x")
attempt(os.fsync, file)
attempt(os.write, file, b"x")
attempt(os.rename, "watched/file", "watched/new")
"""
    environment = os.environ | {"LD_PRELOAD": str(compile_library(tmp_path)), "STORAGE_FAULTS": str(tmp_path / "control")}
    ends = {}
    for at, full in ((2, False), (2, True), (3, False), (6, False)):
        with control.watching(watched, at, errno.EIO, full):
            run = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, check=True)
        ends[at, full] = (run.stdout.split(), control.count, control.where)
    once = [b"5"]
    assert ends == {
        (2, False): (once, 5, "write /file"),
        (2, True): (2 * once, 5, "write /file"),
        (3, False): (once, 5, "fsync /file"),
        (6, False): ([], 5, ""),
    }


def test_faults_lie_evenly_over_the_calls_of_each_stage() -> None:
    assert [(fault.stage, fault.at) for fault in spread(6, {"params": 3, "fetch": 101})] == [
        *(("params", 1), ("params", 2), ("params", 3), ("fetch", 1), ("fetch", 51), ("fetch", 101))
    ]


def test_what_is_not_as_it_must_be_is_found(tmp_path: Path) -> None:
    fault = Fault("fetch", 1, errno.ENOSPC, full=False)
    assert problems(Outcome(1, "error: data/x: No space left on device: free some\n"), fault, tmp_path, {}) == []
    for output in (
        "",
        "error: something else\n",
        "Traceback (most recent call last)\nerror: data/x: No space left on device\n",
    ):
        assert len(problems(Outcome(1, output), fault, tmp_path, {})) >= 1
    (tmp_path / "data/raw").mkdir(parents=True)
    (tmp_path / "data/raw/rewards.npy").write_bytes(b"torn")
    assert problems(Outcome(0, ""), fault, tmp_path, {"data/raw/rewards.npy": b"whole"}) == ["data/raw/rewards.npy differs"]
    (tmp_path / "tmp").mkdir()
    (left := tmp_path / "data/.x.json.1.tmp").touch()
    same = {"data/raw/rewards.npy": b"torn", "data/.x.json.1.tmp": b""}
    assert after(Outcome(0, ""), None, tmp_path, same) == [f"{left} is left"]  # type: ignore[arg-type]
