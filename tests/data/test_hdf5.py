import pickle
import subprocess
import sys
import warnings
from typing import Any

import h5py
import numpy as np
import pytest
from recordings import Data, antmaze, fetch, load_recording, table

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


def open_mine(data: Data) -> None:
    with open_table(data.path, lookup("mine", fetch(path=data.path, max_episode_steps=500))):
        pass


def test_an_incomplete_hdf5_file(data: Data) -> None:
    data.write(table([500], terminal=[True], timeout=[False]))
    whole = data.path.read_bytes()
    data.path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"data\.hdf5 is not a complete HDF5 file .*: replace it with a complete copy"):
        open_mine(data)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is empty: replace it"),
        (b"<html>404</html>", "is a web page or XML"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is a Git LFS pointer.*git lfs pull"),
        (b"PK\x03\x04...", "is a zip archive, as .npz files are"),
        (pickle.dumps({"observations": [1]}), "is a pickle, not HDF5: convert it"),
        (b"time,x,y\n0,1,2\n", "is not HDF5: convert it"),
    ],
)
def test_another_format_is_recognised_by_its_first_bytes(data: Data, content: bytes, why: str) -> None:
    data.path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"data\.hdf5 {why}") as error:
        open_mine(data)
    assert "delete" not in str(error.value)


def test_a_file_that_another_program_writes_is_not_called_incomplete(data: Data) -> None:
    data.write(table([500], terminal=[True], timeout=[False]))
    code = f"import h5py, sys; f = h5py.File({str(data.path)!r}, 'r+'); print('open', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout and writer.stdout.readline() == b"open\n"
        with pytest.raises(ValueError, match=r"data\.hdf5 is open for writing in another program .*: close it there"):
            open_mine(data)
        writer.communicate()
    open_mine(data)


