"""The causal Transformer that encoder, decoder and prior share, with its key-value cache.

Shapes: B batch, T steps, C cached steps, E width, H heads, Q = E / H.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from tap.settings import Transformer as TransformerParams

# Keys and values (B, H, C, Q) of each layer for the steps already seen.
Cache = list[tuple[Tensor, Tensor]]


def select(cache: Cache, rows: Tensor) -> Cache:
    """The cache of batch entries `rows`, in that order; entries may repeat."""
    return [(keys[rows], values[rows]) for keys, values in cache]


class Block(nn.Module):
    """Pre-norm self-attention and MLP, as in GPT-2."""

    def __init__(self, params: TransformerParams) -> None:
        super().__init__()
        self.heads, self.dropout = params.heads, params.dropout
        self.attention_norm = nn.LayerNorm(params.width)
        self.query_key_value = nn.Linear(params.width, 3 * params.width)
        self.attention_out = nn.Linear(params.width, params.width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(params.width),
            nn.Linear(params.width, 4 * params.width),
            nn.GELU(),
            nn.Linear(4 * params.width, params.width),
            nn.Dropout(params.dropout),
        )

    def forward(self, x_BTE: Tensor, cached: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        B, T, E = x_BTE.shape
        qkv = self.query_key_value(self.attention_norm(x_BTE)).view(B, T, 3, self.heads, E // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mask = None
        if cached is not None:
            past = cached[0].shape[2]
            key, value = torch.cat([cached[0], key], dim=2), torch.cat([cached[1], value], dim=2)
            mask = torch.ones(T, past + T, dtype=torch.bool, device=x_BTE.device).tril(past)
        y = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, dropout_p=self.dropout if self.training else 0.0
        )
        y_BTE = self.attention_out(y.transpose(1, 2).reshape(B, T, E))
        x_BTE = x_BTE + functional.dropout(y_BTE, self.dropout, self.training)
        return x_BTE + self.mlp(x_BTE), (key, value)


class Transformer(nn.Module):
    """Learned positions and a stack of causal blocks. No final norm: each user adds what it needs."""

    def __init__(self, params: TransformerParams, max_steps: int) -> None:
        super().__init__()
        self.positions = nn.Embedding(max_steps, params.width)
        self.dropout = nn.Dropout(params.dropout)
        self.blocks = nn.ModuleList(Block(params) for _ in range(params.layers))
        self.apply(initialize)
        for name, weight in self.named_parameters():
            if name.endswith(("attention_out.weight", "mlp.3.weight")):  # residual branches start small, as in GPT-2
                nn.init.normal_(weight, std=0.02 / (2 * params.layers) ** 0.5)

    def forward(self, x_BTE: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        """(B, T, E) -> (B, T, E) and the cache of all steps so far; with `cache`, x holds only the steps that follow it."""
        past = cache[0][0].shape[2] if cache else 0
        steps = torch.arange(past, past + x_BTE.shape[1], device=x_BTE.device)
        x_BTE = self.dropout(x_BTE + self.positions(steps))
        new_cache: Cache = []
        for layer, block in enumerate(self.blocks):
            x_BTE, keys_values = block(x_BTE, cache[layer] if cache else None)
            new_cache.append(keys_values)
        return x_BTE, new_cache


def initialize(module: nn.Module) -> None:
    """GPT-2's initial weights: normal with deviation 0.02, biases zero."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
