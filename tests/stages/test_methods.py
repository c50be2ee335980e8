"""Every method in the pipeline: trained, evaluated and registered; a training that is killed ends in the same weights."""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import copy_project, metrics, run, tiny_tree

from tap.files import sha256
from tap.methods.catalog import CATALOG
from tap.settings import METHODS, Method

pytestmark = pytest.mark.xdist_group("methods")

HERE = [method for method in METHODS if not CATALOG[method].extra or find_spec("torchrl")]  # that can be trained here


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project in which dataset `mine` was fetched."""
    folder = tmp_path_factory.mktemp("methods")
    copy_project(folder, {"mine": tiny_tree()}, seeds=[0], methods=HERE, ablate={"datasets": [], "planners": [], "models": []})
    run(folder, "dvc", "repro", "-q", "fetch@mine")
    return folder


@pytest.mark.parametrize("method", HERE)
def test_a_method_is_evaluated_and_a_killed_training_ends_in_the_same_weights(project: Path, method: Method) -> None:
    run(project, "dvc", "repro", f"methods@mine-0-{method}")
    result = metrics(project, "methods")[f"mine-0-{method}.json"]
    assert (result["method"], len(result["returns"])) == (method, 2) and "planner" not in result

    weights = sorted((project / f"data/{method}/mine-0").glob("*.safetensors"))
    expected = list(map(sha256, weights)), metrics(project, f"train_{method}")
    shutil.rmtree(project / ".checkpoints")
    environment = os.environ | {"PYTHONPATH": str(project), "OMP_NUM_THREADS": "1"}
    environment["MLFLOW_TRACKING_URI"] = f"sqlite:///{project}/mlflow.db"
    command = [sys.executable, "-m", "pipelines.stages.train_methods", "mine", "0", method]
    process = subprocess.Popen(command, cwd=project, env=environment)
    while not list((project / ".checkpoints").glob(f"train_{method}-mine-0-*/checkpoint.pt")):
        assert process.poll() is None, "the stage ended before its first checkpoint was seen"
    process.kill()
    process.wait()
    run(project, *command)
    assert (list(map(sha256, weights)), metrics(project, f"train_{method}")) == expected
