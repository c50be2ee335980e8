"""The Trajectory Transformer's model: one token for each dimension of each transition (Janner et al. 2021, section 3.1).

    transition   s_1 .. s_O  a_1 .. a_A  r  R      X = O + A + 2 dimensions, each with K bins
    tokens       s_1 .. s_O  a_1 .. a_A  r         D = X - 1, what later dimensions depend on

Each dimension is predicted from all tokens before it by a softmax over its own bins. The return-to-go R is predicted, but
nothing is predicted from it: while a policy acts it is unknown, and in the data it tells the future.

Shapes: B batch, T transitions, X dimensions, D tokens of a transition, K bins, E width; R rows of a cache, S sequences that
share a row's past, P tokens; N layers, H heads, Q = E / H.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from tap.distributed import all_reduce_sum
from tap.model.transformer import Block, Transformer, initialize
from tap.settings import TransformerParams


class Cache:
    """Keys and values of the tokens that R * S sequences have in a window, with room for all that may follow.

    The S sequences of a row share their first `shared` tokens, and have `own` more each, which lie token by token: the first
    of each sequence, then the second of each. So sequences that begin alike read one copy of their beginning.
    """

    def __init__(self, params: TransformerParams, rows: int, room: int, device: torch.device) -> None:
        sizes = params.layers, 2, rows, params.heads, room, params.width // params.heads
        # The second is what the next selection is written to: fresh memory would cost more than the copy.
        self.keys_values_N2RHPQ, self._spare = torch.empty(sizes, device=device), torch.empty(sizes, device=device)
        self.shared, self.own, self.siblings = 0, 0, 1

    @property
    def steps(self) -> int:
        """Tokens of each sequence."""
        return self.shared + self.own

    def begin(self, keys_values: list[Tensor], rows_R: Tensor) -> None:
        """Start from rows `rows_R` of what `TrajectoryModel.read` returns, which may repeat."""
        self.shared, self.own, self.siblings = keys_values[0].shape[-2], 0, 1
        for buffer_2RHPQ, keys_values_2BHPQ in zip(self.keys_values_N2RHPQ, keys_values, strict=True):
            torch.index_select(keys_values_2BHPQ, 1, rows_R, out=buffer_2RHPQ[..., : self.shared, :])

    def branch(self, siblings: int) -> None:
        """Continue each row by S sequences."""
        assert self.siblings == 1
        self.shared, self.own, self.siblings = self.steps, 0, siblings

    def select(self, sequences_R: Tensor) -> None:
        """Keep the sequences `sequences_R` of R * S, which may repeat, one in each row."""
        rows_R, end = sequences_R // self.siblings, self.shared + self.own * self.siblings
        past, kept = self.keys_values_N2RHPQ, self._spare
        torch.index_select(past[..., : self.shared, :], 2, rows_R, out=kept[..., : self.shared, :])
        layers, two, rows, heads, _, size = past.shape
        own = past[..., self.shared : end, :].reshape(layers, two, rows, heads, self.own, self.siblings, size)
        torch.index_select(own.movedim(-2, 3).flatten(2, 3), 2, sequences_R, out=kept[..., self.shared : self.steps, :])
        self.keys_values_N2RHPQ, self._spare = kept, past
        self.shared, self.own, self.siblings = self.steps, 0, 1

    def append(self, layer: int, key_RHSQ: Tensor, value_RHSQ: Tensor) -> tuple[Tensor, Tensor]:
        """Write a layer's key and value of the next token of each sequence, and return those of all tokens of each row."""
        begin = self.shared + self.own * self.siblings
        key_RHPQ, value_RHPQ = self.keys_values_N2RHPQ[layer, ..., : begin + self.siblings, :]
        key_RHPQ[..., begin:, :], value_RHPQ[..., begin:, :] = key_RHSQ, value_RHSQ
        return key_RHPQ, value_RHPQ

    def mask(self) -> Tensor | None:
        """What the next token of each sequence of a row may attend to, (S, P): the shared past, its own tokens and itself."""
        if self.siblings == 1:
            return None
        device = self.keys_values_N2RHPQ.device
        others_SS = torch.full((self.siblings, self.siblings), -torch.inf, device=device).fill_diagonal_(0)
        return functional.pad(others_SS.repeat(1, self.own + 1), (self.shared, 0))


