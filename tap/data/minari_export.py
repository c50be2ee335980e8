"""Writing a recording as a Minari dataset, in the HDF5 layout that tap/data/minari.py describes."""

import json
import re
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from tap.data.episodes import Episodes
from tap.data.recording import Recording
from tap.files import atomic_file, write_json

LAYOUT = "0.5.4"  # the release of minari that writes this layout
NAMESPACE = "tap"


def export_to_minari(recording: Recording, cache: Path) -> str:
    """Write the episodes that `Recording.save` writes into Minari's cache; returns the dataset's id.

    Minari has an observation after an episode's last action. It is not recorded here: the last one is repeated.
    Raises ValueError if the dataset is there already, and as `Recording.episodes` does.
    """
    version = "" if re.search(r"-v\d+$", recording.info.id) else "-v0"  # without one, Minari cannot list its datasets
    name = f"{NAMESPACE}/{recording.info.id}{version}"
    folder = cache / name
    if (folder / "data/metadata.json").exists():
        raise ValueError(f"{folder} exists: remove it to export the dataset again")
    lengths, low_high = recording.boundaries.lengths, recording.action_bounds
    observed = np.full(recording.table.observation_dim, np.inf, np.float32)
    with atomic_file(folder / "data/main_data.hdf5") as stream, h5py.File(stream, "w", track_order=True) as file:
        index = 0
        for part in recording.episodes():
            for each in range(part.num_episodes):
                _write_episode(file.create_group(f"episode_{index}"), index, part.select([each]))
                index += 1
    # Written last: without it, there is no dataset.
    metadata = {
        "dataset_id": name,
        "minari_version": LAYOUT,
        "data_format": "hdf5",
        "jpeg_encoding": False,
        "total_episodes": len(lengths),
        "total_steps": int(lengths.sum()),
        "dataset_size": round((folder / "data/main_data.hdf5").stat().st_size / 1e6, 1),  # MB
        "observation_space": json.dumps(_box(-observed, observed)),
        "action_space": json.dumps(_box(*low_high)),
        "has_rewards": recording.table.facts.has_rewards,
        "description": "Exported by TAP. The last observation of an episode repeats the one before.",
    }
    namespace = folder.parent / "namespace_metadata.json"
    if not namespace.exists():
        write_json(namespace, {})
    write_json(folder / "data/metadata.json", metadata)
    return name


def _write_episode(group: h5py.Group, index: int, episode: Episodes) -> None:
    steps = len(episode.rewards)
    last = np.arange(steps) == steps - 1
    group.attrs.update({"id": index, "total_steps": steps})
    group["observations"] = np.concatenate([episode.observations, episode.observations[-1:]])
    group["actions"], group["rewards"] = episode.actions, episode.rewards
    group["terminations"], group["truncations"] = episode.terminals, last & ~episode.terminals


def _box(low: np.ndarray, high: np.ndarray) -> dict[str, Any]:
    """A gymnasium Box of float32, as Minari describes it."""
    return {"type": "Box", "dtype": "float32", "shape": list(low.shape), "low": low.tolist(), "high": high.tolist()}
