"""The script that made the bundled dataset, and the dataset itself."""

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
from conftest import ROOT
from recordings import load_recording

from scripts.collect import collect
from tap.data.catalog import lookup
from tap.settings import load_params

BUNDLED = ROOT / "data/bundled/hopper-medium-replay.hdf5"


def test_collected_data_loads_as_episodes_and_is_reproducible(tmp_path: Path) -> None:
    def collected(name: str) -> Path:
        path = tmp_path / f"{name}.hdf5"
        provenance = collect(path, environment="Hopper-v4", at_least=150, at_most=250, medium_return=1e9, seed=3)
        assert provenance["transitions"] == 250
        assert json.loads(path.with_suffix(".json").read_text()) == provenance
        return path

    fetch = load_params(ROOT / "params.yaml", "hopper-medium-replay").fetch
    info = lookup("hopper-medium-replay", fetch)
    (first, report), (again, _) = (load_recording(collected(name), info, fetch, tmp_path / f"{name}-arrays") for name in "ab")
    assert report["transitions"] == 250 and report["boundaries"]["terminals"] > 3
    np.testing.assert_array_equal(first.observations, again.observations)
    np.testing.assert_array_equal(first.actions, again.actions)


def test_collection_stops_once_the_policy_is_medium(tmp_path: Path) -> None:
    path = tmp_path / "a.hdf5"
    provenance = collect(path, environment="Hopper-v4", at_least=10, at_most=2000, medium_return=-1e9, seed=0)
    assert provenance["finished_episodes"] == 19  # the last step of the twentieth stops training, and is not stored
    with h5py.File(path) as file:
        assert (np.abs(file["observations"][:]).sum(axis=1) > 0).all()


def test_the_bundled_dataset_matches_its_provenance(tmp_path: Path) -> None:
    provenance = json.loads(BUNDLED.with_suffix(".json").read_text())
    fetch = load_params(ROOT / "params.yaml", "hopper-medium-replay").fetch
    episodes, report = load_recording(BUNDLED, lookup("hopper-medium-replay", fetch), fetch, tmp_path)
    assert BUNDLED.stat().st_size <= 8_000_000
    assert report["transitions"] == provenance["transitions"] >= 60_000
    finished = episodes.returns[: provenance["finished_episodes"]]
    assert finished.mean() == pytest.approx(provenance["return"]["mean"], rel=1e-5)
    assert (np.abs(episodes.observations).sum(axis=1) > 0).all()
    assert report["boundaries"]["terminals"] > 0 and provenance["source"] == "bundled"
