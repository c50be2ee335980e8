"""Means with their standard errors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np


def standard_error(values: Sequence[float] | np.ndarray) -> float | None:
    """Standard error of the mean of `values` (n,): s / sqrt(n), where s divides by n - 1. None for a single value."""
    return float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None


@dataclass(frozen=True)
class Estimate:
    """A mean and its standard error, which is None for the mean of a single value."""

    mean: float
    standard_error: float | None

    @classmethod
    def of(cls, values: Sequence[float] | np.ndarray) -> Self:
        """From independent values (n,)."""
        return cls(float(np.mean(values)), standard_error(values))

    def __str__(self) -> str:
        return f"{self.mean:.1f}" if self.standard_error is None else f"{self.mean:.1f} ± {self.standard_error:.1f}"


def mean_of(estimates: Sequence[Estimate]) -> Estimate:
    """Mean of n independent estimates; its standard error is sqrt(sum of squares) / n, or None if one has none."""
    errors = [each.standard_error for each in estimates if each.standard_error is not None]
    complete = len(errors) == len(estimates)
    error = float(np.linalg.norm(errors)) / len(errors) if complete else None
    return Estimate(float(np.mean([each.mean for each in estimates])), error)
