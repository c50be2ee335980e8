import h5py
import numpy as np
import pytest
from recordings import Data, antmaze, fetch, table

from tap.data import chunks
from tap.data.catalog import lookup
from tap.data.hdf5 import open_table


def test_float64_columns_of_width_one_and_float_flags(data: Data) -> None:
    columns = table([20, 30], terminal=[True, False], timeout=[False, True])
    plain, _ = data.load(columns)
    wide = {
        "observations": columns["observations"].astype(np.float64),
        "actions": columns["actions"].astype(np.float64),
        "rewards": columns["rewards"].astype(np.float64)[:, None],
        "terminals": columns["terminals"].astype(np.float32)[:, None],
        "timeouts": columns["timeouts"].astype(np.float32)[:, None],
        "metadata/algorithm": "SAC",
        "metadata/policy/weight": np.zeros((3, 3)),
        "infos": np.zeros(50),
    }
    episodes, _ = data.load(wide)
    for name in ("observations", "actions", "rewards", "terminals", "offsets"):
        np.testing.assert_array_equal(getattr(episodes, name), getattr(plain, name))
    assert {getattr(episodes, name).dtype for name in ("observations", "actions", "rewards")} == {np.dtype(np.float32)}
    assert episodes.terminals.dtype == bool


@pytest.mark.parametrize("key", ["observations", "actions", "rewards", "terminals"])
def test_a_missing_key_is_named_with_what_is_there(data: Data, key: str) -> None:
    with pytest.raises(ValueError, match=f"lacks {key}; it has .*timeouts"):
        data.load(table([5], terminal=[True], timeout=[False]) | {key: None})


def test_keys_of_different_lengths_are_listed_with_their_shapes(data: Data) -> None:
    columns = table([5], terminal=[True], timeout=[False])
    with pytest.raises(ValueError, match=r"observations \(5, 3\), actions \(4, 2\), rewards \(5,\)"):
        data.load(columns | {"actions": columns["actions"][:4]})


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("observations", np.zeros((5, 4, 4, 3))),
        ("actions", np.zeros(())),
        ("rewards", np.zeros((5, 2))),
        ("terminals", np.array([b"no"] * 5)),
        ("observations", np.zeros((0, 3))),
    ],
)
def test_a_key_that_is_not_a_table_is_named(data: Data, key: str, values: np.ndarray) -> None:
    with pytest.raises(ValueError, match=f"{key} is not a table of numbers"):
        data.load(table([5], terminal=[True], timeout=[False]) | {key: values})


@pytest.mark.parametrize("key", ["observations", "actions", "rewards", "terminals"])
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e300])
def test_values_that_are_not_finite_are_counted_and_located(
    data: Data, key: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = table([10], terminal=[True], timeout=[False])
    columns[key] = columns[key].astype(np.float64)
    columns[key][[4, 7]] = value
    count = columns[key][[4, 7]].size
    for rows in (1 << 20, 3):
        monkeypatch.setattr(chunks, "ROWS", rows)
        with pytest.raises(
            ValueError, match=f"{key} has {count} values that are not a finite float32, the first in row 4: fix it"
        ):
            data.load(columns)


def test_an_incomplete_hdf5_file(data: Data) -> None:
    data.write(table([500], terminal=[True], timeout=[False]))
    whole, info = data.path.read_bytes(), lookup("mine", fetch(path=data.path, max_episode_steps=500))
    for content in (b"<html>404</html>", b"", whole[: len(whole) // 2]):
        data.path.write_bytes(content)
        with (
            pytest.raises(ValueError, match=r"data\.hdf5 is not a complete HDF5 file .*: replace it with a complete copy"),
            open_table(data.path, info),
        ):
            pass


def test_a_chunk_that_cannot_be_decompressed(data: Data) -> None:
    columns = table([5000], terminal=[True], timeout=[False])
    with h5py.File(data.path, "w") as file:
        for key, values in columns.items():
            file.create_dataset(key, data=values, chunks=True, compression="gzip")
        where, size = (getattr(file["actions"].id.get_chunk_info(0), name) for name in ("byte_offset", "size"))
    content = bytearray(data.path.read_bytes())
    content[where : where + size] = bytes(size)
    data.path.write_bytes(content)
    with open_table(data.path, lookup("mine", fetch(path=data.path, max_episode_steps=5000))) as recorded:
        assert len(recorded.read("rewards", slice(0, 10))) == 10
        with pytest.raises(ValueError, match="is not a complete HDF5 file"):
            recorded.read("actions", slice(0, 10))


def test_ant_keeps_its_first_27_dimensions(data: Data) -> None:
    columns = table([20, 10], terminal=[True, False], timeout=[False, True], dim=111)
    after = np.concatenate([columns["observations"][1:], columns["observations"][:1]])
    episodes, report = data.load(columns | {"next_observations": after}, "ant-medium-v2")
    np.testing.assert_array_equal(episodes.observations, columns["observations"][:, :27])
    assert report["observation_dim"] == 27


def test_antmaze_appends_the_goal(data: Data) -> None:
    columns = antmaze([30, 30], timeout=[True, True])
    episodes, _ = data.load(columns, "antmaze-umaze-v2")
    np.testing.assert_array_equal(episodes.observations, np.hstack([columns["observations"], columns["infos/goal"]]))
    with pytest.raises(ValueError, match="lacks infos/goal"):
        data.load(columns | {"infos/goal": None}, "antmaze-umaze-v2")
    with pytest.raises(ValueError, match="lacks infos/goal"):
        data.load(columns | {"infos/goal": None, "infos": np.zeros((60, 2))}, "antmaze-umaze-v2")
    with pytest.raises(ValueError, match=r"observations \(N, 29\)"):
        data.load(columns | {"observations": columns["observations"][:, :27]}, "antmaze-umaze-v2")
