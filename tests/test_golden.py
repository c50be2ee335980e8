"""Models and planner against stored numbers.

published.safetensors is independent of this project: random weights, and what the published code (ZhengyaoJiang/latentplan at
commit c096a5c, MIT licence; numbers only, no code) computes from them, stored under this project's parameter names.

golden.safetensors is this project's own output (see `golden/regenerate.py`). It only shows that nothing has changed.
"""

from pathlib import Path

import pytest
import torch
from golden import regenerate
from safetensors.torch import load_file

from tap.data.windows import Layout, Normalizer
from tap.model.prior import Prior
from tap.model.vqvae import VQVAE
from tap.planning.planner import Planner
from tap.settings import TrainPriorParams, TrainVqvaeParams

PUBLISHED = Path(__file__).parent / "golden/published.safetensors"


def published_models(weights: dict[str, torch.Tensor]) -> tuple[VQVAE, Prior]:
    transformer = {"layers": 2, "width": 32, "heads": 4, "dropout": 0.0}
    sizes = {
        "windows": {**regenerate.TRAIN_VQVAE["windows"], "length": 6, "discount": 0.99},
        "latent_step": 3,
        "codebook": {**regenerate.TRAIN_VQVAE["codebook"], "size": 16, "dim": 12},
        "transformer": transformer,
    }
    params = TrainVqvaeParams.model_validate(regenerate.TRAIN_VQVAE | sizes)
    prior_params = TrainPriorParams.model_validate({"transformer": transformer, "fit": regenerate.FIT})
    vqvae, prior = VQVAE(params, Layout(observation_dim=5, action_dim=2)), Prior(prior_params, params, observation_dim=5)
    for name, model in (("vqvae", vqvae), ("prior", prior)):
        regenerate.load(model.eval(), name, weights)
    return vqvae, prior


@torch.no_grad()
def test_the_published_codes_numbers() -> None:
    """Codes, decoded steps, the prior's log probabilities and predicted returns of 16 normalised windows."""
    published = load_file(PUBLISHED)
    vqvae, prior = published_models(published)
    layout, windows, codes = vqvae.layout, published["windows"], published["codes"]
    state = windows[:, 0, layout.observation]
    assert torch.equal(vqvae.encode(windows), codes)

    steps, _ = vqvae.decode(codes, state)
    decoded = torch.cat([steps.transitions_BTX, steps.end_logits_BT.sigmoid()[..., None]], dim=-1)
    torch.testing.assert_close(decoded, published["decoded"], rtol=0, atol=1e-5)

    start = torch.full((len(codes), 1), prior.start)
    log_probabilities, _ = prior(torch.cat([start, codes[:, :-1]], dim=1), state)
    torch.testing.assert_close(log_probabilities, published["log_probabilities"], rtol=0, atol=1e-5)

    params = regenerate.PLANNER.model_copy(update={"likelihood_weight": 0.0})
    planner = Planner(vqvae, prior, Normalizer.identity(layout.transition_dim), params)
    found, score = planner.objective(steps, prior.log_probabilities(codes, state).sum(dim=1), num_codes=2)
    torch.testing.assert_close(found, published["predicted_return"], rtol=0, atol=1e-5)
    torch.testing.assert_close(score, found)


@pytest.mark.parametrize("variant", regenerate.VARIANTS)
def test_every_number_is_still_the_same(variant: str) -> None:
    inputs, expected = regenerate.stored(variant)
    found = regenerate.computed(variant, inputs)
    assert set(found) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
