"""The programs: the stages of dvc.yaml, their orchestration, promotion, serving and the `tap` command.

This module configures the process. OpenMP and Prefect read their settings when torch and prefect are imported, and of a module
started by `python -m` only the package runs before the module's imports. The library, `tap`, sets nothing.
"""

import ctypes
import getpass
import logging
import os

# OpenMP's threads sleep while they wait. Spinning threads would occupy the cores that the others need: with other work on the
# same cores, small models would be ten times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A tracking server that does not respond costs seconds; with MLflow's defaults it would cost minutes.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")  # seconds; creating the tables of a new store takes more than 5
os.environ.setdefault("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "1")
logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)  # warns at each retry; a run warns once for all of them

# MLflow prints no lines, tracebacks or progress bars into a stage's output.
logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # logs each error of a database that it raises
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")

# A container's user may have no name, which DVC, torch and Prefect ask for.
try:
    getpass.getuser()
except (KeyError, OSError):  # OSError from Python 3.13 on
    os.environ["USER"] = str(os.getuid())

# Prefect sends no usage data, and its log lines start with the stage that they come from.
os.environ.setdefault("DO_NOT_TRACK", "1")
os.environ.setdefault("PREFECT_LOGGING_FORMATTERS_STANDARD_FLOW_RUN_FMT", "%(asctime)s | %(message)s")
os.environ.setdefault("PREFECT_LOGGING_FORMATTERS_STANDARD_TASK_RUN_FMT", "%(asctime)s | %(task_run_name)s | %(message)s")

# glibc keeps freed memory in the process: if it were returned to the system, the result of the next operation would cost a page
# fault for every 4 KiB, thousands per decision. Tensors of more than 16 MiB are returned: keeping them costs too much memory.
if "MALLOC_TRIM_THRESHOLD_" not in os.environ and hasattr(libc := ctypes.CDLL(None), "mallopt"):  # only glibc has it
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
    libc.mallopt(M_MMAP_THRESHOLD, 16 << 20)
    libc.mallopt(M_TRIM_THRESHOLD, 64 << 20)
