"""The campaign of users' files, short; and that it can fail."""

from pathlib import Path

import h5py
import numpy as np
import pytest

from benchmarks.reliability import dataset_files, inputs, params_files
from benchmarks.reliability.isolated import outcome_of

VALID = dataset_files.Case("mine", [3, 5], optional=["timeouts"], limit=1000, seed=0, changes=[], damages=[])


def test_datasets_are_read_right_or_refused_in_one_sentence() -> None:
    found = inputs.campaign(dataset_files.cases(), inputs.check_dataset, count=40, seed=1)
    assert found["read"] > 5 and found["refused"] > 5


def test_params_are_what_dvc_reads_or_refused_in_one_sentence() -> None:
    found = inputs.campaign(params_files.cases(), inputs.check_params, count=40, seed=1)
    assert found["read"] > 1 and found["refused"] > 10


def test_every_change_of_a_file_is_made(tmp_path: Path) -> None:
    """On the key that it is for; a change that HDF5 refuses would test nothing."""
    for number, change in enumerate(dataset_files.CHANGES):
        (folder := tmp_path / str(number)).mkdir()
        dataset_files.write(VALID, folder / "data.hdf5")
        with h5py.File(folder / "data.hdf5", "r+") as file:
            dataset_files.CHANGES[change](file, "actions", np.random.default_rng(0))


def test_a_case_that_ends_in_another_way_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert inputs.check_dataset(VALID, tmp_path) == "read"
    right = dataset_files.plain_episodes
    monkeypatch.setattr(dataset_files, "plain_episodes", lambda path, limit: right(path, limit)[::-1])
    assert inputs.check_dataset(VALID, tmp_path).startswith("a valid file is not read: observations of episode 0")
    monkeypatch.setattr(dataset_files, "plain_episodes", lambda path, limit: right(path, limit)[:1])
    assert inputs.check_dataset(VALID, tmp_path) == "a valid file is not read: 2 episodes, but there are 1"
    assert inputs.verdict("refused: what happened?", tmp_path / "a.hdf5").startswith("not one sentence that names the file")
    assert inputs.verdict("refused: a.hdf5: \n\n\x1b", tmp_path / "a.hdf5").startswith("not one sentence that names the file")


def test_a_bomb_a_hang_and_a_crash_are_outcomes() -> None:
    def nothing() -> None: ...

    def outcome(function: object, seconds: int = 5) -> str:
        return outcome_of(nothing, function, lambda: 64 << 20, seconds)  # type: ignore[arg-type]

    assert outcome(lambda: "read") == "read"
    assert outcome(lambda: str(len(bytes(256 << 20)))).startswith("raised MemoryError")
    assert outcome(lambda: str(sum(1 for _ in iter(int, 1))), 1) == "died of signal 14"
    assert outcome(lambda: __import__("ctypes").string_at(0)).startswith("died of signal 11")
