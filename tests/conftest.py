"""Small real things that several test files use: params, episodes, a policy with random weights."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import yaml
from recordings import Data

from tap.data.catalog import DatasetInfo
from tap.data.episodes import Episodes
from tap.data.windows import Layout, fit_normalizer
from tap.model.prior import Prior
from tap.model.vqvae import VQVAE
from tap.planning.policy import Policy
from tap.settings import Params, load_params

ROOT = Path(__file__).parent.parent

EPISODE_LENGTHS = [25, 3, 40, 12, 60, 8, 31, 22, 17, 45, 5, 30]  # of copy_project's dataset
IDENTITY = ("-c", "user.name=test", "-c", "user.email=test@localhost")  # of a commit

torch.set_num_threads(1)  # tests run side by side


@pytest.fixture
def extra_data() -> Path:
    """A folder with the original door-human-v0 file and published policies; what needs it is skipped where it is absent."""
    folder = Path(os.environ.get("TAP_EXTRA_DATA", ROOT.parent / "shared/data"))
    if not (folder / "door-human-v0.hdf5").exists():
        pytest.skip("TAP_EXTRA_DATA names no folder with door-human-v0.hdf5")
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Data:
    return Data(tmp_path)


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    """Prefect with a temporary server; tests that use it say `xdist_group("flow")`, to share one."""
    from prefect.testing.utilities import prefect_test_harness  # slow to load

    with prefect_test_harness(server_startup_timeout=120):
        yield


def tiny_tree() -> dict[str, Any]:
    """Overrides that make a model which trains in a second: windows of 6 steps, codes of 3, 8 codes."""
    transformer = {"layers": 1, "width": 16, "heads": 2, "dropout": 0.1}
    fit = {"updates": 20, "batch_size": 16, "warmup_updates": 0, "log_every": 5, "checkpoint_every": 10}
    trajectories = {
        "windows": {"length": 5},
        "bins": 8,
        "transformer": transformer,
        "fit": fit,
        "search": {"horizon": 3, "beam_width": 4, "context": 2},
    }
    return {
        "train_vqvae": {"windows": {"length": 6}, "codebook": {"size": 8, "dim": 4}, "transformer": transformer, "fit": fit},
        "train_prior": {"transformer": transformer, "fit": fit},
        "train_critic": {"members": 5, "width": 16, "fit": fit},
        "train_actor": {"members": 2, "width": 16, "fit": fit},
        "train_bc": {"network": {"layers": 1, "width": 8}, "fit": fit | {"warmup_updates": 2}},
        "train_bc_10": {"network": {"layers": 1, "width": 8}, "fit": fit | {"warmup_updates": 2}},
        "train_reflex": {"network": {"layers": 1, "width": 8}, "fit": fit | {"warmup_updates": 2}},
        "train_iql": {"network": {"layers": 1, "width": 8}, "fit": fit},
        "train_cql": {"network": {"layers": 1, "width": 8}, "imitating_updates": 12, "fit": fit},
        "train_tt": trajectories,
        "train_tt_q": trajectories | {"critic": {"network": {"layers": 1, "width": 8}, "fit": fit}},
        "train_dt": {"context": 4, "transformer": transformer, "fit": fit},
        "train_mopo": {
            "network": {"layers": 1, "width": 8},
            "dynamics": {"network": {"layers": 1, "width": 8}, "members": 3, "elites": 2, "updates": 20},
            "kept_updates": 5,
            "fit": fit,
        },
        "evaluate": {
            "episodes": 2,
            "planner": {"search": "beam", "actor": False, "horizon": 6, "beam_width": 4, "expansion_factor": 2, "samples": 16},
        },
    }


@pytest.fixture
def tiny_params(params_yaml_with: Callable[..., Path]) -> Params:
    return load_params(params_yaml_with(datasets={"hopper-tiny": tiny_tree()}), "hopper-tiny", scale="cpu")


def custom_dataset(name: str, environment: str, max_episode_steps: int) -> DatasetInfo:
    """A dataset of one's own, without reference scores."""
    return DatasetInfo(name, "custom", "file", None, None, environment, max_episode_steps, None, None)


def random_episodes(lengths: list[int], observation_dim: int, action_dim: int, seed: int = 0) -> Episodes:
    """Episodes of noise; every second one ends in a terminal."""
    rng, rows = np.random.default_rng(seed), sum(lengths)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    terminals = np.zeros(rows, bool)
    terminals[offsets[1::2] - 1] = True
    return Episodes(
        rng.normal(size=(rows, observation_dim)).astype(np.float32),
        rng.uniform(-1, 1, (rows, action_dim)).astype(np.float32),
        rng.normal(size=rows).astype(np.float32),
        terminals,
        offsets,
    )


@pytest.fixture
def tiny_policy(tiny_params: Params) -> Policy:
    """See `make_tiny_policy`."""
    return make_tiny_policy(tiny_params)


