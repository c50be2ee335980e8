"""Data worked through in chunks gives what it gives at once."""

import itertools
import json
import tracemalloc
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from conftest import random_episodes
from hypothesis import given
from hypothesis import strategies as st
from recordings import Data, adroit, antmaze, fetch, load_recording, table

from tap.data import boundaries, chunks
from tap.data.catalog import lookup
from tap.data.episodes import ARRAYS
from tap.data.windows import Normalizer, Windows, fit_normalizer, moments, transitions
from tap.settings import WindowParams

PARAMS = WindowParams(length=4, discount=0.9, termination_penalty=-5.0, bootstrap_truncated=True, normalize=True)


@given(num_rows=st.integers(0, 50), lengths=st.lists(st.integers(1, 9), max_size=12), rows=st.integers(1, 20))
def test_chunks_cover_everything_once_in_order(num_rows: int, lengths: list[int], rows: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "ROWS", rows)
        by_rows, by_episodes = list(chunks.row_chunks(num_rows)), list(chunks.episode_chunks(np.array(lengths, np.int64)))
    assert [row for part in by_rows for row in range(num_rows)[part]] == list(range(num_rows))
    assert all(part.stop - part.start <= rows for part in by_rows)
    assert [episode for part in by_episodes for episode in range(len(lengths))[part]] == list(range(len(lengths)))
    together = [sum(lengths[part]) for part in by_episodes]
    assert all(total <= rows or part.stop - part.start == 1 for part, total in zip(by_episodes, together, strict=True))
    for (_, following), total in zip(itertools.pairwise(by_episodes), together, strict=False):
        assert total + lengths[following.start] > rows  # no chunk is smaller than it must be


def jumping(columns: dict[str, Any]) -> dict[str, Any]:
    """The columns with next observations, which show an end that no flag does."""
    after = np.concatenate([columns["observations"][1:], columns["observations"][:1]])
    after[[18, 29]] = 1e3
    return columns | {"next_observations": after}


def hammer() -> dict[str, Any]:
    columns = adroit([300, 260, 624, 150])
    columns["terminals"][[299, 559, 1183]] = True
    columns["timeouts"][[199, 499, 759]] = True
    return columns


def maze() -> dict[str, Any]:
    columns, rng = antmaze([50, 40, 60, 30], timeout=[True, False, True, True]), np.random.default_rng(0)
    columns["rewards"] = (rng.random(180) < 0.2).astype(np.float32)
    columns["terminals"] = columns["rewards"] * rng.integers(0, 2, 180) > 0
    return columns


