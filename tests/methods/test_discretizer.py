"""Bins against numpy and against a plain search for each value's bin."""

import itertools

import numpy as np
import pytest
import torch

from tap.methods.discretizer import Binning, Discretizer

BINNINGS: tuple[Binning, ...] = ("quantile", "uniform")


def skewed_rows(count: int = 3000) -> torch.Tensor:
    """Columns: normal, far from normal, mostly zero, constant, two values."""
    rng = np.random.default_rng(0)
    sparse = np.where(rng.random(count) < 0.003, rng.uniform(5, 6, count), 0.0)
    columns = rng.normal(3, 0.1, count), rng.lognormal(0, 2, count), sparse, np.full(count, 0.1), rng.choice([-1.0, 1.0], count)
    return torch.from_numpy(np.stack(columns, axis=1).astype(np.float32))


def plain_bin(edges: np.ndarray, value: float) -> int:
    """The bin of width 0 that has the value, or else the last one that begins at or below it."""
    bins = list(itertools.pairwise(edges))
    for index, (low, high) in enumerate(bins):
        if low == value == high:
            return index
    return max((index for index, (low, _) in enumerate(bins) if low <= value), default=0)


def test_quantile_edges_are_numpys_and_bins_hold_equally_many_values() -> None:
    rows = skewed_rows()
    discretizer = Discretizer.fit(rows, 20, "quantile")
    expected = np.quantile(rows.numpy(), np.linspace(0, 1, 21), axis=0).T
    np.testing.assert_allclose(discretizer.edges_XE, expected, rtol=1e-6)
    for column in (0, 1):
        counts = np.bincount(discretizer.tokens(rows)[:, column], minlength=20)
        assert counts.min() >= 149 and counts.max() <= 151


def test_uniform_bins_are_equally_wide() -> None:
    rows = skewed_rows()
    edges = Discretizer.fit(rows, 20, "uniform").edges_XE[1]
    np.testing.assert_allclose(edges, np.linspace(float(rows[:, 1].min()), float(rows[:, 1].max()), 21), rtol=1e-6)


@pytest.mark.parametrize("binning", BINNINGS)
def test_each_value_is_in_its_bin(binning: Binning) -> None:
    rows = skewed_rows(300)
    discretizer = Discretizer.fit(rows, 7, binning)
    tokens = discretizer.tokens(rows).numpy()
    for column, edges in enumerate(discretizer.edges_XE.numpy()):
        assert tokens[:, column].tolist() == [plain_bin(edges, value) for value in rows[:, column].numpy()]
    part = slice(1, 4)
    some = discretizer.tokens(rows.view(3, 100, 5)[..., part], part)
    np.testing.assert_array_equal(some, tokens.reshape(3, 100, 5)[..., part])


@pytest.mark.parametrize("binning", BINNINGS)
def test_a_bin_stands_for_the_mean_of_its_values(binning: Binning) -> None:
    """So the round trip errs by at most a bin, by less in the mean square than middles of bins would, and without bias."""
    rows = skewed_rows()
    discretizer = Discretizer.fit(rows, 10, binning)
    tokens = discretizer.tokens(rows)
    decoded, edges = discretizer.decode(tokens), discretizer.edges_XE
    for column in range(rows.shape[1]):
        low, high = edges[column, tokens[:, column]], edges[column, tokens[:, column] + 1]
        error = (decoded[:, column] - rows[:, column]).double()
        scale = float(rows[:, column].abs().max())
        assert (error.abs() <= high - low + 1e-6 * scale).all()
        assert error.square().mean() <= ((low + high) / 2 - rows[:, column]).double().square().mean() + 1e-12
        assert error.mean().abs() < 1e-6 * scale
    np.testing.assert_array_equal(discretizer.decode(tokens[:, 2:4], slice(2, 4)), decoded[:, 2:4])


def test_values_that_many_rows_share_are_kept_exactly() -> None:
    """Sparse rewards would otherwise share a bin with the zeros around them."""
    rows = skewed_rows()
    discretizer = Discretizer.fit(rows, 100, "quantile")
    decoded = discretizer.decode(discretizer.tokens(rows))
    np.testing.assert_array_equal(decoded[rows[:, 2] == 0, 2], 0)
    np.testing.assert_array_equal(decoded[:, 3:], rows[:, 3:])
    assert float(decoded[rows[:, 2] > 0, 2].min()) > 5


@pytest.mark.parametrize("binning", BINNINGS)
def test_values_beyond_the_data_are_in_the_outermost_bins(binning: Binning) -> None:
    discretizer = Discretizer.fit(skewed_rows(), 20, binning)
    far = torch.tensor([[-1e30, -1e30], [1e30, 1e30]])
    assert discretizer.tokens(far, slice(0, 2)).tolist() == [[0, 0], [19, 19]]


def test_an_empty_bin_stands_for_its_middle() -> None:
    discretizer = Discretizer.fit(torch.tensor([[0.0], [0.5], [4.0]]), 4, "uniform")
    np.testing.assert_allclose(discretizer.values_XK[0], [0.25, 1.5, 2.5, 4.0])
