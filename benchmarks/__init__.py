"""What decisions, training, data and evaluation cost on this machine: python -m benchmarks.NAME [--json].

Each prints medians, ratios of things measured in turn in one process (a machine's speed drifts), hardware and versions. Models
have random weights, which cost what trained ones do.
"""

import pipelines  # noqa: F401, sets threads and memory up as for the stages