class TrajectoryModel(nn.Module):
    """A causal Transformer over the tokens of T transitions, with learned positions.

    A head for each dimension, as in the published code: a bin means something else in each. It costs no time, since a token is
    followed by one dimension only.
    """

    def __init__(self, params: TransformerParams, transition_dim: int, bins: int, length: int) -> None:
        super().__init__()
        self.params, self.transition_dim, self.bins, self.length = params, transition_dim, bins, length
        self.token_dim = transition_dim - 1
        self.embed = nn.Embedding(self.token_dim * bins, params.width)
        self.transformer = Transformer(params, length * self.token_dim)
        self.norm = nn.LayerNorm(params.width)
        self.heads_XKE = nn.Parameter(torch.empty(transition_dim, bins, params.width).normal_(std=0.02))
        initialize(self.embed)

    def log_probabilities(self, tokens_BTX: Tensor) -> Tensor:
        """ln p of each token given those before it, (B, T, X); 0 for the first, which nothing predicts."""
        B, T, X = tokens_BTX.shape
        x_BPE, _ = self.transformer(self._embedded(tokens_BTX[..., :-1].flatten(1)))
        x_BTDE = self.norm(x_BPE).unflatten(1, (T, X - 1))
        last_BTE = functional.pad(x_BTDE[:, :-1, -1], (0, 0, 1, 0))  # of the transition before
        logits_BTXK = torch.einsum("btxe,xke->btxk", torch.cat([last_BTE[:, :, None], x_BTDE], dim=2), self.heads_XKE)
        nats_B = functional.cross_entropy(logits_BTXK.float().flatten(0, 2), tokens_BTX.flatten(), reduction="none").view(B, -1)
        return -functional.pad(nats_B[:, 1:], (1, 0)).view(B, T, X)

    def loss(self, tokens_BTX: Tensor, valid_BT: Tensor, weights_X: Tensor) -> dict[str, Tensor]:
        """This process's share of the mean of weighted -ln p over the tokens of valid steps; sum it over processes.

        `valid_BT` is true up to the episode's end: tokens after it neither count nor, by the causal order, matter.
        """
        count = all_reduce_sum(valid_BT.sum() * self.transition_dim - len(valid_BT))
        weighted_BTX = weights_X * valid_BT[..., None] * self.log_probabilities(tokens_BTX)
        return {"loss": -weighted_BTX.sum() / count}

    def logits(self, hidden: Tensor, dimension: int) -> Tensor:
        """The logits (..., K) of a dimension's bins, from the `hidden` state (..., E) after the token before it."""
        return functional.linear(hidden, self.heads_XKE[dimension]).float()

    def read(self, tokens_RP: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The hidden state (R, E) after the tokens that begin a window, and each layer's keys and values (2, R, H, P, Q)."""
        x_RPE, keys_values = self.transformer(self._embedded(tokens_RP))
        return self.norm(x_RPE[:, -1]), keys_values

    def step(self, tokens_RS: Tensor, cache: Cache) -> Tensor:
        """The hidden state (R, S, E) after one more token of each sequence of `cache`, which is extended by it."""
        position, mask = cache.steps, cache.mask()
        embedding_RSE = self.embed(tokens_RS + position % self.token_dim * self.bins)
        x_RSE = embedding_RSE + self.transformer.positions.weight[position]
        for layer, block in enumerate(self.transformer.blocks):
            assert isinstance(block, Block)
            query_RHSQ, *new = block.project(x_RSE)
            key_RHPQ, value_RHPQ = cache.append(layer, *new)
            x_RSE = block.add(x_RSE, functional.scaled_dot_product_attention(query_RHSQ, key_RHPQ, value_RHPQ, attn_mask=mask))
        cache.own += 1
        hidden_RSE: Tensor = self.norm(x_RSE)
        return hidden_RSE

    def _embedded(self, tokens_BP: Tensor) -> Tensor:
        """The embeddings (B, P, E) of tokens that begin a window."""
        dimension_P = torch.arange(tokens_BP.shape[1], device=tokens_BP.device) % self.token_dim
        embedding_BPE: Tensor = self.embed(tokens_BP + dimension_P * self.bins)
        return embedding_BPE
