"""The programs: the stages of dvc.yaml, their orchestration, promotion, serving and the `tap` command.

The settings of these programs' processes are made here. OpenMP and Prefect read theirs when torch and prefect are imported,
and nothing but the package of a module started by `python -m` runs before its imports. `tap`, the library, sets none.
"""

import ctypes
import logging
import os

# OpenMP's threads wait for each other asleep: spinning ones take the cores from the threads that they wait for, and make small
# models ten times slower beside other work on the same cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A tracking server that does not answer costs seconds; by MLflow's defaults it would cost minutes.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")  # seconds; creating the tables of a new store takes more than 5
os.environ.setdefault("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "1")
logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)  # warns of each retry; a run warns once for all of them

# A stage's output holds no lines or progress bars of MLflow.
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")

# Prefect sends no usage data, and its log lines start with the stage that they come from.
os.environ.setdefault("DO_NOT_TRACK", "1")
os.environ.setdefault("PREFECT_LOGGING_FORMATTERS_STANDARD_FLOW_RUN_FMT", "%(asctime)s | %(message)s")
os.environ.setdefault("PREFECT_LOGGING_FORMATTERS_STANDARD_TASK_RUN_FMT", "%(asctime)s | %(task_run_name)s | %(message)s")

# glibc keeps freed memory in the process: if it is returned to the system, the next operation's result costs a page fault for
# every 4 KiB, thousands in a decision. Tensors of more than 4 MiB are returned: keeping them would cost too much memory.
if "MALLOC_TRIM_THRESHOLD_" not in os.environ and hasattr(libc := ctypes.CDLL(None), "mallopt"):  # only glibc has it
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
    libc.mallopt(M_MMAP_THRESHOLD, 4 << 20)
    libc.mallopt(M_TRIM_THRESHOLD, 64 << 20)
