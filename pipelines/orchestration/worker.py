"""A worker: a clone of the project on some machine that runs what a Prefect work pool has for it.

Code comes by git commit, data and results by the DVC remote with its run cache. One worker has one clone and runs one thing at
a time, since two `dvc repro` cannot share a clone; a machine with four GPUs gets four workers.
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

CLONE, COMMIT = "TAP_CLONE", "TAP_COMMIT"
POOLS = ("gpu", "cpu", "control")
DVC_REMOTE = "team"
HEARTBEAT = 30  # seconds, the least that Prefect takes; by its absence `tap reap` knows a lost worker
POLL = 5  # seconds between two looks for work


def start(pool: str, folder: Path, git: str | None, remote: str | None, runs_per_gpu: int) -> int:
    """Make or update the clone in `folder`, then work for `pool` until Ctrl-C; the exit code of Prefect's worker.

    `git` is where commits come from, else the origin of the project here, else that itself; `remote` is the DVC remote, else
    the one here. Raises ValueError where one of them cannot be used.
    """
    if pool not in POOLS:
        raise ValueError(f"pool: {pool!r} is none of {', '.join(POOLS)}")
    require_server()
    folder = folder.resolve()
    set_up(folder, git or _origin(), remote or require_remote())
    with get_client(sync_client=True) as client:
        for name in POOLS:  # `prefect deploy` wants to find them all
            with suppress(ObjectAlreadyExists):
                client.create_work_pool(WorkPoolCreate(name=name, type="process"))
    environment = gpus.offer(visible_gpus(), runs_per_gpu) if pool == "gpu" else {}
    environment |= {CLONE: str(folder), "DO_NOT_TRACK": "1"}
    environment |= {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT), "PREFECT_WORKER_QUERY_SECONDS": str(POLL)}
    prefect = [sys.executable, "-m", "prefect", "--no-prompt"]
    deploy = subprocess.run([*prefect, "deploy", "--all"], cwd=folder, capture_output=True, text=True)
    if deploy.returncode:
        raise ValueError(f"`prefect deploy --all` failed in {folder}:\n{deploy.stdout}{deploy.stderr}")
    name = f"{socket.gethostname()}-{folder.name}"
    command = [*prefect, "worker", "start", "--type", "process", "--pool", pool, "--limit", "1", "--name", name]
    # The first process of a container is deaf to SIGTERM unless it says what to do.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with process.running(command, environment, cwd=folder) as worker:
        return worker.wait()


def require_server() -> None:
    """Raises ValueError where no Prefect server is named, to which other machines have access."""
    if not PREFECT_API_URL.value():
        raise ValueError(
            "no Prefect server is named: start one (`prefect server start`), and set PREFECT_API_URL=http://HOST:4200/api here"
        )


def require_workers(deployment: str, pool: str) -> None:
    """Raises ValueError where Prefect's server does not know a deployment, as no worker has ever been started."""
    with get_client(sync_client=True) as client:
        try:
            client.read_deployment_by_name(deployment)
        except ObjectNotFound:
            raise ValueError(f"Prefect's server knows no {deployment}: start a worker first, `tap worker {pool}`") from None


def visible_gpus() -> list[str]:
    """This machine's GPUs, as CUDA_VISIBLE_DEVICES names them. Raises ValueError where there are none."""
    import torch  # slow to load

    if chosen := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return chosen.split(",")
    if not (count := torch.cuda.device_count()):
        raise ValueError("torch sees no GPU here: `tap worker cpu`, or install a build of torch for this machine's driver")
    return [str(index) for index in range(count)]


def set_up(folder: Path, git: str, remote: str) -> None:
    """Clone `git`, a folder or an address, into `folder` unless it is there, and make `remote` its DVC remote."""
    git = str(Path(git).resolve()) if Path(git).exists() else git
    if not (folder / ".git").exists():
        _git("clone", "--quiet", git, str(folder))
    _git("-C", str(folder), "remote", "set-url", "origin", git)
    use_remote(folder, remote)


def use_remote(folder: Path, remote: str) -> None:
    """Make `remote`, a folder or a URL that DVC knows, the default DVC remote of the clone in `folder`."""
    url = remote if "://" in remote else str(Path(remote).expanduser().resolve())
    command = [sys.executable, "-m", "dvc", "remote", "add", "--local", "--force", "--default", DVC_REMOTE, url]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if result.returncode:
        raise ValueError(f"{remote}: DVC does not take it as a remote: {result.stderr.strip()}")


def require_remote() -> str:
    """The URL of this folder's default DVC remote. Raises ValueError where there is none to share results by."""

    def config(key: str) -> str:
        command = [sys.executable, "-m", "dvc", "config", key]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()

    if not (name := config("core.remote")):
        raise ValueError("no DVC remote is set here: --remote names one, a folder or a URL like s3://bucket/path")
    return config(f"remote.{name}.url")


def _origin() -> str:
    """Where this folder was cloned from; itself where it was not."""
    try:
        return _git("remote", "get-url", "origin")
    except ValueError:
        return str(Path.cwd())


def enter_clone() -> dict[str, str]:
    """Bring the worker's clone to the commit that TAP_COMMIT names, or else to its origin's newest: Prefect's pull step.

    Raises ValueError where the clone's origin has no such commit.
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
    """Where a worker runs this process, kill it once the worker is gone: its run is then one to reap, and not one to lose."""
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
