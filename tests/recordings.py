"""Small HDF5 files in D4RL's layout, and what is read from them."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np

from tap.data.catalog import DatasetInfo, lookup
from tap.data.episodes import Episodes
from tap.data.recording import open_recording
from tap.data.validation import validate
from tap.settings import FetchParams


def load_recording(path: Path, info: DatasetInfo, params: FetchParams, folder: Path) -> tuple[Episodes, dict[str, Any]]:
    """A file's episodes, by way of the arrays that fetch writes into `folder`, and its validation report."""
    with open_recording(path, info, params) as recording:
        report = validate(recording).as_json()
        recording.save(folder)
    return Episodes.load(folder), report


def read_recording(path: Path, info: DatasetInfo, params: FetchParams) -> tuple[Episodes, dict[str, Any]]:
    """As `load_recording`, but without writing arrays, which waits for the disk."""
    with open_recording(path, info, params) as recording:
        report, parts = validate(recording).as_json(), list(recording.chunks())
    names = ("observations", "actions", "rewards", "terminals")
    joined = (np.concatenate([getattr(part, name) for part in parts]) for name in names)
    return Episodes(*joined, np.cumsum([0, *(length for part in parts for length in part.lengths)])), report


def fetch(**changes: Any) -> FetchParams:
    return FetchParams(**({"clip_actions": False, "max_jump": None} | changes))


def walk(rng: np.random.Generator, length: int, start: np.ndarray) -> np.ndarray:
    """A trajectory of small steps (length, O), each dimension within 0.01 a step."""
    return start + np.cumsum(rng.uniform(-0.01, 0.01, (length, len(start))), axis=0)


def table(lengths: list[int], terminal: list[bool], timeout: list[bool], dim: int = 3, seed: int = 0) -> dict[str, Any]:
    """Columns of smooth episodes that start far from each other, each with the given flags on its last row."""
    rng, rows = np.random.default_rng(seed), sum(lengths)
    last = np.cumsum(lengths) - 1
    flags = {"terminals": np.zeros(rows, bool), "timeouts": np.zeros(rows, bool)}
    flags["terminals"][last], flags["timeouts"][last] = terminal, timeout
    starts = rng.permutation(len(lengths))[:, None] * 10.0 + rng.uniform(0, 1, (len(lengths), dim))
    return {
        "observations": np.concatenate([walk(rng, n, s) for n, s in zip(lengths, starts, strict=True)]).astype(np.float32),
        "actions": rng.uniform(-1, 1, (rows, 2)).astype(np.float32),
        "rewards": rng.normal(size=rows).astype(np.float32),
        **flags,
    }


def antmaze(lengths: list[int], timeout: list[bool], apart: float = 20.0) -> dict[str, Any]:
    """Columns of ants that run 0.3 m a step and start `apart` from where the last one stopped; each episode has its goal."""
    rng, rows = np.random.default_rng(0), sum(lengths)
    columns = table(lengths, terminal=[False] * len(lengths), timeout=timeout, dim=29)
    step = np.full(rows, 0.3)
    step[np.cumsum(lengths)[:-1]] = apart
    columns["observations"][:, 0], columns["observations"][:, 1] = np.cumsum(step), 0.0
    columns["observations"][:, 15:] = rng.normal(scale=10, size=(rows, 14))  # velocities jump too
    columns["infos/goal"] = np.repeat(rng.uniform(0, 0.3, (len(lengths), 2)), lengths, axis=0).astype(np.float32)
    columns["rewards"] = np.zeros(rows, np.float32)
    return columns


def adroit(lengths: list[int], seed: int = 0) -> dict[str, Any]:
    """Columns of a hand that moves smoothly, with a dimension that flips, and starts each episode somewhere else."""
    columns = table(lengths, terminal=[False] * len(lengths), timeout=[False] * len(lengths), dim=20, seed=seed)
    columns["observations"][:, 3] = np.where(np.random.default_rng(seed).random(sum(lengths)) < 0.02, 1.0, -1.0)
    return columns


class Data:
    """Writes one HDF5 file and reads it back."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "data.hdf5"

    def write(self, columns: dict[str, Any]) -> None:
        with h5py.File(self.path, "w") as file:
            for key, values in columns.items():
                if values is not None:
                    file[key] = values

    def load(self, columns: dict[str, Any], dataset: str = "mine", **changes: Any) -> tuple[Episodes, dict[str, Any]]:
        self.write(columns)
        params = self.params(dataset, **changes)
        return load_recording(self.path, lookup(dataset, params), params, self.path.with_name("arrays"))

    def cut(self, columns: dict[str, Any], dataset: str = "mine", **changes: Any) -> tuple[Episodes, dict[str, Any]]:
        """As `load`, but without writing arrays, which waits for the disk: for many small files."""
        self.write(columns)
        params = self.params(dataset, **changes)
        with open_recording(self.path, lookup(dataset, params), params) as recording:
            (episodes,) = recording.chunks()
            return episodes, validate(recording).as_json()

    def params(self, dataset: str, **changes: Any) -> FetchParams:
        return fetch(**({"path": self.path, "max_episode_steps": 1000 if dataset == "mine" else None} | changes))
