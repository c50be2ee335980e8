"""The stages of dvc.yaml, one module each, and what runs, promotes and serves their results."""

import ctypes
import os

# Threads that wait for each other must sleep, not spin: beside other work on the same cores, spinning threads keep those from
# running that they wait for, and slow small models down ten times. The runtime reads this when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Memory that tensors have left must stay with the process: glibc gives it back, and the next operation's result costs a page
# fault for every 4 KiB, thousands in a decision. Tensors of more than 4 MiB still go: keeping those would cost too much memory.
if "MALLOC_TRIM_THRESHOLD_" not in os.environ and hasattr(libc := ctypes.CDLL(None), "mallopt"):  # others than glibc have none
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
    libc.mallopt(M_MMAP_THRESHOLD, 4 << 20)
    libc.mallopt(M_TRIM_THRESHOLD, 64 << 20)
