"""Raw observations that a policy acts on: are they valid, and are they near the training data."""

import numpy as np

from tap.data.windows import Normalizer


def check_observations(observations: np.ndarray, observation_dim: int) -> None:
    """Raise ValueError if observations are not (N, O), are none, or are not finite in the models' float32."""
    if observations.ndim != 2 or observations.shape[1] != observation_dim:
        raise ValueError(f"observations have shape {observations.shape}; this policy needs (n, {observation_dim})")
    if not len(observations):
        raise ValueError("there is no observation to act on: send at least one")
    if not (np.abs(observations) <= np.finfo(np.float32).max).all():
        raise ValueError(
            "observations contain values that are not finite in float32 (NaN, infinite or too large): fix or drop them"
        )


def ood_reasons(observations: np.ndarray, normalizer: Normalizer, columns: slice) -> list[dict[str, str]]:
    """Why each of N raw observations (N, O) is far outside the training data, one dict each, empty if it is not.

    "state": a sentence about the dimension in which the observation is farthest. `columns` are the observation's in the
    transitions of `normalizer`.
    """
    low, high = normalizer.support_bounds(columns)
    beyond = np.maximum(low - observations, observations - high)
    reasons: list[dict[str, str]] = [{} for _ in observations]
    for row in np.flatnonzero((beyond > 0).any(axis=1)):
        dimension = int((beyond[row] / (high - low)).argmax())
        reasons[row]["state"] = (
            f"observation[{dimension}] is {observations[row, dimension]:.4g}, far outside the training data,"
            f" which allows {low[dimension]:.4g} to {high[dimension]:.4g}"
        )
    return reasons
