"""Regression data for `test_golden.py`: what small models compute, so that no refactoring changes a number unnoticed.

golden.safetensors holds, for the base model and each variant, inputs, weights and every quantity from tokens to a plan. It is
this project's own output: it shows that nothing has changed, not that anything is right. (published.safetensors beside it comes
from the published code; see `test_golden.py`.) If a number is meant to change, regenerate the file, and say in the commit which
numbers changed and why:

    PYTHONPATH=. python tests/golden/regenerate.py
"""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tap.data.windows import Layout, Normalizer
from tap.model.prior import Prior
from tap.model.vqvae import VQVAE
from tap.planning.policy import Policy
from tap.settings import FitParams, PlannerParams, TrainPriorParams, TrainVqvaeParams
from tap.training import make_optimizer

FILE = Path(__file__).parent / "golden.safetensors"
LAYOUT = Layout(observation_dim=4, action_dim=2)
TRANSFORMER = {"layers": 2, "width": 8, "heads": 2, "dropout": 0.0}
FIT = FitParams(
    updates=1, effective_share=1.0, batch_size=3, learning_rate=1e-2, schedule="constant", warmup_updates=0, ema_decay=0,
    weight_decay=0.1,
    betas=(0.9, 0.95), clip_norm=1, held_out=0, log_every=1, checkpoint_every=1,
)  # fmt: skip
TRAIN_VQVAE: dict[str, Any] = {
    "windows": {"length": 6, "discount": 0.9, "termination_penalty": None, "bootstrap_truncated": False, "normalize": True},
    "latent_step": 2,
    "bottleneck": "pool",
    "decoder": "conditional",
    "codebook": {"size": 6, "dim": 5, "decay": 0.9, "commitment_weight": 1.0, "dead_usage": 0.0},
    "transformer": TRANSFORMER,
    "loss_weights": {"observation": 1.0, "action": 5.0, "first_action": 1.0, "reward": 1.0, "return_to_go": 1.0},
    "fit": FIT,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "base": {},
    "latent_step_1": {"latent_step": 1},
    "latent_step_3": {"latent_step": 3},
    "unconditional": {"decoder": "unconditional"},
    "attention": {"bottleneck": "attention"},
}
PLANNER = PlannerParams(
    search="beam", horizon=6, beam_width=3, expansion_factor=2, samples=5, replacement=True, likelihood_weight=3.0,
    likelihood_threshold=0.2, partial_threshold=False, stop_at_end=False,
    likeliest_codes=32, temperature=0.5, actor=False,
)  # fmt: skip
SEARCHES: dict[str, dict[str, Any]] = {
    "beam": {},
    "beam_distinct": {"replacement": False},
    "beam_partial_threshold": {"partial_threshold": True},
    "beam_stop_at_end": {"stop_at_end": True},
    "prior_sampling": {"search": "prior_sampling"},
    "uniform_sampling": {"search": "uniform_sampling"},
}


def models(variant: str) -> tuple[VQVAE, Prior]:
    params = TrainVqvaeParams.model_validate(TRAIN_VQVAE | VARIANTS[variant])
    prior_params = TrainPriorParams.model_validate({"transformer": TRANSFORMER, "fit": FIT})
    return VQVAE(params, LAYOUT), Prior(prior_params, params, LAYOUT.observation_dim)


def given(variant: str) -> dict[str, Tensor]:
    """Newly sampled inputs and weights."""
    torch.manual_seed(0)
    vqvae, prior = models(variant)
    weights = {
        f"{name}.{key}": torch.randn_like(value) * 0.4
        for name, model in (("vqvae", vqvae), ("prior", prior))
        for key, value in model.state_dict().items()
    }
    tokens, valid = torch.randn(3, 6, LAYOUT.token_dim), torch.ones(3, 6, dtype=torch.bool)
    tokens[..., LAYOUT.end], valid[1, 4:] = 0, False
    tokens[1, 4:, LAYOUT.end] = 1
    # Code vectors are features of some windows, as at the start of training: of random ones, nearly all would be far from any.
    load(vqvae, "vqvae", weights)
    weights["vqvae.codebook.vectors_KD"] = vqvae.eval().features(tokens).detach().flatten(0, 1)[:6].clone()
    weights["vqvae.codebook.counts_K"] = torch.ones(6)
    weights["vqvae.codebook.sums_KD"] = weights["vqvae.codebook.vectors_KD"].clone()
    scale = {"mean": torch.randn(LAYOUT.transition_dim), "std": torch.rand(LAYOUT.transition_dim) + 0.5}
    return weights | scale | {"tokens": tokens, "valid": valid, "observations": torch.randn(2, LAYOUT.observation_dim)}


