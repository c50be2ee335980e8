"""D4RL's normalised score."""

import numpy as np

from tap.data.catalog import DatasetInfo


def normalized_score(info: DatasetInfo, returns: np.ndarray) -> np.ndarray:
    """D4RL's score of undiscounted returns, 100 (R - min) / (max - min): 0 for a random policy, 100 for an expert.

    Raises ValueError if the dataset has no reference scores.
    """
    low, high = info.reference_min_score, info.reference_max_score
    if low is None or high is None:
        key = f"datasets.{info.id}.fetch"
        raise ValueError(
            f"{info.id} has no reference scores: set {key}.reference_min_score and {key}.reference_max_score in params.yaml"
        )
    scores: np.ndarray = 100 * (returns - low) / (high - low)
    return scores
