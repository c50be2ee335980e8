"""Data that may be larger than memory is processed in chunks: ranges of rows, or of whole episodes.

Data of at most `ROWS` rows is one chunk. Sums of floats over several chunks are rounded differently than those over one.
"""

from collections.abc import Iterator

import numpy as np

ROWS = 1 << 20


def row_chunks(num_rows: int) -> Iterator[slice]:
    """Consecutive ranges of at most `ROWS` rows."""
    for first in range(0, num_rows, ROWS):
        yield slice(first, min(first + ROWS, num_rows))


def episode_chunks(lengths: np.ndarray) -> Iterator[slice]:
    """Consecutive ranges of the episodes with `lengths` (E,), of at most `ROWS` rows together, or of one longer episode."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    first = 0
    while first < len(lengths):
        end = int(np.searchsorted(offsets, offsets[first] + ROWS, side="right")) - 1
        yield slice(first, max(first + 1, end))
        first = max(first + 1, end)
