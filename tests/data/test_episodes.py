import errno
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import random_episodes
from hypothesis import given
from hypothesis import strategies as st
from recordings import Data, table

from tap.data import chunks
from tap.data.episodes import ARRAYS, Episodes, save_episodes


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8), fraction=st.floats(0, 0.99), seed=st.integers(0, 99))
def test_split_and_select_keep_episodes_whole(lengths: list[int], fraction: float, seed: int) -> None:
    episodes = random_episodes(lengths, 2, 1)
    selections = episodes.split(fraction, np.random.default_rng(seed))
    parts = [episodes.select(selection.indices) for selection in selections]
    assert sum(part.num_episodes for part in parts) == len(lengths)
    assert parts[0].num_episodes >= 1
    assert (parts[1].num_episodes > 0) == (fraction > 0 and len(lengths) > 1)
    pieces = {piece.tobytes(): index for index, piece in enumerate(np.split(episodes.observations, episodes.offsets[1:-1]))}
    for part, selection in zip(parts, selections, strict=True):
        assert len(part.lengths) == len(part.returns) == len(part.truncated)
        assert selection.lengths.tolist() == part.lengths.tolist()
        assert (selection.observation_dim, selection.action_dim) == (2, 1)
        for number in range(part.num_episodes):
            rows = slice(part.offsets[number], part.offsets[number + 1])
            index = pieces[part.observations[rows].tobytes()]
            assert part.returns[number] == pytest.approx(episodes.returns[index])
            assert part.truncated[number] == episodes.truncated[index]
            assert part.lengths[number] == lengths[index]
    again = episodes.split(fraction, np.random.default_rng(seed))
    assert np.array_equal(selections[1].indices, again[1].indices)


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12), rows=st.integers(1, 30), seed=st.integers(0, 99))
def test_chunks_of_a_selection_joined_are_its_episodes(lengths: list[int], rows: int, seed: int) -> None:
    episodes = random_episodes(lengths, 2, 1)
    selection, _ = episodes.split(0.3, np.random.default_rng(seed))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "ROWS", rows)
        parts = list(selection.chunks())
    assert all(len(part.rewards) <= rows or part.num_episodes == 1 for part in parts)
    whole = episodes.select(selection.indices)
    for name in ARRAYS.keys() - {"offsets"}:
        np.testing.assert_array_equal(np.concatenate([getattr(part, name) for part in parts]), getattr(whole, name))
    assert np.concatenate([part.lengths for part in parts]).tolist() == whole.lengths.tolist()


def saved(folder: Path) -> Path:
    """A folder that holds two episodes, in two parts."""
    parts = [random_episodes([3], 2, 1), random_episodes([4], 2, 1, seed=1)]
    save_episodes(folder, parts, np.array([3, 4]))
    return folder


def test_what_is_saved_is_loaded_again_and_cannot_be_changed(tmp_path: Path) -> None:
    episodes = Episodes.load(saved(tmp_path / "hopper/episodes"))
    first, second = random_episodes([3], 2, 1), random_episodes([4], 2, 1, seed=1)
    for name, (dtype, ndim) in ARRAYS.items():
        array = getattr(episodes, name)
        assert (array.dtype, array.ndim) == (np.dtype(dtype), ndim)
        if name != "offsets":
            np.testing.assert_array_equal(array, np.concatenate([getattr(first, name), getattr(second, name)]))
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
    assert episodes.offsets.tolist() == [0, 3, 7]
    assert {path.name for path in (tmp_path / "hopper/episodes").iterdir()} == {f"{name}.npy" for name in ARRAYS}


def test_an_array_that_the_disk_refuses_has_its_cause_and_file(tmp_path: Path) -> None:
    parts = [random_episodes([3] * 2000, 2, 1)]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # of the first array, the header fits but not the data
    try:
        with pytest.raises(OSError) as caught:
            save_episodes(tmp_path, parts, np.full(2000, 3))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(tmp_path / "offsets.npy"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ARRAYS)
def test_a_missing_or_damaged_array_is_named_with_the_remedy(tmp_path: Path, name: str) -> None:
    path = saved(tmp_path / "hopper/episodes") / f"{name}.npy"
    whole, remedy = path.read_bytes(), "fetch the dataset again with `dvc repro --force fetch@hopper`"
    for content in (b"", b"no array", whole[:-1]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"{name}\.npy is damaged .*{remedy}"):
            Episodes.load(path.parent)
    path.unlink()
    with pytest.raises(ValueError, match=rf"{name}\.npy does not exist: {remedy}"):
        Episodes.load(path.parent)


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("actions", np.zeros((6, 1), np.float32), "has 6 rows, not 7"),
        ("rewards", np.zeros(7), "contains float64"),
        ("terminals", np.zeros((7, 1), bool), "not bool with 1 dimensions"),
        ("offsets", np.array([0, 4, 4, 7]), "does not increase"),
        ("offsets", np.array([1, 7]), "does not increase from 0"),
        ("offsets", np.array([0]), "does not increase"),
    ],
)
def test_arrays_that_do_not_fit_together_are_named(tmp_path: Path, name: str, array: np.ndarray, message: str) -> None:
    path = saved(tmp_path / "hopper/episodes") / f"{name}.npy"
    np.save(path, array)
    with pytest.raises(ValueError, match=rf"{name}\.npy {message}|{name}\.npy .*{message}"):
        Episodes.load(path.parent)


def test_a_part_that_fails_leaves_the_old_arrays(tmp_path: Path) -> None:
    folder = saved(tmp_path / "hopper/episodes")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def parts() -> Iterator[Episodes]:
        yield random_episodes([5], 2, 1)
        raise ValueError("row 5: fix it")

    with pytest.raises(ValueError, match="row 5"):
        save_episodes(folder, parts(), np.array([5, 5]))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_returns_are_summed_in_float64(data: Data) -> None:
    columns = table([1000], terminal=[False], timeout=[True])
    columns["rewards"] = np.full(1000, 0.1, np.float32)
    columns["rewards"][0] = 1e7
    episodes, report = data.load(columns)
    assert report["return"]["mean"] == episodes.returns[0] == pytest.approx(1e7 + 999 * float(np.float32(0.1)), abs=1e-3)
