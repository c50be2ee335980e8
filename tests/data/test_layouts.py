from pathlib import Path

import numpy as np
import pytest
from recordings import Data, fetch

from tap.data.catalog import lookup
from tap.data.hdf5 import open_table


def mistake_of(path: Path) -> str:
    info = lookup("mine", fetch(path=path, max_episode_steps=500))
    with pytest.raises(ValueError) as error, open_table(path, info):
        pass
    assert "\n" not in str(error.value) and len(str(error.value)) < 500
    return str(error.value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            [f"data/demo_{number}/{key}" for number in range(500) for key in ("actions", "obs/eef_pos")],
            "is in robomimic's layout",
        ),
        (
            ["episode_0/actions", "episode_0/observations/goal"],
            "is the main_data.hdf5 of a Minari dataset: set `source: minari`",
        ),
        (["action", "observations/qpos", "observations/images/top"], "is in ALOHA's layout, a file for each episode: convert"),
    ],
)
def test_an_hdf5_file_of_another_project_is_recognised(data: Data, keys: list[str], message: str) -> None:
    data.write({key: np.zeros((2, 3)) for key in keys})
    assert f"{data.path} {message}" in mistake_of(data.path)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("meta/info.json", "is a dataset of LeRobot: set `source: lerobot` beside its path"),
        ("data/metadata.json", "is a dataset of Minari: set `source: minari` beside its path"),
        ("1.0.0/dataset_info.json", "is an RLDS dataset (TensorFlow's records): convert it to LeRobot's layout"),
        (".zgroup", "is a Zarr store: write its arrays into an HDF5 file"),
        ("readme.txt", "is a folder: name an HDF5 file"),
    ],
)
def test_a_folder_of_another_project_is_recognised(tmp_path: Path, file: str, message: str) -> None:
    path = tmp_path / "dataset" / file
    path.parent.mkdir(parents=True)
    path.touch()
    assert f"dataset {message}" in mistake_of(tmp_path / "dataset")
