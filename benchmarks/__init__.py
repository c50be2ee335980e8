"""What decisions, training, data and evaluation cost on this machine: python -m benchmarks.NAME [--json].

Each prints medians, ratios of things measured in turn in one process (a machine's speed drifts), hardware and versions. Models
have random weights, which cost what trained ones do.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the stages run, see pipelines/__init__.py
