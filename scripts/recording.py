"""Writes collected data in D4RL's layout, with its provenance."""

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from tap.files import write_atomically, write_json


def episode_returns(rewards: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Undiscounted return of each finished episode, from rewards (N,) and the flags `ends` (N,) of last rows."""
    pieces = np.split(rewards, np.flatnonzero(ends) + 1)
    return np.array([piece.sum() for piece in pieces[: int(ends.sum())]])


def describe_returns(returns: np.ndarray) -> dict[str, float]:
    """Mean, min and max of the returns, for the provenance."""
    return {"mean": float(returns.mean()), "min": float(returns.min()), "max": float(returns.max())}


def write_recording(out: Path, columns: Mapping[str, np.ndarray], provenance: dict[str, Any]) -> None:
    """Write columns (N, ...) to the HDF5 file `out`, and the provenance to its attributes and to a .json file beside it."""
    with io.BytesIO() as buffer:
        with h5py.File(buffer, "w") as file:
            for name, values in columns.items():
                file.create_dataset(name, data=values, compression="gzip", compression_opts=9, shuffle=True)
            file.attrs.update(
                {key: value if isinstance(value, str) else json.dumps(value) for key, value in provenance.items()}
            )
        write_atomically(out, buffer.getvalue())
    write_json(out.with_suffix(".json"), provenance)
