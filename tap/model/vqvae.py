"""The state-conditional VQ-VAE: windows to codes, codes and a state back to transitions (paper, section 3.2).

Shapes: B batch, T window steps, L latent step, M codes (= T / L), K codebook size, D code dimension, O observation,
X transition, F token, E width.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from tap.data.windows import Layout, Normalizer, Windows
from tap.distributed import all_reduce_sum
from tap.model.bottleneck import Attention, PoolAndTile
from tap.model.codebook import Codebook, count
from tap.model.serialization import load_description, load_weights, save_model
from tap.model.transformer import Transformer, initialize
from tap.settings import Section, TrainVqvaeParams

ENCODED_AT_ONCE = 1024  # windows


@dataclass(frozen=True)
class Decoded:
    """Predicted steps: normalised transitions (B, T, X), and logits (B, T) of the end flag (1 past the episode's end)."""

    transitions_BTX: Tensor
    end_logits_BT: Tensor

    @classmethod
    def empty(cls, batch: int, layout: Layout, device: torch.device) -> Self:
        """No steps (T = 0)."""
        return cls(torch.empty(batch, 0, layout.transition_dim, device=device), torch.empty(batch, 0, device=device))

    def rows(self, rows: Tensor) -> Self:
        """The batch entries at `rows`, which may repeat."""
        return replace(self, transitions_BTX=self.transitions_BTX[rows], end_logits_BT=self.end_logits_BT[rows])

    def append(self, later: Self) -> Self:
        """These steps, then those of `later`."""
        return replace(
            self,
            transitions_BTX=torch.cat([self.transitions_BTX, later.transitions_BTX], dim=1),
            end_logits_BT=torch.cat([self.end_logits_BT, later.end_logits_BT], dim=1),
        )


class VQVAE(nn.Module):
    """Encoder, codebook and decoder over normalised tokens."""

    def __init__(self, params: TrainVqvaeParams, layout: Layout) -> None:
        super().__init__()
        self.params, self.layout = params, layout
        width, dim, length = params.transformer.width, params.codebook.dim, params.windows.length
        self.embed_token = nn.Linear(layout.token_dim, width)
        self.encoder = Transformer(params.transformer, length)
        self.bottleneck = (
            PoolAndTile(params.latent_step)
            if params.bottleneck == "pool"
            else Attention(params.transformer, params.latent_step, length)
        )
        self.to_code = nn.Linear(width, dim)
        self.codebook = Codebook(params.codebook)
        self.from_code = nn.Linear(layout.observation_dim + dim, width)
        self.decoder = Transformer(params.transformer, length)
        self.decoder_norm = nn.LayerNorm(width)
        self.to_token = nn.Linear(width, layout.token_dim)
        for linear in (self.embed_token, self.to_code, self.from_code, self.to_token):
            initialize(linear)
        weights_TX = torch.empty(length, layout.transition_dim)
        weights_TX[:, layout.observation] = params.loss_weights.observation
        weights_TX[:, layout.action] = params.loss_weights.action
        weights_TX[0, layout.action] *= params.loss_weights.first_action
        weights_TX[:, layout.reward] = params.loss_weights.reward
        weights_TX[:, layout.return_to_go] = params.loss_weights.return_to_go
        self.register_buffer("weights_TX", weights_TX, persistent=False)
        self.weights_TX: Tensor

    def features(self, tokens_BTF: Tensor) -> Tensor:
        """The encoder's outputs, before quantisation: (B, T, F) -> (B, M, D)."""
        x_BTE, _ = self.encoder(self.embed_token(tokens_BTF))
        vectors_BMD: Tensor = self.to_code(self.bottleneck.compress(x_BTE))
        return vectors_BMD

    def encode(self, tokens_BTF: Tensor) -> Tensor:
        """The codes (B, M) of windows (B, T, F)."""
        return self.codebook.assign(self.features(tokens_BTF))

    def decode(self, codes_BM: Tensor, observation_BO: Tensor, past: Tensor | None = None) -> tuple[Decoded, list[Tensor]]:
        """Decode `codes_BM` from the normalised first state `observation_BO` to M * L steps; also returns keys and values.

        With the `past` (keys and values) of earlier codes, `codes_BM` are the codes after them, and only their steps are
        computed. An attention bottleneck needs all codes at once.
        """
        return self._decode_vectors(self.codebook.vectors_KD[codes_BM], observation_BO, past)

    def _decode_vectors(self, vectors_BMD: Tensor, observation_BO: Tensor, past: Tensor | None) -> tuple[Decoded, list[Tensor]]:
        assert past is None or self.params.bottleneck == "pool"
        if self.params.decoder == "unconditional":  # the codes alone must encode where the window begins
            observation_BO = torch.zeros_like(observation_BO)
        state_BMO = observation_BO[:, None].expand(-1, vectors_BMD.shape[1], -1)
        x_BME = self.from_code(torch.cat([state_BMO, vectors_BMD], dim=-1))
        x_BTE, keys_values = self.decoder(self.bottleneck.expand(x_BME), past)
        tokens_BTF = self.to_token(self.decoder_norm(x_BTE)).float()
        offset_BX = functional.pad(observation_BO, (0, self.layout.transition_dim - self.layout.observation_dim))
        transitions_BTX = tokens_BTF[..., self.layout.transition] + offset_BX[:, None]
        return Decoded(transitions_BTX, tokens_BTF[..., self.layout.end]), keys_values

    def loss(self, tokens_BTF: Tensor, valid_BT: Tensor) -> dict[str, Tensor]:
        """This process's share of the loss over the global batch, under "loss", and of its parts: sum them over processes.

        Squared errors are averaged over the valid steps of all processes; end flag and commitment over all steps and codes,
        padding included, because plans may run past an episode's end. `Codebook.forward` computes the commitment. "code_counts"
        (K,) is how often each code was used.
        """
        layout, target_BTX = self.layout, tokens_BTF[..., self.layout.transition]
        vectors_BMD, codes_BM, commitment_BM = self.codebook(self.features(tokens_BTF))
        decoded, _ = self._decode_vectors(vectors_BMD, tokens_BTF[:, 0, layout.observation], None)
        error_BTX = (decoded.transitions_BTX - target_BTX).square() * valid_BT[..., None]
        every_step = torch.full((), valid_BT.numel(), device=valid_BT.device)
        steps, every_step = all_reduce_sum(torch.stack([valid_BT.sum(), every_step]))
        reconstruction = (error_BTX * self.weights_TX).mean(dim=-1).sum() / steps
        end = functional.binary_cross_entropy_with_logits(decoded.end_logits_BT, tokens_BTF[..., layout.end], reduction="sum")
        end = end / every_step
        commitment = commitment_BM.sum() * self.params.latent_step / every_step
        error_X = error_BTX.detach().sum(dim=(0, 1)) / steps
        return {
            "loss": reconstruction + end + self.params.codebook.commitment_weight * commitment,
            "observation": error_X[layout.observation].mean(),
            "action": error_X[layout.action].mean(),
            "reward": error_X[layout.reward],
            "return_to_go": error_X[layout.return_to_go],
            "end": end.detach(),
            "commitment": commitment.detach(),
            "code_counts": count(codes_BM.flatten(), self.params.codebook.size),
        }


@torch.no_grad()
def encode_windows(vqvae: VQVAE, windows: Windows, starts_B: Tensor | None = None) -> Tensor:
    """The codes (B, M) of the windows that start at rows `starts_B`, or of all windows; int32."""
    if starts_B is None:
        starts_B = torch.arange(len(windows), device=windows.transitions_NX.device)
    with torch.autocast(starts_B.device.type, enabled=False):
        chunks = starts_B.split(ENCODED_AT_ONCE)  # type: ignore[no-untyped-call]
        return torch.cat([vqvae.encode(windows.gather(chunk)[0]).int() for chunk in chunks])


class VqvaeDescription(Section):
    """vqvae.json."""

    params: TrainVqvaeParams
    layout: Layout
    normalizer: dict[str, list[float] | None]


def save_vqvae(folder: Path, vqvae: VQVAE, normalizer: Normalizer) -> None:
    """Write vqvae.safetensors, and vqvae.json with params, dimensions and the Normalizer."""
    layout = {"observation_dim": vqvae.layout.observation_dim, "action_dim": vqvae.layout.action_dim}
    description = {"params": vqvae.params.model_dump(mode="json"), "layout": layout, "normalizer": normalizer.to_json()}
    save_model(folder, "vqvae", vqvae, description)


def load_vqvae(folder: Path, device: torch.device) -> tuple[VQVAE, Normalizer]:
    """Read what `save_vqvae` wrote; the model is in evaluation mode. Raises ValueError if the folder contains no VQ-VAE."""
    description = load_description(folder, "vqvae", VqvaeDescription)
    try:
        normalizer = Normalizer.from_json(description.normalizer, description.layout.transition_dim)
    except ValueError as error:
        raise ValueError(
            f"{folder / 'vqvae.json'} was written by an earlier version or damaged ({error}): train again with `tap run`"
        ) from None
    return load_weights(folder, "vqvae", lambda: VQVAE(description.params, description.layout), device), normalizer
