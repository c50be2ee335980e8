"""The stages of dvc.yaml, one module each, and what runs, promotes and serves their results."""

import os

# Threads that wait for each other must sleep, not spin: beside other work on the same cores, spinning threads keep those from
# running that they wait for, and slow small models down ten times. The runtime reads this when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