def load(model: torch.nn.Module, name: str, weights: dict[str, Tensor]) -> None:
    model.load_state_dict({key[len(name) + 1 :]: value for key, value in weights.items() if key.startswith(f"{name}.")})


def computed(variant: str, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every quantity, computed from inputs and weights."""
    vqvae, prior = models(variant)
    for name, model in (("vqvae", vqvae), ("prior", prior)):
        load(model.eval(), name, given)
    tokens, valid, state = given["tokens"], given["valid"], given["tokens"][:, 0, LAYOUT.observation]
    found = {"features": vqvae.features(tokens), "codes": vqvae.encode(tokens)}
    decoded, _ = vqvae.decode(found["codes"], state)
    found |= {"transitions": decoded.transitions_BTX, "end_logits": decoded.end_logits_BT}
    found |= {f"vqvae_loss.{name}": value for name, value in vqvae.loss(tokens, valid).items()}
    found["log_probabilities"] = prior.log_probabilities(found["codes"], state)

    normalizer = Normalizer(given["mean"].numpy(), given["std"].numpy())
    for name, changes in searches(variant).items():
        policy = Policy(vqvae, normalizer, prior, PLANNER.model_copy(update=changes), torch.device("cpu"))
        plan = policy.plan(given["observations"].numpy(), [torch.Generator().manual_seed(seed) for seed in (1, 2)])
        for quantity in ("codes", "actions", "predicted_return", "log_probability", "score"):
            found[f"plan.{name}.{quantity}"] = torch.from_numpy(np.ascontiguousarray(getattr(plan, quantity)))

    for name, model, loss in (
        ("vqvae", vqvae.train(), lambda: vqvae.loss(tokens, valid)["loss"]),
        ("prior", prior.train(), lambda: prior.loss(found["codes"], state)["loss"]),
    ):
        torch.manual_seed(0)  # attention masks codes at random
        optimizer, losses = make_optimizer(model, FIT), []
        for _ in range(4):
            optimizer.zero_grad()
            losses.append(loss())
            losses[-1].backward()
            optimizer.step()
        found[f"{name}_losses_in_training"] = torch.stack(losses)
    return {name: value.detach().contiguous() for name, value in found.items()}


def searches(variant: str) -> dict[str, dict[str, Any]]:
    """All searches that the variant supports: an attention bottleneck cannot decode partial plans, so no beam search."""
    return {name: changes for name, changes in SEARCHES.items() if variant != "attention" or "search" in changes}


def stored(variant: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The stored inputs and weights, and the stored quantities."""
    every = load_file(FILE)
    return tuple(
        {key.removeprefix(part): value for key, value in every.items() if key.startswith(part)}
        for part in (f"{variant}/given/", f"{variant}/computed/")
    )


def check_distinct(kept: dict[str, Tensor]) -> None:
    """Assert that the stored numbers differ between searches and between variants, or a mix-up of them would go unnoticed."""
    for one, other in (
        ("beam", "beam_distinct"),
        ("beam", "beam_stop_at_end"),
        ("prior_sampling", "uniform_sampling"),
    ):
        scores = [kept[f"base/computed/plan.{search}.score"] for search in (one, other)]
        assert not torch.equal(*scores), f"{one} and {other} give the same scores: change weights or params"
    for variant in VARIANTS:
        assert len(kept[f"{variant}/computed/codes"].unique()) >= 3, f"{variant} encodes to fewer than 3 codes"
    for one, other in itertools.combinations(VARIANTS, 2):
        actions = [kept[f"{variant}/computed/plan.prior_sampling.actions"] for variant in (one, other)]
        assert not torch.equal(*actions), f"{one} and {other} give the same actions: change weights or params"


if __name__ == "__main__":
    kept = {}
    for variant in VARIANTS:
        inputs = given(variant)
        kept |= {f"{variant}/given/{key}": value for key, value in inputs.items()}
        kept |= {f"{variant}/computed/{key}": value for key, value in computed(variant, inputs).items()}
    check_distinct(kept)
    save_file(kept, FILE)
