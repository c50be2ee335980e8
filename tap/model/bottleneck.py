"""Bottlenecks between L steps and one code: pooling and tiling (paper, section 3.2), or attention (paper, appendix).

Shapes: B batch, T steps, L latent step, M codes (= T / L), E width.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from tap.settings import TransformerParams


class PoolAndTile(nn.Module):
    """Each code represents L consecutive steps: max-pooling compresses them, repetition expands the code."""

    def __init__(self, latent_step: int) -> None:
        super().__init__()
        self.latent_step = latent_step

    def compress(self, x_BTE: Tensor) -> Tensor:
        """(B, T, E) -> (B, M, E)."""
        return functional.max_pool1d(x_BTE.transpose(1, 2), kernel_size=self.latent_step).transpose(1, 2)

    def expand(self, x_BME: Tensor) -> Tensor:
        """(B, M, E) -> (B, T, E)."""
        return x_BME.repeat_interleave(self.latent_step, dim=1)


class Attention(nn.Module):
    """Learned queries attend from each code to all steps, and from each step to all codes: no code belongs to particular steps.

    In training the codes after a random one are masked, so that the first codes carry the most information, and so that plans
    with fewer codes than a window can be decoded.
    """

    def __init__(self, params: TransformerParams, latent_step: int, length: int) -> None:
        super().__init__()
        self.latent_step = latent_step
        self.code_queries_ME = nn.Parameter(0.02 * torch.randn(length // latent_step, params.width))
        self.step_queries_TE = nn.Parameter(0.02 * torch.randn(length, params.width))
        self.read_steps = nn.MultiheadAttention(params.width, params.heads, params.dropout, batch_first=True)
        self.read_codes = nn.MultiheadAttention(params.width, params.heads, params.dropout, batch_first=True)

    def compress(self, x_BTE: Tensor) -> Tensor:
        """(B, T, E) -> (B, M, E)."""
        queries = self.code_queries_ME[: x_BTE.shape[1] // self.latent_step].expand(len(x_BTE), -1, -1)
        x_BME: Tensor = self.read_steps(queries, x_BTE, x_BTE, need_weights=False)[0]
        return x_BME

    def expand(self, x_BME: Tensor) -> Tensor:
        """(B, M, E) -> (B, T, E)."""
        B, M, _ = x_BME.shape
        masked_BM = None
        if self.training:
            kept_B1 = torch.randint(1, M + 1, (B, 1), device=x_BME.device)
            masked_BM = torch.arange(M, device=x_BME.device) >= kept_B1
        queries = self.step_queries_TE[: M * self.latent_step].expand(B, -1, -1)
        x_BTE: Tensor = self.read_codes(queries, x_BME, x_BME, key_padding_mask=masked_BM, need_weights=False)[0]
        return x_BTE
