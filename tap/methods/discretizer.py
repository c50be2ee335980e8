"""Bins of each dimension of a transition, the vocabulary of the Trajectory Transformer (Janner et al. 2021, section 3.1).

Shapes: N rows, X dimensions of a transition, K bins.
"""

from typing import Literal, Self

import numpy as np
import torch
from torch import Tensor, nn

Binning = Literal["quantile", "uniform"]


class Discretizer(nn.Module):
    """Each dimension's bins: K intervals between the least and the greatest value of the data.

    Quantile bins hold equally many values each, uniform bins are equally wide. A bin stands for the mean of its values, so
    that an expectation over bins is unbiased; without values, for its middle. Where many values are equal, edges are too: such
    a value has a bin of width 0 for itself.
    """

    edges_XE: Tensor  # E = K + 1, ascending
    values_XK: Tensor

    def __init__(self, dim: int, bins: int) -> None:
        super().__init__()
        self.register_buffer("edges_XE", torch.zeros(dim, bins + 1))
        self.register_buffer("values_XK", torch.zeros(dim, bins))

    @classmethod
    def fit(cls, rows_NX: Tensor, bins: int, binning: Binning) -> Self:
        """The bins of float32 rows on the CPU, one dimension at a time."""
        fitted = cls(rows_NX.shape[1], bins)
        shares = np.linspace(0, 1, bins + 1)
        for x in range(rows_NX.shape[1]):
            column = np.ascontiguousarray(rows_NX[:, x].numpy())
            low, high = column.min(), column.max()
            edges = np.quantile(column, shares) if binning == "quantile" else low + shares * (high.astype(float) - low)
            fitted.edges_XE[x] = torch.from_numpy(edges)
            fitted.edges_XE[x, 0], fitted.edges_XE[x, -1] = float(low), float(high)  # to the bit, whatever was rounded
            tokens = fitted.tokens(torch.from_numpy(column)[:, None], slice(x, x + 1))[:, 0].numpy()
            counts, sums = np.bincount(tokens, minlength=bins), np.bincount(tokens, column, minlength=bins)
            middles = (fitted.edges_XE[x, 1:] + fitted.edges_XE[x, :-1]).numpy() / 2
            fitted.values_XK[x] = torch.from_numpy(np.where(counts > 0, sums / np.maximum(counts, 1), middles))
        return fitted

    def tokens(self, raw: Tensor, columns: slice = slice(None)) -> Tensor:
        """The bins (..., len(columns)) int64 of raw values; one beyond the data is in the first or the last bin."""
        edges_XE = self.edges_XE[columns]
        raw_XN = raw.flatten(0, -2).T.contiguous()
        below_XN = torch.searchsorted(edges_XE, raw_XN)  # edges that are less
        up_to_XN = torch.searchsorted(edges_XE, raw_XN, right=True)  # or equal
        token_XN = torch.where(up_to_XN - below_XN > 1, below_XN, up_to_XN - 1)
        return token_XN.clamp(0, edges_XE.shape[1] - 2).T.reshape(raw.shape)

    def decode(self, tokens: Tensor, columns: slice = slice(None)) -> Tensor:
        """The values (..., len(columns)) that bins stand for."""
        values_XK = self.values_XK[columns]
        return values_XK[torch.arange(len(values_XK), device=tokens.device), tokens]
