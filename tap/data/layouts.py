"""Layouts that are recognised where D4RL's is expected, and what to do with each."""

from collections.abc import Iterable
from pathlib import Path

# By what a folder contains.
FOLDERS = {
    "meta/info.json": "a dataset of LeRobot: set `source: lerobot` beside its path",
    "data/metadata.json": "a dataset of Minari: set `source: minari` beside its path",
    "dataset_info.json": "an RLDS dataset (TensorFlow's records): convert it to LeRobot's layout, and set `source: lerobot`",
    "*/dataset_info.json": "an RLDS dataset (TensorFlow's records): convert it to LeRobot's layout, and set `source: lerobot`",
    ".zgroup": "a Zarr store: write its arrays into an HDF5 file",
    "zarr.json": "a Zarr store: write its arrays into an HDF5 file",
}
# By how a key of an HDF5 file begins.
KEYS = {
    "data/demo_": "is in robomimic's layout, a group for each demonstration: join the demonstrations' rows, and those of the "
    "observations that you need, to one table for each key, as docs/your-data.md describes",
    "episode_0/": "is the main_data.hdf5 of a Minari dataset: set `source: minari`, and the path to the folder with `data`",
    "observations/qpos": "is in ALOHA's layout, a file for each episode: convert it to LeRobot's, and set `source: lerobot`",
}


def layout_of_folder(path: Path) -> str | None:
    """What a folder is, and what to do; None if it is not recognised."""
    return next((what for pattern, what in FOLDERS.items() if any(path.glob(pattern))), None)


def layout_of_keys(keys: Iterable[str]) -> str | None:
    """What an HDF5 file with these keys is, and what to do; None if it is not recognised."""
    listed = list(keys)
    return next((what for start, what in KEYS.items() if any(key.startswith(start) for key in listed)), None)
