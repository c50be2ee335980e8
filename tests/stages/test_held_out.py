"""Training where no episode is held out: the dataset has one, or `fit.held_out` is 0."""

import csv
from pathlib import Path
from typing import Any

import h5py
import yaml
from conftest import copy_project, metrics, run, tiny_tree


def test_training_without_held_out_episodes_says_so(tmp_path: Path) -> None:
    copy_project(tmp_path, {"mine": tiny_tree()}, seeds=[0], ablate={"datasets": [], "planners": [], "models": []})
    everything = tmp_path / "my-hopper.hdf5"
    with h5py.File(everything, "r+") as file:
        rows = {key: file[key][:25] for key in file}  # the first episode
        for key, values in rows.items():
            del file[key]
            file[key] = values
    said = run(tmp_path, "dvc", "repro", "train_critic@mine-0").stdout
    assert "mine: note: it has one episode: none can be held out from training" in said
    for stage in ("train_vqvae", "train_critic"):
        assert f"{stage} mine-0: no episode is held out (the dataset has one), so there is no held-out loss" in said
        check_metrics(tmp_path, stage)

    params: dict[str, Any] = yaml.safe_load((tmp_path / "params.yaml").read_text())
    params["datasets"]["mine"]["train_bc"]["fit"]["held_out"] = 0
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(params))
    said = run(tmp_path, "dvc", "repro", "train_methods@mine-0-bc").stdout
    assert "train_bc mine-0: no episode is held out (fit.held_out is 0), so there is no held-out loss" in said
    check_metrics(tmp_path, "train_bc")


def check_metrics(project: Path, stage: str) -> None:
    """Neither the metrics nor the curves have a held-out loss, and none of their values is missing."""
    (values,) = metrics(project, stage).values()
    assert "held_out_loss" not in values and None not in values.values()
    with (project / f"data/plots/{stage}/mine-0.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows and all("held_out_loss" not in row and all(row.values()) for row in rows)
