"""Dataset files made at random, valid ones and damaged ones, and a plain reader to compare with.

A file begins as a valid table in D4RL's layout. Changes of its structure are then made by h5py, and of its bytes by hand.
"""

import itertools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from hypothesis import strategies as st

ROWS = st.lists(st.integers(1, 12), min_size=1, max_size=4)  # of each episode
KEYS = ("observations", "actions", "rewards", "terminals", "timeouts", "next_observations")
Change = Callable[[h5py.File, str, np.random.Generator], None]


@dataclass(frozen=True)
class Case:
    """How to make one file."""

    dataset: str  # an id, which selects the suite's rules
    lengths: list[int]
    optional: list[str]  # the optional keys that it has
    limit: int  # max_episode_steps
    seed: int  # of the values
    changes: list[tuple[str, str]]  # of the structure: the name of the change, and the key
    damages: list[tuple[str, float, int]]  # of the bytes: the kind, where as a share of the size, and how

    @property
    def valid(self) -> bool:
        """Whether the file must be read."""
        return not self.damages and self.limit >= sum(self.lengths) and all(change in HARMLESS for change, _ in self.changes)


def cases() -> st.SearchStrategy[Case]:
    """Half of the files are changed in their structure, a quarter is damaged in its bytes, and a quarter is valid."""
    any_change = st.tuples(st.sampled_from(sorted(CHANGES)), st.sampled_from((*KEYS, "infos/goal", "infos/qpos", "infos/qvel")))
    harmless = st.tuples(st.sampled_from(sorted(HARMLESS)), st.sampled_from(KEYS))
    damage = st.tuples(st.sampled_from(sorted(DAMAGES)), st.floats(0, 1, exclude_max=True), st.integers(0, 255))
    changed = st.tuples(st.lists(any_change, min_size=1, max_size=3), st.just([]))
    damaged = st.tuples(st.lists(any_change, max_size=1), st.lists(damage, min_size=1, max_size=6))
    whole = st.tuples(st.lists(harmless, max_size=3), st.just([]))
    return st.builds(
        lambda how, **facts: Case(changes=how[0], damages=how[1], **facts),
        st.one_of(changed, changed, damaged, whole),
        dataset=st.sampled_from(["mine", "mine", "ant-medium-v2", "door-human-v0", "antmaze-umaze-v2"]),
        lengths=ROWS,
        optional=st.lists(st.sampled_from(["timeouts", "next_observations", "infos"]), unique=True),
        limit=st.sampled_from([1000, 1000, 5]),
        seed=st.integers(0, 2**32 - 1),
    )


def write(case: Case, path: Path) -> None:
    """Make the file, and what it links to, in an empty folder."""
    rng = np.random.default_rng(case.seed)
    with h5py.File(path, "w") as file:
        for key, values in table(case, rng).items():
            file[key] = values
        # What HDF5 cannot read without a crash comes last.
        for change, key in sorted(case.changes, key=lambda made: made[0] == "virtual of itself"):
            with suppress(KeyError, ValueError, TypeError, OSError, RuntimeError, AttributeError, MemoryError):
                CHANGES[change](file, key, rng)  # an earlier change may have removed what this one needs
    content = bytearray(path.read_bytes())
    for kind, where, how in case.damages:
        content = DAMAGES[kind](content, int(where * len(content)), how)
    if case.damages:
        path.write_bytes(content)