@pytest.mark.parametrize(
    ("dataset", "columns"),
    [
        ("hopper-medium-v2", table([20, 1, 30, 7], terminal=[True, True, False, False], timeout=[False, False, True, False])),
        ("hopper-medium-v2", jumping(table([30, 12, 30], terminal=[False] * 3, timeout=[True, False, True]))),
        ("hammer-human-v0", hammer()),
        ("antmaze-umaze-v2", maze()),
    ],
    ids=["flags", "next-observations", "adroit", "antmaze"],
)
@pytest.mark.parametrize("rows", [1, 7, 64])
def test_a_file_read_in_chunks_gives_the_same_arrays_and_report(
    data: Data, dataset: str, columns: dict[str, Any], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns["actions"][2] = 3.0
    monkeypatch.setattr(boundaries, "QUANTILE_ROWS", 100)  # so that not every step is in the sample
    whole, report = data.load(columns, dataset, clip_actions=True)
    expected = {name: getattr(whole, name).tobytes() for name in ARRAYS}
    monkeypatch.setattr(chunks, "ROWS", rows)
    read, again = data.load(columns, dataset, clip_actions=True)
    assert {name: getattr(read, name).tobytes() for name in ARRAYS} == expected
    assert json.dumps(again) == json.dumps(report) and len(whole.lengths) > 2


def test_the_longest_distances_of_all_chunks_are_named(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    columns, messages = table([20, 30, 30], terminal=[True, False, True], timeout=[False] * 3), []
    for rows in (1 << 20, 9):
        monkeypatch.setattr(chunks, "ROWS", rows)
        with pytest.raises(ValueError, match="after row 49") as error:
            data.load(columns, max_episode_steps=30)
        messages.append(str(error.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("rows", [1, 16, 100])
def test_moments_of_chunks_combine_to_those_of_all_rows(rows: int) -> None:
    raw = np.random.default_rng(0).normal([1e6, 0.0, -3.0], [1.0, 1e-3, 50.0], (1000, 3)).astype(np.float32)
    mean, std, low, high = moments(raw[first : first + rows] for first in range(0, 1000, rows))
    exact = raw.astype(np.float64)
    np.testing.assert_allclose(mean, exact.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(std, exact.std(axis=0), rtol=1e-10)  # the first is a millionth of its mean
    np.testing.assert_allclose(std[1:], exact.std(axis=0)[1:], rtol=1e-12)
    np.testing.assert_array_equal([low, high], [raw.min(axis=0), raw.max(axis=0)])


def test_the_moments_of_one_chunk_are_numpys_to_the_bit() -> None:
    raw = np.random.default_rng(0).normal(3, 7, (5000, 4)).astype(np.float32)
    mean, std, _, _ = moments([raw])
    np.testing.assert_array_equal(mean, raw.mean(axis=0, dtype=np.float64))
    np.testing.assert_array_equal(std, raw.std(axis=0, dtype=np.float64))


def test_windows_built_in_chunks_are_those_built_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    selection, _ = random_episodes([3, 1, 6, 20, 2, 9], 2, 1).split(0.2, np.random.default_rng(0))
    whole = selection.episodes.select(selection.indices)
    normalizer = fit_normalizer(whole, PARAMS)
    expected = normalizer.normalize(torch.from_numpy(transitions(whole, PARAMS)))
    monkeypatch.setattr(chunks, "ROWS", 7)
    windows = Windows(selection, PARAMS, normalizer, torch.device("cpu"), tmp_path)
    assert torch.equal(windows.transitions_NX, expected)
    in_chunks = fit_normalizer(selection, PARAMS)
    np.testing.assert_allclose(in_chunks.mean, normalizer.mean, rtol=1e-6)
    np.testing.assert_allclose(in_chunks.std, normalizer.std, rtol=1e-6)
    assert list(tmp_path.iterdir()) == []  # the file that holds them has no name


def test_the_bundled_file_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, params = Path("data/bundled/hopper-medium-replay.hdf5"), fetch()
    info = lookup("hopper-medium-replay", params)
    whole, report = load_recording(path, info, params, tmp_path / "whole")
    normalizer = Normalizer.fit([transitions(whole, PARAMS)])
    monkeypatch.setattr(chunks, "ROWS", 5000)
    parts, again = load_recording(path, info, params, tmp_path / "parts")
    assert json.dumps(again) == json.dumps(report)
    in_chunks = fit_normalizer(parts, PARAMS)
    np.testing.assert_allclose(in_chunks.mean, normalizer.mean, rtol=1e-6)
    np.testing.assert_allclose(in_chunks.std, normalizer.std, rtol=1e-6)
    with h5py.File(path) as file:
        np.testing.assert_array_equal(parts.observations, file["observations"][:])


def peak_of_preparation(folder: Path, num_episodes: int) -> int:
    """The most bytes that numpy and Python hold on the way from a file with episodes of 100 steps to windows."""
    path = folder / f"{num_episodes}.hdf5"
    rng, ends = np.random.default_rng(0), np.arange(1, 100 * num_episodes + 1) % 100 == 0
    observations = rng.normal(size=(len(ends), 20)).astype(np.float32)
    with h5py.File(path, "w") as file:
        file["observations"], file["actions"] = observations, rng.uniform(-1, 1, (len(ends), 5)).astype(np.float32)
        file["next_observations"] = np.concatenate([observations[1:], observations[:1]])
        file["rewards"], file["terminals"], file["timeouts"] = np.ones(len(ends), np.float32), np.zeros(len(ends), bool), ends
    del observations
    params = fetch(path=path, max_episode_steps=100)
    tracemalloc.start()
    episodes, _ = load_recording(path, lookup("mine", params), params, folder / str(num_episodes))
    training, _ = episodes.split(0.1, np.random.default_rng(0))
    windows = Windows(training, PARAMS, fit_normalizer(training, PARAMS), torch.device("cpu"), folder)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(windows) == 90 * num_episodes
    return peak


def test_memory_grows_by_flags_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of this file has 196 bytes, one of the windows 108."""
    monkeypatch.setattr(chunks, "ROWS", 2000)
    few, many = (peak_of_preparation(tmp_path, num_episodes) for num_episodes in (500, 2500))
    assert (many - few) / 200_000 < 12
