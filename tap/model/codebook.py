"""The codebook: nearest neighbours, updated by exponential moving averages (paper, section 2.1, equation 1).

Shapes: V vectors, K codes, D code dimension.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from tap.distributed import all_reduce_sum, broadcast
from tap.settings import CodebookParams

SMOOTHING = 1e-5  # Laplace smoothing: no code's count is ever zero


class Codebook(nn.Module):
    """K code vectors that follow the mean of the encoder outputs assigned to them (van den Oord et al. 2017, appendix A.1).

    Codes that are no longer used, and all codes before the first batch, are replaced by encoder outputs sampled at random with
    torch's default generator (a departure from the paper). All statistics are summed over processes, so that all have the same
    codebook.
    """

    vectors_KD: Tensor
    counts_K: Tensor
    sums_KD: Tensor

    def __init__(self, params: CodebookParams) -> None:
        super().__init__()
        self.decay, self.dead_usage = params.decay, params.dead_usage
        self.register_buffer("vectors_KD", torch.zeros(params.size, params.dim))
        self.register_buffer("counts_K", torch.zeros(params.size))
        self.register_buffer("sums_KD", torch.zeros(params.size, params.dim))
        self._started = False  # whether this process has checked that the codebook is initialised

    def assign(self, vectors: Tensor) -> Tensor:
        """The nearest code (...) to each of `vectors` (..., D) by Euclidean distance, in float32 even under autocast."""
        with torch.autocast(vectors.device.type, enabled=False):
            flat_VD = vectors.detach().reshape(-1, vectors.shape[-1]).float()
            # |v - c|^2 up to |v|^2, which is the same for every code
            distances_VK = self.vectors_KD.square().sum(dim=1) - 2 * flat_VD @ self.vectors_KD.T
        return distances_VK.argmin(dim=1).view(vectors.shape[:-1])

    def forward(self, vectors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Quantise `vectors` (..., D).

        Returns the code vectors (..., D) with the straight-through gradient, the codes (...), and the squared distance (...)
        from each vector to its code vector, averaged over D: the commitment loss. In training, the codebook is then updated.
        """
        vectors = vectors.float()
        if self.training and not self._started:  # checked once, because reading a value waits for the GPU
            self._started = True
            if not self.counts_K.any():
                self._replace(torch.ones_like(self.counts_K, dtype=torch.bool), vectors)
        codes = self.assign(vectors)
        quantized = functional.embedding(codes, self.vectors_KD)
        commitment = (vectors - quantized).square().mean(dim=-1)
        if self.training:
            self._update(vectors.detach(), codes)
        return vectors + (quantized - vectors).detach(), codes, commitment

    @torch.no_grad()
    def _update(self, vectors: Tensor, codes: Tensor) -> None:
        flat_VD, codes_V = vectors.reshape(-1, vectors.shape[-1]), codes.reshape(-1)
        counts_K = count(codes_V, len(self.counts_K))
        sums_KD = torch.zeros_like(self.sums_KD).index_add_(0, codes_V, flat_VD)
        self._average(counts_K, sums_KD, flat_VD)

    @torch.no_grad()
    def _average(self, counts_K: Tensor, sums_KD: Tensor, flat_VD: Tensor) -> None:
        """Move the averages towards the counts and vector sums per code of this process's batch `flat_VD`."""
        self.counts_K.lerp_(all_reduce_sum(counts_K), 1 - self.decay)
        self.sums_KD.lerp_(all_reduce_sum(sums_KD), 1 - self.decay)
        total = self.counts_K.sum()
        smoothed_K = (self.counts_K + SMOOTHING) / (total + len(self.counts_K) * SMOOTHING) * total
        self.vectors_KD.copy_(self.sums_KD / smoothed_K[:, None])
        self._replace(self.counts_K < self.dead_usage, flat_VD)

    @torch.no_grad()
    def _replace(self, dead_K: Tensor, vectors: Tensor) -> None:
        """Replace the codes marked in `dead_K` by random rows of `vectors`, each with a count of one."""
        flat_VD = vectors.reshape(-1, vectors.shape[-1])
        rows_K = torch.randint(len(flat_VD), dead_K.shape, device=flat_VD.device)
        fresh_KD = broadcast(flat_VD[rows_K].contiguous())
        self.counts_K.copy_(torch.where(dead_K, 1.0, self.counts_K))
        self.vectors_KD.copy_(torch.where(dead_K[:, None], fresh_KD, self.vectors_KD))
        self.sums_KD.copy_(torch.where(dead_K[:, None], fresh_KD, self.sums_KD))

    @torch.no_grad()
    def refit(self, batches: Iterable[Tensor]) -> None:
        """Move each code to the mean of the vectors assigned to it, over the `batches` (..., D) of all processes.

        A code without vectors keeps its vector. `batches` may be computed lazily: no gradients are recorded.
        """
        counts_K, sums_KD = torch.zeros_like(self.counts_K), torch.zeros_like(self.sums_KD)
        for vectors in batches:
            flat_VD, codes_V = vectors.float().reshape(-1, vectors.shape[-1]), self.assign(vectors).reshape(-1)
            counts_K += count(codes_V, len(counts_K))
            sums_KD.index_add_(0, codes_V, flat_VD)
        counts_K, sums_KD = all_reduce_sum(counts_K), all_reduce_sum(sums_KD)
        means_KD = sums_KD / counts_K.clamp(min=1)[:, None]
        self.vectors_KD.copy_(torch.where(counts_K[:, None] > 0, means_KD, self.vectors_KD))


def count(codes_V: Tensor, size: int) -> Tensor:
    """How often each of K = `size` codes occurs in `codes_V`: (K,) float32. torch.bincount would wait for the GPU."""
    ones_V = torch.ones(len(codes_V), device=codes_V.device)
    return torch.zeros(size, device=codes_V.device).index_add_(0, codes_V, ones_V)
