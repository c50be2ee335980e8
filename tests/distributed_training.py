"""Trains a tiny VQ-VAE, a prior and a critic, in as many processes as torchrun starts; used by test_distributed.py.

Example: python -m torch.distributed.run --nproc-per-node=2 tests/distributed_training.py OUT
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from conftest import make_tiny_policy, random_episodes, tiny_tree
from torch import Tensor

from benchmarks.sizes import params_of
from tap.data.sampling import WindowSampler
from tap.data.windows import Windows, fit_normalizer
from tap.distributed import process_group, rank, world_size
from tap.model.actor import Actor, member_shares
from tap.model.critic import Critic, sample_episodes
from tap.training import fit


def train(out: Path) -> dict[str, Any]:
    """What this process has after training: weights and history of all models, and each batch's number of padded steps."""
    tree = tiny_tree()
    for stage in ("train_vqvae", "train_prior", "train_critic", "train_actor"):
        # Processes differ in what they sample at random: masks of dropout, and vectors that replace dead codes.
        if "transformer" in tree[stage]:
            tree[stage]["transformer"] = tree[stage]["transformer"] | {"dropout": 0.0}
        tree[stage]["fit"] = tree[stage]["fit"] | {"updates": 12, "log_every": 4, "checkpoint_every": 12}
    tree["train_vqvae"]["codebook"] |= {"dead_usage": 0.0}
    tree["train_vqvae"]["fit"] |= {"schedule": "cosine", "warmup_updates": 3, "ema_decay": 0.5}
    params = params_of("hopper", "cpu", **tree)
    training, held_out = random_episodes([9, 3, 20, 4, 13, 2], 11, 3), random_episodes([11, 2, 6], 11, 3, seed=1)
    normalizer, device = fit_normalizer(training, params.train_vqvae.windows), torch.device("cpu")
    windows = [Windows(episodes, params.train_vqvae.windows, normalizer, device) for episodes in (training, held_out)]
    policy = make_tiny_policy(params)
    vqvae, prior = policy.vqvae, policy.prior
    with torch.no_grad():  # code vectors near the features, so that several codes are used
        vqvae.codebook.vectors_KD.copy_(vqvae.features(windows[0].gather(torch.arange(4))[0]).flatten(0, 1))
    vqvae.codebook.sums_KD.copy_(vqvae.codebook.vectors_KD)
    vqvae.codebook.counts_K.fill_(1.0)
    padding: list[int] = []

    def vqvae_loss(starts: Tensor, is_held_out: bool) -> dict[str, Tensor]:
        tokens, valid = windows[is_held_out].gather(starts)
        padding.append(int((~valid).sum()))
        return vqvae.loss(tokens, valid)

    def prior_loss(starts: Tensor, is_held_out: bool) -> dict[str, Tensor]:
        codes = vqvae.encode(windows[is_held_out].gather(starts)[0])
        return prior.loss(codes, windows[is_held_out].transitions_NX[starts, vqvae.layout.observation])

    def refit_codebook() -> None:
        starts = torch.arange(len(windows[0]))[rank() :: world_size()]
        vqvae.codebook.refit([vqvae.features(windows[0].gather(starts)[0])])

    critic = Critic(params.train_critic, vqvae)
    seen = sample_episodes(params.train_critic, 6, torch.Generator().manual_seed(0))

    def critic_loss(starts: Tensor, is_held_out: bool) -> dict[str, Tensor]:
        at = windows[is_held_out]
        codes, states = vqvae.encode(at.gather(starts)[0])[:, 0], at.transitions_NX[starts, vqvae.layout.observation]
        trained = torch.ones(5, len(starts), dtype=torch.bool) if is_held_out else seen[:, at.episodes_of(starts)]
        return critic.loss(states, codes, at.transitions_NX[starts, vqvae.layout.return_to_go], trained)

    actor = Actor(params.train_actor, vqvae.layout)

    def actor_loss(starts: Tensor, is_held_out: bool) -> dict[str, Tensor]:
        steps = windows[is_held_out].transitions_NX[starts]
        of_layout = steps[:, vqvae.layout.observation], steps[:, vqvae.layout.action]
        return actor.held_out_loss(*of_layout) if is_held_out else actor.loss(*of_layout)

    sample = WindowSampler(np.array([len(windows[0])]))

    def actor_sample(count: int, generator: torch.Generator) -> Tensor:
        return member_shares(sample(count, generator), actor.params.members, world_size())

    found: dict[str, Any] = {"padding": padding}
    for name, model, loss, draw in (
        ("vqvae", vqvae, vqvae_loss, sample), ("prior", prior, prior_loss, sample), ("critic", critic, critic_loss, sample),
        ("actor", actor, actor_loss, actor_sample),
    ):  # fmt: skip
        found[name] = {
            "history": fit(
                model, loss, getattr(params, f"train_{name}").fit, sample=draw,
                num_held_out=len(windows[1]), seed=0, device=device,
                checkpoint=out.with_name(f"{out.name}.{name}"), log=lambda *_: None, description=name,
                refit=refit_codebook if name == "vqvae" else lambda: None,
            ),
            "weights": model.state_dict(),
        }  # fmt: skip
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    with process_group():
        out = Path(sys.argv[1])
        torch.save(train(out), f"{out}.{rank()}")
