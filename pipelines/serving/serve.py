"""Serving: a registered policy behind MLflow's scoring server, in a separate process (scoring.py)."""

import os
import signal
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from pipelines.address import require_free
from pipelines.orchestration import process
from pipelines.serving.authentication import read_token
from tap.tracking.mlflow_store import redact_credentials
from tap.tracking.registry import open_registry

# glibc caches freed memory for each thread: at full load, a server of 32 threads grew by 12 MiB an hour (docs/reliability.md).
ALLOCATOR = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0", "MALLOC_ARENA_MAX": "1"}


def serve(name: str, alias: str, host: str, port: int, token_file: Path | None, tracking_uri: str) -> None:
    """Serve the policy `models:/NAME@ALIAS` until Ctrl-C or SIGTERM, which also end the server.

    With a token file, to requests with its token. Raises ValueError if the address, the token or the policy cannot be used, the
    policy's files were changed, or the server exits before that.
    """
    require_free(host, port, "--host and --port")
    if token_file:
        read_token(token_file)  # the server reads it: a token would be visible in its arguments or environment
    with TemporaryDirectory() as folder:
        with open_registry(tracking_uri) as registry:
            version = registry.alias(name, alias)
            if version is None:
                store = redact_credentials(tracking_uri)
                raise ValueError(f"{name} has no {alias} at {store}: run `tap promote {name.removeprefix('tap-')}` first")
            model = registry.download(version, Path(folder))
        _serve(model, host, port, token_file, tracking_uri)


def _serve(model: Path, host: str, port: int, token_file: Path | None, tracking_uri: str) -> None:
    os.environ["MLFLOW_TRACKING_URI"] = tracking_uri  # not an argument: `ps` would show its password

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        command = [sys.executable, "-m", "pipelines.serving.scoring", str(model), host, str(port)]
        with process.running([*command, *([str(token_file)] if token_file else [])], ALLOCATOR | dict(os.environ)) as server:
            code = server.wait()
    except KeyboardInterrupt:
        return
    finally:
        signal.signal(signal.SIGTERM, before)
    raise ValueError(f"the server on {host}:{port} exited with code {code}; see its output above")
