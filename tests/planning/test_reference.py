"""The fast planner against the plain one: the same plan from the same noise."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tap.data.windows import Layout, Normalizer
from tap.model.prior import Prior
from tap.model.vqvae import VQVAE
from tap.planning import reference
from tap.planning.policy import Policy
from tap.settings import load_params

CHOICES: list[dict[str, Any]] = [
    {"replacement": False},
    {"replacement": False, "beam_width": 150},  # 600 distinct first codes of 512
    {"partial_threshold": True},
    {"stop_at_end": True},
    {"horizon": 3},
    {"expansion_factor": 1},
]
LAYOUTS = {"hopper": Layout(11, 3), "antmaze": Layout(31, 8), "pen": Layout(45, 24)}


def paper_policy(write_params: Callable[..., Path], task: str, **planner: Any) -> Policy:
    """A policy of the paper's size with random weights; `layers` and `width` of its Transformers as given."""
    transformer = {name: planner.pop(name) for name in ("layers", "width") if name in planner}
    stage = {"transformer": transformer} if transformer else {}
    overrides = {"train_vqvae": stage, "train_prior": stage, "evaluate": {"planner": planner}}
    params = load_params(write_params(datasets={task: overrides}), task, scale="paper")
    torch.manual_seed(0)
    layout = LAYOUTS[task]
    vqvae, prior = VQVAE(params.train_vqvae, layout), Prior(params.train_prior, params.train_vqvae, layout.observation_dim)
    with torch.no_grad():
        for parameter in (*vqvae.to_token.parameters(), *prior.to_logits.parameters(), *prior.embed_code.parameters()):
            parameter.mul_(20)  # like trained models, prefer some codes and predict different returns
    vqvae.codebook.vectors_KD.normal_()
    rng = np.random.default_rng(0)
    normalizer = Normalizer(
        rng.normal(size=layout.transition_dim).astype(np.float32),
        rng.uniform(0.5, 2, layout.transition_dim).astype(np.float32),
    )
    return Policy(vqvae.eval(), normalizer, prior.eval(), params.evaluate.planner, torch.device("cpu"))


def check(policy: Policy, states: int) -> None:
    observations = np.random.default_rng(1).normal(size=(states, policy.observation_dim)).astype(np.float32)
    fast = policy.plan(observations, generators(states))
    plain = reference.plan(policy.planner, torch.from_numpy(observations), generators(states))
    np.testing.assert_array_equal(fast.codes, plain.codes)
    for name in ("score", "predicted_return", "log_probability", "observations", "actions", "rewards", "returns_to_go"):
        np.testing.assert_allclose(getattr(fast, name), getattr(plain, name), rtol=1e-4, atol=1e-3, err_msg=name)


def generators(count: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in range(count)]


@pytest.mark.parametrize("task", LAYOUTS)
def test_beam_search_finds_the_plain_planners_plan(params_yaml_with: Callable[..., Path], task: str) -> None:
    check(paper_policy(params_yaml_with, task, layers=1, width=32), states=2)


@pytest.mark.parametrize("search", ["prior_sampling", "uniform_sampling"])
def test_sampling_finds_the_plain_planners_plan(params_yaml_with: Callable[..., Path], search: str) -> None:
    check(paper_policy(params_yaml_with, "hopper", layers=1, width=32, search=search, samples=200), states=2)


@pytest.mark.parametrize("choice", CHOICES)
def test_the_planners_agree_whatever_the_params(params_yaml_with: Callable[..., Path], choice: dict[str, Any]) -> None:
    check(paper_policy(params_yaml_with, "hopper", layers=2, width=32, **choice), states=2)


def test_the_planners_agree_at_the_papers_locomotion_size(params_yaml_with: Callable[..., Path]) -> None:
    check(paper_policy(params_yaml_with, "hopper"), states=1)
