"""The models with naive attention and codebook: explicit softmax, products with one-hot codes."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from tap.model.codebook import Codebook
from tap.model.transformer import Block


class NaiveBlock(Block):
    def forward(self, x_BTE: Tensor, past_2BHPQ: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        assert past_2BHPQ is None
        B, T, E = x_BTE.shape
        qkv = self.query_key_value(self.attention_norm(x_BTE)).view(B, T, 3, self.heads, E // self.heads)
        qkv_3BHTQ = qkv.permute(2, 0, 3, 1, 4)
        query, key, value = qkv_3BHTQ
        logits = query @ key.transpose(-2, -1) / (E // self.heads) ** 0.5
        logits = logits.masked_fill(torch.ones(T, T, dtype=torch.bool, device=x_BTE.device).triu(1), -torch.inf)
        weights = functional.dropout(logits.softmax(dim=-1), self.dropout.p, self.training)
        y_BTE = self.attention_out((weights @ value).transpose(1, 2).reshape(B, T, E))
        x_BTE = x_BTE + self.dropout(y_BTE)
        return x_BTE + self.mlp(x_BTE), qkv_3BHTQ[1:]


class NaiveCodebook(Codebook):
    def forward(self, vectors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        vectors = vectors.float()
        if self.training and not self.counts_K.any():
            self._replace(torch.ones_like(self.counts_K, dtype=torch.bool), vectors)
        flat_VD = vectors.reshape(-1, vectors.shape[-1])
        squares = flat_VD.square().sum(dim=1, keepdim=True) + self.vectors_KD.square().sum(dim=1)
        codes_V = (squares - 2 * flat_VD @ self.vectors_KD.T).argmin(dim=1)
        one_hot_VK = functional.one_hot(codes_V, len(self.vectors_KD)).float()
        quantized = (one_hot_VK @ self.vectors_KD).view_as(vectors)
        if self.training:
            flat_VD = flat_VD.detach()
            self._average(one_hot_VK.sum(dim=0), (one_hot_VK.T @ flat_VD).float(), flat_VD)
        commitment = (vectors - quantized).square().mean(dim=-1)
        return vectors + (quantized - vectors).detach(), codes_V.view(vectors.shape[:-1]), commitment


def make_naive(model: nn.Module) -> None:
    """Turn a model into its naive version, in place."""
    for module in model.modules():
        if type(module) is Block:
            module.__class__ = NaiveBlock
        elif type(module) is Codebook:
            module.__class__ = NaiveCodebook