@pytest.mark.parametrize("flag", ["terminals", "timeouts"])
@pytest.mark.parametrize("value", [849.0, 0.5, -1.0])
def test_flags_that_are_no_flags_are_refused(data: Data, flag: str, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = table([5, 5], terminal=[True, False], timeout=[False, True])
    columns[flag] = columns[flag].astype(np.float32)
    columns[flag][7] = value
    for rows in (1 << 20, 3):
        monkeypatch.setattr(chunks, "ROWS", rows)
        with pytest.raises(ValueError, match=rf"data\.hdf5: {flag} has {value:g} in row 7, but a flag is 0 or 1"):
            data.load(columns)


def test_a_filter_that_is_not_installed_is_named(data: Data) -> None:
    columns = table([50], terminal=[True], timeout=[False])
    data.write(columns | {"actions": None})
    with h5py.File(data.path, "r+") as file:
        filtered = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        filtered.set_chunk((50, 2))
        filtered.set_filter(32015, h5py.h5z.FLAG_OPTIONAL, (3,))  # zstd
        h5py.h5d.create(file.id, b"actions", h5py.h5t.NATIVE_FLOAT, h5py.h5s.create_simple((50, 2)), filtered)
    with pytest.raises(ValueError, match=r"data\.hdf5: actions is compressed by HDF5 filter 32015.*not installed: rewrite"):
        open_mine(data)


def test_data_in_other_files_is_read_from_there_or_refused(data: Data) -> None:
    columns = table([20, 30], terminal=[True, False], timeout=[False, True])
    plain, _ = data.load(columns)
    parts = [data.path.with_name(name) for name in ("first.hdf5", "second.hdf5")]
    for path, rows in zip(parts, (slice(0, 20), slice(20, 50)), strict=True):
        with h5py.File(path, "w") as file:
            file["observations"] = columns["observations"][rows]
            file["rewards"] = columns["rewards"]

    def write(mapped: int = 50) -> None:
        virtual = h5py.VirtualLayout((50, 3), np.float32)
        virtual[:20] = h5py.VirtualSource(parts[0].name, "observations", (20, 3))
        virtual[20:mapped] = h5py.VirtualSource(parts[1].name, "observations", (30, 3))[: mapped - 20]
        data.write(columns | {"observations": None, "rewards": None})
        with h5py.File(data.path, "r+") as file:
            file.create_virtual_dataset("observations", virtual, fillvalue=0)
            file["rewards"] = h5py.ExternalLink(parts[0].name, "rewards")

    write()
    info = lookup("mine", fetch(path=data.path, max_episode_steps=1000))
    joined, _ = load_recording(data.path, info, fetch(), data.path.with_name("joined"))
    for name in ("observations", "actions", "rewards"):
        np.testing.assert_array_equal(getattr(joined, name), getattr(plain, name))

    write(mapped=45)
    with pytest.raises(ValueError, match=r"observations is a virtual dataset without data for 15 of its 150 values"):
        open_mine(data)
    write()
    parts[1].unlink()
    with pytest.raises(
        ValueError, match=r"observations is a virtual dataset with parts in .*second\.hdf5, observations, which"
    ):
        open_mine(data)
    parts[0].unlink()
    with pytest.raises(ValueError, match=r"rewards lies in .*first\.hdf5"):
        open_mine(data)
    data.write(columns | {"actions": None})
    with h5py.File(data.path, "r+") as file:
        file.create_dataset("actions", (50, 2), np.float32, external=[("actions.bin", 0, 400)])
    with pytest.raises(ValueError, match=r"actions lies in raw files \(actions\.bin\): write"):
        open_mine(data)


def test_the_keys_of_another_layout_are_not_all_listed(data: Data) -> None:
    data.write({f"runs/run_{number}/obs": np.zeros((2, 3)) for number in range(500)})
    with pytest.raises(ValueError, match=r"it has runs/run_0/obs, .*, and 492 more: add what is missing") as error:
        open_mine(data)
    assert len(str(error.value)) < 500


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
        with pytest.raises(
            ValueError, match=r"actions cannot be read \(.*(filter|inflate).*\): replace the file with a complete copy"
        ):
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


@pytest.mark.parametrize("chunks", [None, True])
def test_rows_that_the_file_has_no_data_for_are_refused(data: Data, chunks: Any) -> None:
    columns = table([20], terminal=[True], timeout=[False])
    data.write({})
    with h5py.File(data.path, "r+") as file:  # a few kilobytes
        for key, values in columns.items():
            shape = (10**12, *values.shape[1:])
            file.create_dataset(key, shape, values.dtype, chunks=chunks and (1000, *values.shape[1:]))
    with pytest.raises(ValueError, match=r"observations has room for \(1000000000000, 3\) values, but data for 0\.0% of"):
        open_mine(data)


def test_a_recording_that_was_cut_off_is_refused_and_rare_flags_are_not(data: Data) -> None:
    columns = table([20, 30], terminal=[True, False], timeout=[False, True])
    plain, _ = data.load(columns)
    data.write(columns | {"terminals": None, "timeouts": None})
    with h5py.File(data.path, "r+") as file:
        for key, last in (("terminals", 19), ("timeouts", 49)):
            file.create_dataset(key, (50,), bool, chunks=(10,))
            file[key][last] = True
    info = lookup("mine", fetch(path=data.path, max_episode_steps=1000))
    rare, _ = load_recording(data.path, info, fetch(), data.path.with_name("rare"))
    np.testing.assert_array_equal(rare.offsets, plain.offsets)
    with h5py.File(data.path, "r+") as file:
        del file["actions"]
        file.create_dataset("actions", (50, 2), np.float32, chunks=(10, 2))
        file["actions"][:20] = columns["actions"][:20]
    with pytest.raises(ValueError, match=r"actions has room for \(50, 2\) values, but data for 40\.0% of them: finish"):
        open_mine(data)


@pytest.mark.parametrize("key", ["terminals", "infos/qpos"])
def test_a_virtual_dataset_of_itself_is_not_read(data: Data, key: str) -> None:
    """HDF5 would not return, or crash."""
    columns = table([20], terminal=[True], timeout=[False])
    data.write(columns | {"infos/qpos": np.zeros((20, 1)), "infos/qvel": np.zeros((20, 2)), key: None})
    layout = h5py.VirtualLayout((20,) if key == "terminals" else (20, 1), np.float32)
    layout[:] = h5py.VirtualSource(".", key, layout.shape)
    with h5py.File(data.path, "r+") as file:
        file.create_virtual_dataset(key, layout)
    if key == "terminals":
        with pytest.raises(ValueError, match="terminals is a virtual dataset that contains itself: write the data"):
            open_mine(data)
    else:
        info = lookup("mine", fetch(path=data.path, max_episode_steps=1000))
        assert load_recording(data.path, info, fetch(), data.path.with_name("arrays"))[0].num_episodes == 1


def test_a_virtual_dataset_of_a_group_is_refused(data: Data) -> None:
    layout = h5py.VirtualLayout((20,), bool)
    layout[:] = h5py.VirtualSource(".", "/", (20,))
    data.write(table([20], terminal=[True], timeout=[False]) | {"terminals": None})
    with h5py.File(data.path, "r+") as file:
        file.create_virtual_dataset("terminals", layout)
    with pytest.raises(ValueError, match=r"terminals is a virtual dataset with parts in .*data\.hdf5, /, which cannot be read"):
        open_mine(data)


@pytest.mark.parametrize("source", [[1, 2], ["recollected"] * 2, h5py.Empty("f"), "time"])
def test_an_attribute_of_another_kind_does_not_matter(data: Data, source: Any) -> None:
    data.write(table([20], terminal=[True], timeout=[False]))
    with h5py.File(data.path, "r+") as file:
        if source == "time":  # a type that numpy lacks
            h5py.h5a.create(file.id, b"source", h5py.h5t.UNIX_D32LE, h5py.h5s.create_simple((1,)))
        else:
            file.attrs["source"] = source
    info = lookup("mine", fetch(path=data.path, max_episode_steps=1000))
    assert load_recording(data.path, info, fetch(), data.path.with_name("arrays"))[1]["source"] == "file"


@pytest.mark.parametrize(
    ("key", "item", "message"),
    [
        ("rewards", h5py.Empty("f4"), "rewards is not a table of numbers with one row per step, but None float32"),
        ("rewards", h5py.h5t.UNIX_D64LE, "rewards is not a table of numbers .* of a type that numpy lacks"),
        ("actions", h5py.SoftLink("/actions"), r"actions cannot be read \(.*too many links\)\): replace the file"),
        ("actions", np.dtype("f8"), "lacks actions; it has observations, rewards, terminals, timeouts"),
    ],
)
def test_what_is_no_data_at_all_is_refused(data: Data, key: str, item: Any, message: str) -> None:
    data.write(table([20], terminal=[True], timeout=[False]) | {key: None})
    with h5py.File(data.path, "r+") as file:
        if isinstance(item, h5py.h5t.TypeID):
            h5py.h5d.create(file.id, key.encode(), item, h5py.h5s.create_simple((20,)))
        else:
            file[key] = item
    with pytest.raises(ValueError, match=message):
        open_mine(data)


@pytest.mark.parametrize("where", [b"TREE", b"HEAP", b"SNOD", b"actions\x00"])
def test_a_file_with_damaged_metadata_is_refused_in_one_sentence(data: Data, where: bytes) -> None:
    data.write(table([20], terminal=[True], timeout=[False]))
    content = data.path.read_bytes()
    data.path.write_bytes(content.replace(where, b"\x07" * len(where), 1))
    with pytest.raises(ValueError, match=r"data\.hdf5") as error:
        open_mine(data)
    assert str(error.value).isprintable()


@pytest.mark.parametrize("infos", [np.array([[b"no"]] * 20), np.zeros((20, 1), "c8"), np.zeros((20, 1, 1)), h5py.Empty("f4")])
def test_infos_that_are_no_numbers_are_left_alone(data: Data, infos: Any) -> None:
    _, report = data.load(
        table([20], terminal=[True], timeout=[False]) | {"infos/qpos": infos, "infos/qvel": np.zeros((20, 2))}
    )
    assert not any("infos" in warning for warning in report["warnings"])


def test_infos_that_are_not_finite_cause_no_warning(data: Data) -> None:
    positions = np.frombuffer(bytes.fromhex("0100807f") * 20, "<f4").reshape(20, 1)  # signalling NaNs
    columns = table([20], terminal=[True], timeout=[False])
    with warnings.catch_warnings(action="error"):
        _, report = data.load(columns | {"infos/qpos": positions, "infos/qvel": np.full((20, 2), np.inf)})
    assert any("infos/qpos and infos/qvel contradict observations in 100.0%" in warning for warning in report["warnings"])


def test_names_that_are_not_utf_8_are_listed(data: Data) -> None:
    data.write({"observations": np.zeros((5, 3))})
    with h5py.File(data.path, "r+") as file:
        h5py.h5d.create(file.id, b"caf\xe9\n", h5py.h5t.NATIVE_FLOAT, h5py.h5s.create_simple((5,)))
    with pytest.raises(ValueError, match=r"lacks actions and rewards and terminals; it has .*'caf\\ufffd\\n'") as error:
        open_mine(data)
    assert str(error.value).isprintable()


@pytest.mark.parametrize("has_column", [False, True])
def test_a_file_without_rewards_is_read_as_zeros(data: Data, has_column: bool) -> None:
    """Also one whose rewards mean nothing."""
    columns = table([20, 10], terminal=[True, False], timeout=[False, True])
    expected, _ = data.load(columns)
    if not has_column:
        del columns["rewards"]
    episodes, report = data.load(columns, reward="none")
    assert report["has_rewards"] is False and not episodes.rewards.any() and len(episodes.rewards) == 30
    for name in ("observations", "actions", "terminals", "offsets"):
        np.testing.assert_array_equal(getattr(episodes, name), getattr(expected, name))
    assert any("no rewards: its behaviour is imitated" in each for each in report["warnings"])


def test_a_missing_column_of_rewards_is_not_taken_for_imitation(data: Data) -> None:
    columns = table([20], terminal=[True], timeout=[False])
    del columns["rewards"]
    with pytest.raises(ValueError, match=r"lacks rewards; .*or set fetch\.reward to none: then the data is only imitated"):
        data.load(columns)
    with pytest.raises(ValueError, match=r"source 'file' takes no reward: remove `reward`"):
        data.load(columns, reward="score")