def table(case: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """The columns of a valid file."""
    rows, last = sum(case.lengths), np.cumsum(case.lengths) - 1
    dim = 29 if case.dataset.startswith("antmaze") else int(rng.integers(1, 6))
    starts = np.repeat(10.0 * np.arange(len(case.lengths)), case.lengths)
    columns = {
        "observations": starts[:, None] + rng.uniform(-0.1, 0.1, (rows, dim)),
        "actions": rng.uniform(-1, 1, (rows, int(rng.integers(1, 4)))),
        "rewards": rng.normal(size=rows),
        "terminals": np.zeros(rows, bool),
    }
    ended = rng.random(len(last)) < 0.5
    columns["terminals"][last] = ended
    if "timeouts" in case.optional:
        columns["timeouts"] = np.zeros(rows, bool)
        columns["timeouts"][last] = ~ended
    if "next_observations" in case.optional:
        columns["next_observations"] = np.roll(columns["observations"], -1, axis=0)
        columns["next_observations"][last] += 1
    if case.dataset.startswith("antmaze"):
        columns["infos/goal"] = rng.uniform(0, 1, (rows, 2))
        columns["rewards"] = np.zeros(rows)
    if "infos" in case.optional:
        columns["infos/qpos"], columns["infos/qvel"] = columns["observations"][:, :1], columns["observations"][:, 1:]
    return {key: values if values.dtype == bool else values.astype(np.float32) for key, values in columns.items()}


# ---------------------------------------------------------------- changes of the structure


def _replace(file: h5py.File, key: str, **options: Any) -> None:
    if options.get("data") is None and "shape" not in options:
        options["data"] = file[key][()]
    del file[key]
    file.create_dataset(key, **options)


def _cast(dtype: Any) -> Change:
    def cast(file: h5py.File, key: str, rng: np.random.Generator) -> None:
        with np.errstate(all="ignore"):
            _replace(file, key, data=file[key][()].astype(dtype))

    return cast


def _stored(**options: Any) -> Change:
    return lambda file, key, rng: _replace(file, key, **options)


def _filled(dtype: Any, **options: Any) -> Change:
    """A column of the same length and another type, with the values that the type has at first."""
    return lambda file, key, rng: _replace(file, key, shape=(len(file[key]),), dtype=dtype, **options)


def _shaped(shape: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Change:
    return lambda file, key, rng: _replace(file, key, data=np.resize(file[key][()], shape(file[key].shape)))


def _with_value(value: float, dtype: Any = np.float64) -> Change:
    def put(file: h5py.File, key: str, rng: np.random.Generator) -> None:
        values = file[key][()].astype(dtype)
        values[rng.integers(len(values))] = value
        _replace(file, key, data=values)

    return put


def _of_low_level(make: Callable[[], h5py.h5t.TypeID]) -> Change:
    """A column of a type that only HDF5's own interface can make."""

    def put(file: h5py.File, key: str, rng: np.random.Generator) -> None:
        space = h5py.h5s.create_simple(file[key].shape)
        del file[key]
        h5py.h5d.create(file.id, key.encode(), make(), space)

    return put


def _float_of_24_bits() -> h5py.h5t.TypeID:
    kind = h5py.h5t.IEEE_F32LE.copy()
    kind.set_fields(23, 15, 8, 0, 15)
    kind.set_size(3)
    return kind


def _integer_of_12_bits() -> h5py.h5t.TypeID:
    kind = h5py.h5t.STD_I16LE.copy()
    kind.set_precision(12)
    return kind


def _claim(rows: int, chunks: Any, keys: tuple[str, ...] = ()) -> Change:
    """Columns that claim many rows and store none."""

    def put(file: h5py.File, key: str, rng: np.random.Generator) -> None:
        for each in keys or (key,):
            if each in file:
                shape = (rows, *file[each].shape[1:])
                _replace(file, each, shape=shape, dtype=file[each].dtype, chunks=chunks and (1024, *shape[1:]))

    return put


def _partly_written(file: h5py.File, key: str, rng: np.random.Generator) -> None:
    values = file[key][()]
    _replace(file, key, shape=values.shape, dtype=values.dtype, chunks=(1, *values.shape[1:]))
    file[key][: len(values) // 2] = values[: len(values) // 2]


def _virtual(source: str, name: str | None = None, missing: int = 0) -> Change:
    def put(file: h5py.File, key: str, rng: np.random.Generator) -> None:
        values = file[key][()]
        layout = h5py.VirtualLayout(values.shape, values.dtype)
        if source != "." or name:
            layout[missing:] = h5py.VirtualSource(source, name or key, values.shape)[missing:]
        if source != ".":
            with h5py.File(Path(file.filename).with_name(source), "a") as other:
                other[key] = values
        elif name is None:
            file.move(key, f"{key}_source")
            layout[missing:] = h5py.VirtualSource(".", f"{key}_source", values.shape)[missing:]
        if key in file:
            del file[key]
        file.create_virtual_dataset(key, layout)

    return put


def _virtual_of_itself(file: h5py.File, key: str, rng: np.random.Generator) -> None:
    layout = h5py.VirtualLayout(file[key].shape, file[key].dtype)
    layout[:] = h5py.VirtualSource(".", key, file[key].shape)
    del file[key]
    file.create_virtual_dataset(key, layout)


def _external(file: h5py.File, key: str, rng: np.random.Generator) -> None:
    values = file[key][()]
    del file[key]
    file.create_dataset(key, values.shape, values.dtype, external=[("raw.bin", 0, values.nbytes)])


def _link(make: Callable[[str], Any]) -> Change:
    def put(file: h5py.File, key: str, rng: np.random.Generator) -> None:
        del file[key]
        file[key] = make(key)

    return put


def _elsewhere(link: Callable[[str], Any]) -> Change:
    """The column has another name, to which its own name links."""

    def put(file: h5py.File, key: str, rng: np.random.Generator) -> None:
        file.move(key, f"elsewhere/{key}")
        file[key] = link(f"/elsewhere/{key}")

    return put


def _in_another_file(file: h5py.File, key: str, rng: np.random.Generator) -> None:
    with h5py.File(Path(file.filename).with_name("other.hdf5"), "a") as other:
        other[key] = file[key][()]
    del file[key]
    file[key] = h5py.ExternalLink("other.hdf5", key)


def _hard_link(file: h5py.File, key: str, rng: np.random.Generator) -> None:
    del file[key]
    file[key] = file[str(rng.choice(KEYS[:4]))]


def _group(file: h5py.File, key: str, rng: np.random.Generator) -> None:
    values = file[key][()]
    del file[key]
    file[f"{key}/{rng.choice(['data', key, '0'])}"] = values


def _below_a_group(file: h5py.File, key: str, rng: np.random.Generator) -> None:
    for each in list(file):
        file.move(each, f"data/{each}")


def _attribute(value: Any) -> Change:
    def put(file: h5py.File, key: str, rng: np.random.Generator) -> None:
        file.attrs["source"] = value

    return put


def _attribute_of_low_level_type(file: h5py.File, key: str, rng: np.random.Generator) -> None:
    space = h5py.h5s.create_simple((1,))
    h5py.h5a.create(file.id, b"source", h5py.h5t.UNIX_D32LE, space)


def _cycle(file: h5py.File, key: str, rng: np.random.Generator) -> None:
    file["loop"] = file["/"]
    file["metadata/again"] = file["/"]


def _metadata(file: h5py.File, key: str, rng: np.random.Generator) -> None:
    file["metadata/algorithm"], file["metadata/policy/weight"] = "SAC", np.zeros((3, 3))
    file[key].attrs["unit"] = "m/s"
    file.attrs["recorded"] = [2020, 1, 2]


def _empty(file: h5py.File, key: str, rng: np.random.Generator) -> None:
    kind = file[key].dtype
    del file[key]
    file[key] = h5py.Empty(kind)


def _named_type(file: h5py.File, key: str, rng: np.random.Generator) -> None:
    del file[key]
    file[key] = np.dtype("f8")


def _filter_unknown(file: h5py.File, key: str, rng: np.random.Generator) -> None:
    shape = file[key].shape
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_chunk(shape)
    plist.set_filter(32015, h5py.h5z.FLAG_OPTIONAL, (3,))
    del file[key]
    h5py.h5d.create(file.id, key.encode(), h5py.h5t.NATIVE_FLOAT, h5py.h5s.create_simple(shape), plist)


PAIR = np.dtype([("x", "f4"), ("y", "f4")])
NUMBERS = ["f2", "f4", "f8", ">f2", ">f4", ">f8", "i1", "i2", "i4", "i8", ">i2", ">i8", "u1", "u4", "u8", ">u8", "?", "g"]
# After these, a file is still valid.
HARMLESS: dict[str, Change] = {f"cast to {dtype}": _cast(dtype) for dtype in NUMBERS} | {
    "chunked": _stored(chunks=True),
    "compressed": _stored(chunks=True, compression="gzip", shuffle=True),
    "compressed with lzf": _stored(chunks=True, compression="lzf", fletcher32=True),
    "resizable": lambda file, key, rng: _replace(file, key, data=file[key][()], maxshape=(None, *file[key].shape[1:])),
    "soft link": _elsewhere(h5py.SoftLink),
    "in another file": _in_another_file,
    "virtual": _virtual("."),
    "virtual of another file": _virtual("other.hdf5"),
    "metadata": _metadata,
    "cycle": _cycle,
    "attribute recollected": _attribute("recollected"),
}
TYPES = {
    **{"str": h5py.string_dtype(), "ascii": h5py.string_dtype("ascii", 4), "list": h5py.vlen_dtype("f4")},
    **{"pair": PAIR, "void": "V3", "array": ("f4", (2,)), "reference": h5py.ref_dtype, "region": h5py.regionref_dtype},
    **{"enum": h5py.enum_dtype({"no": 0, "yes": 1}, "i1"), "enum of 2 and 5": h5py.enum_dtype({"a": 2, "b": 5}, "i4")},
}
LOW_LEVEL_TYPES: dict[str, Callable[[], h5py.h5t.TypeID]] = {
    **{"time": h5py.h5t.UNIX_D64LE.copy, "bits": h5py.h5t.STD_B8LE.copy},
    **{"float of 24 bits": _float_of_24_bits, "integer of 12 bits": _integer_of_12_bits},
}
SHAPES: dict[str, Callable[[tuple[int, ...]], tuple[int, ...]]] = {
    "scalar": lambda shape: (),
    "no rows": lambda shape: (0, *shape[1:]),
    "one row": lambda shape: (1, *shape[1:]),
    "no columns": lambda shape: (shape[0], 0),
    "one column": lambda shape: (shape[0], 1),
    "transposed": lambda shape: shape[::-1],
    "3-d": lambda shape: (*shape, 2),
    "3-d of one": lambda shape: (*shape, 1),
    "row short": lambda shape: (shape[0] - 1, *shape[1:]),
    "7 columns": lambda shape: (shape[0], 7),
}
VALUES = [np.nan, np.inf, -np.inf, 1e300, 3.4028235e38, 3.4028236e38, -0.0, 1e-40, 1e-300, 2.0, 0.5, -1.0]
ROUNDED = [2**62 + 2**38, 16777217]  # by float32
CHANGES: dict[str, Change] = {
    **HARMLESS,
    **{f"cast to {dtype}": _cast(dtype) for dtype in ("c8", "c16", "S8")},
    **{f"of type {name}": _filled(dtype) for name, dtype in TYPES.items()},
    **{f"of type {name}": _of_low_level(make) for name, make in LOW_LEVEL_TYPES.items()},
    **{f"of shape {name}": _shaped(shape) for name, shape in SHAPES.items()},
    **{f"with {value}": _with_value(value) for value in VALUES},
    **{f"with {value} as {dtype}": _with_value(value, dtype) for value in ROUNDED for dtype in ("i8", ">i8", "u8", ">u8")},
    "missing": lambda file, key, rng: file.pop(key),
    "renamed": lambda file, key, rng: file.move(key, key.upper()),
    "a group": _group,
    "all below a group": _below_a_group,
    "empty": _empty,
    "a named type": _named_type,
    "external": _external,
    "scaled": _stored(chunks=True, scaleoffset=2),
    "filled with nan": lambda file, key, rng: _replace(file, key, shape=file[key].shape, dtype="f4", fillvalue=np.nan),
    "partly written": _partly_written,
    "claims 10^12 rows": _claim(10**12, None),
    "claims 10^12 rows in chunks": _claim(10**12, True),
    "all claim 10^8 rows": _claim(10**8, None, KEYS),
    "all claim 10^12 rows": _claim(10**12, None, KEYS),
    "all claim 10^12 rows in chunks": _claim(10**12, True, KEYS),
    "unknown filter": _filter_unknown,
    "virtual of itself": _virtual_of_itself,
    "virtual of a group": _virtual(".", "/"),
    "virtual of nothing": _virtual(".", "nothing"),
    "virtual with a gap": _virtual("other.hdf5", missing=1),
    "hard link to another": _hard_link,
    "soft link to nothing": _link(lambda key: h5py.SoftLink("/nothing")),
    "soft link to itself": _link(lambda key: h5py.SoftLink(f"/{key}")),
    "soft link to the root": _link(lambda key: h5py.SoftLink("/")),
    "link to no file": _link(lambda key: h5py.ExternalLink("nothing.hdf5", key)),
    "link to a folder": _link(lambda key: h5py.ExternalLink("/", key)),
    "link to a device": _link(lambda key: h5py.ExternalLink("/dev/zero", key)),
    "link to its own file": _link(lambda key: h5py.ExternalLink("data.hdf5", key)),
    "link to another's nothing": _link(lambda key: h5py.ExternalLink("other.hdf5", "/nothing")),
    "attribute of numbers": _attribute([1, 2]),
    "attribute of words": _attribute(["recollected", "recollected"]),
    "attribute empty": _attribute(h5py.Empty("f")),
    "attribute of bytes": _attribute(np.bytes_(b"\xff\xfe")),
    "attribute of an odd type": _attribute_of_low_level_type,
}

# ---------------------------------------------------------------- changes of the bytes


def _put(content: bytearray, place: int, part: bytes) -> bytearray:
    return content[:place] + part + content[place + len(part) :]


# Metadata lies in the first kilobytes and is smaller than the values, so it has damages of its own.
DAMAGES: dict[str, Callable[[bytearray, int, int], bytearray]] = {
    "truncate": lambda content, place, how: content[:place],
    "extend": lambda content, place, how: content + bytes([how]) * 1000,
    "set a byte": lambda content, place, how: _put(content, place, bytes([how])),
    "flip a bit": lambda content, place, how: _flip(content, place, how),
    "flip a bit of the first 2048": lambda content, place, how: _flip(content, place % 2048, how),
    "set 8 bytes": lambda content, place, how: _put(content, place, bytes([how]) * 8),
    "set 8 bytes of the first 2048": lambda content, place, how: _put(content, place % 2048, bytes([how]) * 8),
    "zero a block": lambda content, place, how: _put(content, place, bytes(4 * how)),
    "copy a block": lambda content, place, how: _put(content, place, bytes(content[how * 8 : how * 16])),
    "insert": lambda content, place, how: content[:place] + bytes(how) + content[place:],
    "cut out": lambda content, place, how: content[:place] + content[place + how :],
}


def _flip(content: bytearray, place: int, how: int) -> bytearray:
    return _put(content, place, bytes([content[place] ^ (1 << how % 8)])) if place < len(content) else content


# ---------------------------------------------------------------- the plain reader


def plain_episodes(path: Path, limit: int) -> list[dict[str, np.ndarray]]:
    """The episodes of a file of one's own, read in the plainest way, row by row. Raises where h5py or numpy do."""
    columns = {}
    with h5py.File(path) as file, np.errstate(over="ignore"):
        for key in KEYS:
            if key in KEYS[:4] or isinstance(file.get(key), h5py.Dataset):
                values = np.asarray(file[key][()], np.float32)
                columns[key] = values.reshape(len(values), -1)
    rows, after = len(columns["observations"]), columns.get("next_observations")
    assert all(len(values) == rows for values in columns.values())
    assert all(np.isfinite(values).all() for key, values in columns.items() if key != "next_observations")
    assert after is None or np.isfinite(after[:-1]).all()  # that of the last row is not needed
    flags = [columns[key][:, 0] for key in ("terminals", "timeouts") if key in columns]
    assert all(set(flag) <= {0.0, 1.0} for flag in flags)
    ends = []
    for row in range(rows):
        end = row == rows - 1 or any(flag[row] == 1 for flag in flags)
        if not end and after is not None:
            pairs = zip(after[row].astype(float), columns["observations"][row + 1].astype(float), strict=True)
            end = not all(abs(stated - found) <= 1e-4 + 1e-4 * abs(found) for stated, found in pairs)
        if end:
            ends.append(row + 1)
    episodes = []
    for start, end in itertools.pairwise([0, *ends]):
        terminals = np.zeros(end - start, bool)
        terminals[-1] = columns["terminals"][end - 1, 0] == 1 and end - start < limit
        episode = {key: columns[key][start:end] for key in ("observations", "actions")}
        episodes.append(episode | {"rewards": columns["rewards"][start:end, 0], "terminals": terminals})
    return episodes
