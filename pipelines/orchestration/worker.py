"""A worker: a clone of the project on a machine, in which the flow runs of a Prefect work pool are executed.

Code comes from a git commit, data and results from the DVC remote with its run cache. One worker has one clone and runs one
flow at a time, since two `dvc repro` cannot share a clone; a machine with four GPUs gets four workers.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from prefect import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.settings import PREFECT_API_URL

from pipelines.orchestration import gpus, process
from tap.tracking.mlflow_store import redact_credentials

CLONE, COMMIT = "TAP_CLONE", "TAP_COMMIT"
POOLS = ("gpu", "cpu", "control")
DVC_REMOTE = "team"
HEARTBEAT = 30  # seconds, Prefect's minimum; without heartbeats, `tap reap` considers the worker lost
POLL = 5  # seconds between two requests for work


def start(pool: str, folder: Path, git: str | None, remote: str | None, runs_per_gpu: int) -> int:
    """Create or update the clone in `folder`, then work for `pool` until Ctrl-C; returns the exit code of Prefect's worker.

    `git` is the source of commits; by default the origin of this folder's project, or this folder if it has none. `remote`
    is the DVC remote; by default this folder's. Raises ValueError if one of them cannot be used.
    """
    if pool not in POOLS:
        raise ValueError(f"pool: {pool!r} is unknown: choose from {', '.join(POOLS)}")
    require_server()
    folder = folder.resolve()
    set_up(folder, git or _origin(), remote or require_remote())
    with get_client(sync_client=True) as client:
        for name in POOLS:  # `prefect deploy` needs all of them
            with suppress(ObjectAlreadyExists):
                client.create_work_pool(WorkPoolCreate(name=name, type="process"))
    environment = gpus.offer(visible_gpus(), runs_per_gpu) if pool == "gpu" else {}
    environment |= {CLONE: str(folder)}
    environment |= {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT), "PREFECT_WORKER_QUERY_SECONDS": str(POLL)}
    prefect = [sys.executable, "-m", "prefect", "--no-prompt"]
    deploy = subprocess.run([*prefect, "deploy", "--all"], cwd=folder, capture_output=True, text=True)
    if deploy.returncode:
        raise ValueError(f"`prefect deploy --all` failed in {folder}:\n{deploy.stdout}{deploy.stderr}")
    name = f"{socket.gethostname()}-{folder.name}"
    command = [*prefect, "worker", "start", "--type", "process", "--pool", pool, "--limit", "1", "--name", name]
    # The first process of a container ignores SIGTERM unless it has a handler.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with process.running(command, environment, cwd=folder) as worker:
        return worker.wait()


def require_server() -> None:
    """Raises ValueError if no Prefect server is configured, or it does not answer."""
    url = PREFECT_API_URL.value()
    if not url:
        raise ValueError(
            "no Prefect server is configured: start one (`prefect server start`), and set PREFECT_API_URL=http://HOST:4200/api"
        )
    with get_client(sync_client=True) as client:
        if failure := client.api_healthcheck():
            server = redact_credentials(url)
            raise ValueError(
                f"Prefect's server at {server} does not answer ({failure}): check PREFECT_API_URL, and that the server runs"
            )


def require_workers(deployment: str, pool: str) -> None:
    """Raises ValueError if a deployment does not exist, which means that no worker was ever started."""
    with get_client(sync_client=True) as client:
        try:
            client.read_deployment_by_name(deployment)
        except ObjectNotFound:
            raise ValueError(
                f"{deployment} does not exist on Prefect's server: start a worker first, `tap worker {pool}`"
            ) from None


def visible_gpus() -> list[str]:
    """This machine's GPUs as values for CUDA_VISIBLE_DEVICES. Raises ValueError if there are none."""
    import torch  # slow to load

    if chosen := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return chosen.split(",")
    if not (count := torch.cuda.device_count()):
        raise ValueError("torch finds no GPU: use `tap worker cpu`, or install a build of torch for this machine's driver")
    return [str(index) for index in range(count)]


def set_up(folder: Path, git: str, remote: str) -> None:
    """Clone `git`, a folder or a URL, into `folder` unless the clone exists, and make `remote` its DVC remote."""
    git = str(Path(git).resolve()) if Path(git).exists() else git
    if not (folder / ".git").exists():
        _git("clone", "--quiet", git, str(folder))
    _git("-C", str(folder), "remote", "set-url", "origin", git)
    use_remote(folder, remote)


def use_remote(folder: Path, remote: str) -> None:
    """Make `remote`, a folder or a URL that DVC supports, the default DVC remote of the clone in `folder`."""
    url = remote if "://" in remote else str(Path(remote).expanduser().resolve())
    command = [sys.executable, "-m", "dvc", "remote", "add", "--local", "--force", "--default", DVC_REMOTE, url]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if result.returncode:
        raise ValueError(f"{remote}: DVC rejects it as a remote: {result.stderr.strip()}")


def require_remote() -> str:
    """The URL of this folder's default DVC remote. Raises ValueError if there is none."""

    def config(key: str) -> str:
        command = [sys.executable, "-m", "dvc", "config", key]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()

    if not (name := config("core.remote")):
        raise ValueError("no DVC remote is set here: set one with --remote, a folder or a URL like s3://bucket/path")
    return config(f"remote.{name}.url")


def _origin() -> str:
    """The origin of the clone in this folder; this folder if it has none."""
    try:
        return _git("remote", "get-url", "origin")
    except ValueError:
        return str(Path.cwd())


def enter_clone() -> dict[str, str]:
    """Prefect's pull step: check out the commit TAP_COMMIT, by default the origin's newest, in the worker's clone.

    Raises ValueError if the clone's origin does not have the commit.
    """
    folder = os.environ[CLONE]
    _git("-C", folder, "fetch", "--quiet", "--tags", "origin")
    commit = os.environ.get(COMMIT) or "origin/HEAD"
    try:
        _git("-C", folder, "checkout", "--quiet", "--force", "--detach", commit)
    except ValueError as error:
        origin = _git("-C", folder, "remote", "get-url", "origin")
        raise ValueError(f"{origin} has no commit {commit}: push it there, or restart the worker with another --git") from error
    return {"directory": folder}


def end_with_worker() -> None:
    """In a worker's child process, kill the process once the worker is gone, so that `reap` can return its run to the pool."""
    if CLONE not in os.environ:
        return
    worker = os.getppid()

    def watch() -> None:
        while os.getppid() == worker:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def _git(*arguments: str) -> str:
    result = subprocess.run(["git", *arguments], capture_output=True, text=True)
    if result.returncode:
        raise ValueError(f"git {' '.join(arguments)}: {result.stderr.strip()}")
    return result.stdout.strip()
