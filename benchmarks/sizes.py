"""What the benchmarks measure: task dimensions, params at a scale, policies with random weights, windows of random data."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from tap.data.episodes import Episodes
from tap.data.windows import Layout, Normalizer, Windows
from tap.methods.discretizer import Discretizer
from tap.methods.trajectory_transformer import TrajectoryTransformer
from tap.model.actor import Actor
from tap.model.critic import Critic
from tap.model.prior import Prior
from tap.model.vqvae import VQVAE
from tap.planning.policy import Policy
from tap.settings import Params, Scale, load_params

# Observations and actions of D4RL's tasks: 14, 23, 35, 39 and 69 numbers, two more with reward and return-to-go.
LAYOUTS = {
    "hopper": Layout(11, 3),
    "halfcheetah": Layout(17, 6),
    "ant": Layout(27, 8),
    "antmaze": Layout(31, 8),
    "pen": Layout(45, 24),
}


def params_of(task: str, scale: Scale, **overrides: Any) -> Params:
    """The params of a dataset of `task` at `scale`, with `overrides` by stage, as under `datasets` in params.yaml."""
    content = yaml.safe_load(Path("params.yaml").read_text())
    content |= {"datasets": {task: overrides}, "ablate": {"datasets": [], "planners": [], "models": []}}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "params.yaml"
        path.write_text(yaml.safe_dump(content))
        return load_params(path, task, scale=scale)


def random_policy(params: Params, layout: Layout, device: torch.device) -> Policy:
    """A policy with random weights, in evaluation mode."""
    torch.manual_seed(0)
    vqvae = VQVAE(params.train_vqvae, layout)
    vqvae.codebook.vectors_KD.normal_()
    prior = Prior(params.train_prior, params.train_vqvae, layout.observation_dim)
    normalizer = Normalizer.fit([np.random.default_rng(0).normal(size=(1000, layout.transition_dim)).astype(np.float32)])
    vqvae, prior = vqvae.to(device).eval(), prior.to(device).eval()
    critic = Critic(params.train_critic, vqvae).to(device).eval()
    critic.held_out_error = 1.0
    actor = Actor(params.train_actor, layout).to(device).eval()
    return Policy(vqvae, normalizer, prior, params.evaluate.planner, device, critic, actor)


def random_trajectory_transformer(params: Params, layout: Layout, device: torch.device) -> TrajectoryTransformer:
    """The same of the method tt."""
    assert params.train_tt
    torch.manual_seed(0)
    rows = np.random.default_rng(0).normal(size=(1000, layout.transition_dim)).astype(np.float32)
    policy = TrajectoryTransformer(params.train_tt, layout, Normalizer.fit([rows]))
    policy.discretizer = Discretizer.fit(torch.from_numpy(rows), params.train_tt.bins, params.train_tt.binning)
    return policy.to(device).eval()


def random_observations(count: int, layout: Layout) -> np.ndarray:
    """(count, O)."""
    return np.random.default_rng(0).normal(size=(count, layout.observation_dim)).astype(np.float32)


def random_windows(params: Params, layout: Layout, device: torch.device) -> Windows:
    """Windows of 20 episodes of 1000 steps."""
    rng, rows = np.random.default_rng(0), 20_000
    episodes = Episodes(
        rng.normal(size=(rows, layout.observation_dim)).astype(np.float32),
        rng.uniform(-1, 1, (rows, layout.action_dim)).astype(np.float32),
        rng.normal(size=rows).astype(np.float32),
        np.zeros(rows, bool),
        np.arange(0, rows + 1, 1000),
    )
    return Windows(episodes, params.train_vqvae.windows, Normalizer.identity(layout.transition_dim), device)
