"""Small real things that several test files use: params, episodes, a policy with random weights."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from tap.datasets import DatasetInfo, Episodes
from tap.policy import Policy
from tap.prior import Prior
from tap.settings import Params, load_params
from tap.vqvae import VQVAE
from tap.windows import Layout, fit_normalizer

ROOT = Path(__file__).parent.parent

torch.set_num_threads(1)  # tests run side by side


@pytest.fixture
def extra_data() -> Path:
    """A folder with the original door-human-v0 file and published policies; what needs it is skipped where it is absent."""
    folder = Path(os.environ.get("TAP_EXTRA_DATA", ROOT.parent / "shared/data"))
    if not (folder / "door-human-v0.hdf5").exists():
        pytest.skip("TAP_EXTRA_DATA names no folder with door-human-v0.hdf5")
    return folder


def tiny_tree() -> dict[str, Any]:
    """Overrides that make a model which trains in a second: windows of 6 steps, codes of 3, 8 codes."""
    transformer = {"layers": 1, "width": 16, "heads": 2, "dropout": 0.1}
    fit = {"updates": 20, "batch_size": 16, "log_every": 5, "checkpoint_every": 10}
    return {
        "train_vqvae": {"windows": {"length": 6}, "codebook": {"size": 8, "dim": 4}, "transformer": transformer, "fit": fit},
        "train_prior": {"transformer": transformer, "fit": fit},
        "evaluate": {"episodes": 2, "planner": {"horizon": 6, "beam_width": 4, "expansion_factor": 2, "samples": 16}},
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
