"""The causal Transformer of encoder, decoder and prior (paper, section 3.2), with its key-value cache.

Shapes: B batch, T steps, E width, N layers, H heads, Q = E / H; R rows of the past with P steps, S = B / R continuations of
each. Keys and values are stacked: (2, B, H, T, Q).
"""

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from tap.settings import TransformerParams


def extend(past_N2RHPQ: Tensor | None, new: list[Tensor], rows: Tensor) -> Tensor:
    """Keys and values of batch entries `rows` after the steps in `new`, each layer's (2, B, H, T, Q); entries may repeat."""
    new_N2BHTQ = torch.stack([keys_values.index_select(1, rows) for keys_values in new])
    if past_N2RHPQ is None:
        return new_N2BHTQ
    parents = rows // (new[0].shape[1] // past_N2RHPQ.shape[2])
    return torch.cat([past_N2RHPQ.index_select(2, parents), new_N2BHTQ], dim=-2)


class Dropout(nn.Dropout):
    """Dropout that is faster on a CPU, where torch's masks take 6 % of an update: four elements share 64 random bits."""

    def forward(self, input: Tensor) -> Tensor:
        if input.device.type != "cpu" or not self.training or self.p == 0:
            return super().forward(input)
        bits = torch.empty(-(-input.numel() // 4), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)
        kept = bits[: input.numel()].view(input.shape) >= round(self.p * 2**16) - 2**15
        return input * (kept / (1 - self.p))


class Block(nn.Module):
    """Pre-norm self-attention and MLP, as in GPT-2."""

    def __init__(self, params: TransformerParams) -> None:
        super().__init__()
        self.heads = params.heads
        self.dropout = Dropout(params.dropout)
        self.attention_norm = nn.LayerNorm(params.width)
        self.query_key_value = nn.Linear(params.width, 3 * params.width)
        self.attention_out = nn.Linear(params.width, params.width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(params.width),
            nn.Linear(params.width, 4 * params.width),
            nn.GELU(),
            nn.Linear(4 * params.width, params.width),
            Dropout(params.dropout),
        )

    def project(self, x_BTE: Tensor) -> Tensor:
        """Queries, keys and values of steps (B, T, E): (3, B, H, T, Q)."""
        B, T, E = x_BTE.shape
        qkv = self.query_key_value(self.attention_norm(x_BTE)).view(B, T, 3, self.heads, E // self.heads)
        qkv_3BHTQ: Tensor = qkv.permute(2, 0, 3, 1, 4)
        return qkv_3BHTQ

    def add(self, x_BTE: Tensor, attended_BHTQ: Tensor) -> Tensor:
        """The block's output (B, T, E) for its input and what the steps' queries have read."""
        y_BTE = self.attention_out(attended_BHTQ.transpose(1, 2).reshape(x_BTE.shape))
        x_BTE = x_BTE + self.dropout(y_BTE)
        added_BTE: Tensor = x_BTE + self.mlp(x_BTE)
        return added_BTE

    def forward(self, x_BTE: Tensor, past_2BHPQ: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """(B, T, E) -> (B, T, E), and keys and values of these steps."""
        qkv_3BHTQ = self.project(x_BTE)
        query, key, value = qkv_3BHTQ
        new_2BHTQ = qkv_3BHTQ[1:]
        if past_2BHPQ is not None:
            key, value = torch.cat([past_2BHPQ, new_2BHTQ], dim=-2)
        dropout = self.dropout.p if self.training else 0.0
        attended_BHTQ = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=past_2BHPQ is None, dropout_p=dropout
        )
        return self.add(x_BTE, attended_BHTQ), new_2BHTQ


class Transformer(nn.Module):
    """Learned positions and a stack of causal blocks, without a final norm."""

    def __init__(self, params: TransformerParams, max_steps: int) -> None:
        super().__init__()
        self.positions = nn.Embedding(max_steps, params.width)
        self.dropout = Dropout(params.dropout)
        self.blocks = nn.ModuleList(Block(params) for _ in range(params.layers))
        self.apply(initialize)
        for name, weight in self.named_parameters():
            if name.endswith(("attention_out.weight", "mlp.3.weight")):  # residual branches start small, as in GPT-2
                nn.init.normal_(weight, std=0.02 / (2 * params.layers) ** 0.5)

    def forward(self, x_BTE: Tensor, past_N2RHPQ: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
        """(B, T, E) -> (B, T, E), and each layer's keys and values (2, B, H, T, Q) of these T steps.

        With a past, x has only the steps after it. Each of the past's R rows belongs to S = B / R consecutive rows of x. They
        are computed as one sequence, so that the past is not copied for each.
        """
        B, T, E = x_BTE.shape
        first, S, mask = 0, 1, None
        if past_N2RHPQ is not None:
            first, S = past_N2RHPQ.shape[-2], B // past_N2RHPQ.shape[2]
            mask = _continuations_mask(first, T, S, x_BTE.device)
        x_BTE = self.dropout(x_BTE + self.positions.weight[first : first + T])
        x_RSE, new = x_BTE.reshape(B // S, S * T, E), []
        for layer, block in enumerate(self.blocks):
            x_RSE, keys_values = block(x_RSE, None if past_N2RHPQ is None else past_N2RHPQ[layer], mask)
            new.append(keys_values.unflatten(-2, (S, T)).transpose(2, 3).flatten(1, 2))
        return x_RSE.view(B, T, E), new


@cache
def _continuations_mask(past: int, steps: int, continuations: int, device: torch.device) -> Tensor | None:
    """Attention mask (S * T, P + S * T): a step attends to all of the past, and to its own continuation up to itself."""
    if steps * continuations == 1:
        return None
    step = torch.arange(continuations * steps, device=device)
    own = (step[:, None] // steps == step // steps) & (step[:, None] >= step)
    return functional.pad(torch.where(own, 0.0, -torch.inf), (past, 0))


def initialize(module: nn.Module) -> None:
    """GPT-2's initial weights: normal with std 0.02, biases zero."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def compile_blocks(model: nn.Module) -> None:
    """Compile the Transformer blocks of `model` in place, for training on a GPU: elementwise operations are fused.

    If compilation fails, for example without a C compiler, the blocks run uncompiled, with a warning.
    """
    torch._dynamo.config.suppress_errors = True
    for module in model.modules():
        if isinstance(module, Block):
            module.compile(dynamic=False)