def make_tiny_policy(params: Params) -> Policy:
    """A policy for Hopper's dimensions with random weights, large enough that plans differ."""
    torch.manual_seed(0)
    episodes = random_episodes([30, 5, 40], observation_dim=11, action_dim=3)
    vqvae = VQVAE(params.train_vqvae, Layout(11, 3))
    prior = Prior(params.train_prior, params.train_vqvae, observation_dim=11)
    with torch.no_grad():
        for parameter in (*vqvae.parameters(), *prior.parameters()):
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    vqvae.codebook.vectors_KD.normal_()
    normalizer = fit_normalizer(episodes, params.train_vqvae.windows)
    return Policy(vqvae.eval(), normalizer, prior.eval(), params.evaluate.planner, torch.device("cpu"))


@pytest.fixture
def tiny_policy_folder(tiny_policy: Policy, tmp_path: Path) -> Path:
    tiny_policy.save(tmp_path / "policy")
    return tmp_path / "policy"


@pytest.fixture
def params_yaml_with(tmp_path: Path) -> Callable[..., Path]:
    """Writes the project's params.yaml with other datasets and with changes to its top level."""

    def write(*datasets: str, **changes: Any) -> Path:
        content = yaml.safe_load((ROOT / "params.yaml").read_text())
        if datasets:
            content["datasets"] = {dataset: {} for dataset in datasets}
        if datasets or "datasets" in changes:
            content["ablate"] = {"datasets": [], "planners": [], "models": []}
        path = tmp_path / "params.yaml"
        path.write_text(yaml.safe_dump(content | changes))
        return path

    return write


def copy_project(folder: Path, datasets: dict[str, dict[str, Any]], **changes: Any) -> None:
    """Fill `folder` with a copy of the project in git: its `datasets`, each with overrides, are a random policy's on Hopper.

    `changes` are made to the top level of params.yaml.
    """
    files = (".dvc/config", ".dvcignore", ".gitignore", "README.md", "dvc.yaml", "prefect.yaml", "pyproject.toml")
    for name in ("tap", "pipelines", "data/bundled", *files):
        source, target = ROOT / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    facts = {"environment": "Hopper-v4", "max_episode_steps": 100, "reference_min_score": 0.0, "reference_max_score": 100.0}
    fetch = {"source": "file", "path": "my-hopper.hdf5"} | facts
    content = yaml.safe_load((ROOT / "params.yaml").read_text())
    content |= {"datasets": {name: {"fetch": fetch} | overrides for name, overrides in datasets.items()}} | changes
    (folder / "params.yaml").write_text(yaml.safe_dump(content))
    _write_dataset(folder / "my-hopper.hdf5")
    run(folder, "git", "init", "-q")
    run(folder, "git", "add", "-A")
    run(folder, "git", *IDENTITY, "commit", "-qm", "tiny")


def _write_dataset(path: Path) -> None:
    rng, rows = np.random.default_rng(0), sum(EPISODE_LENGTHS)
    terminals = np.zeros(rows, bool)
    terminals[np.cumsum(EPISODE_LENGTHS) - 1] = True
    with h5py.File(path, "w") as file:
        file["observations"] = rng.normal(size=(rows, 11))
        file["actions"] = rng.uniform(-1, 1, (rows, 3))
        file["rewards"] = rng.normal(1, 0.1, rows)
        file["terminals"] = terminals
        file["timeouts"] = np.zeros(rows, bool)


def run(folder: Path, *command: str, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    settings = {
        "PATH": path,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(folder),
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
    }
    result = subprocess.run(
        command, cwd=folder, env=os.environ | settings | environment, capture_output=True, text=True, timeout=600
    )
    assert not check or result.returncode == 0, result.stdout + result.stderr
    return result


def metrics(folder: Path, stage: str = "evaluate") -> dict[str, Any]:
    """All metrics of a stage by file name, less what is of this machine's speed or names a run."""
    found = {}
    for file in sorted((folder / "data/metrics" / stage).glob("*.json")):
        content = json.loads(file.read_text())
        found[file.name] = {
            key: value
            for key, value in content.items()
            if key not in ("latency_ms", "runs", "training_minutes", "model_digest")
        }
    return found


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project at tiny scale, with one dataset; its VQ-VAE has averaged weights, its prior the last ones."""
    folder = tmp_path_factory.mktemp("pipeline")
    ablate = {"datasets": ["my-hopper"], "planners": ["no-search"], "models": ["unconditional"]}
    tree = tiny_tree()
    averaged = {"schedule": "cosine", "warmup_updates": 5, "ema_decay": 0.9}
    tree["train_vqvae"] |= {"fit": tree["train_vqvae"]["fit"] | averaged, "loss_weights": {"first_action": 10.0}}
    copy_project(folder, {"my-hopper": tree}, seeds=[3], ablate=ablate)
    return folder


@pytest.fixture(scope="session")
def reproduced(project: Path) -> Path:
    run(project, "dvc", "repro")
    return project
