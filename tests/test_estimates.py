import pytest

from tap.estimates import Estimate, mean_of


def test_mean_and_standard_error_by_hand() -> None:
    estimate = Estimate.of([50.0, 60.0, 70.0])  # deviations -10, 0, 10: s = sqrt(200 / 2) = 10
    assert estimate.mean == 60
    assert estimate.standard_error == pytest.approx(10 / 3**0.5)
    assert str(estimate) == "60.0 ± 5.8"
    assert Estimate.of([3.0]).standard_error is None


def test_the_mean_over_datasets_carries_their_errors() -> None:
    mean = mean_of([Estimate(10, 3.0), Estimate(20, 4.0)])
    assert (mean.mean, mean.standard_error) == (15, 2.5)  # sqrt(9 + 16) / 2
    assert mean_of([Estimate(10, 3.0), Estimate(20, None)]).standard_error is None
