"""The `tap` command, as a person at a terminal meets it."""

import errno
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings
from typer.main import get_command
from typer.testing import CliRunner

from pipelines.cli import app
from pipelines.command_line import App

COMMANDS = (
    "run",
    "datasets",
    "validate",
    "export-dataset",
    "promote",
    "models",
    "serve",
    "export",
    "sync",
    "ui",
    "worker",
    "sweep",
    "reap",
)


def tap(*arguments: str) -> str:
    """What a command prints. Raises what it raises."""
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_help_teaches_each_command_by_example() -> None:
    overview = tap("--help")
    assert set(COMMANDS) == set(get_command(app).commands)  # type: ignore[attr-defined]
    for command in COMMANDS:
        assert f"tap {command}" in overview
        assert f"Example: tap {command}" in tap(command, "--help")


def test_help_loads_nothing_slow() -> None:
    code = "import sys, pipelines.cli; print(*{'torch', 'prefect', 'mlflow', 'matplotlib', 'gymnasium'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout.split() == []


def test_a_mistake_gets_one_message(params_yaml_with: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(params_yaml_with("hopper-medium-replay").parent)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)  # MLflow sets it where another test has named a store
    for command in ("validate", "promote"):
        with pytest.raises(SystemExit, match=r"^error: params.yaml: datasets: 'hooper' is not listed"):
            app([command, "hooper"])
    with pytest.raises(SystemExit, match=r"^error: params.yaml: datasets: 'hooper' is not listed"):
        app(["run", "--dataset", "hooper"])
    with pytest.raises(SystemExit, match=r"^error: .*hopper-medium-replay-0.json does not exist"):
        app(["promote", "hopper-medium-replay"])


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO])
def test_what_the_disk_refuses_ends_every_command_with_one_message(number: int) -> None:
    app = App()

    @app.command()
    def command() -> None:
        raise OSError(number, os.strerror(number), "data/x.json")

    with pytest.raises(
        SystemExit, match=rf"^error: data/x.json: {os.strerror(number)}: [^:]+, then run the same command again"
    ):
        app([])


def test_other_errors_of_the_system_keep_their_traceback() -> None:
    app = App()

    @app.command()
    def command() -> None:
        raise FileNotFoundError(errno.ENOENT, "no such file", "data/x.json")

    with pytest.raises(FileNotFoundError):
        app([])


def test_a_team_needs_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    for command in (["sweep"], ["worker", "cpu"], ["reap"]):
        with (
            temporary_settings(restore_defaults={PREFECT_API_URL}),
            pytest.raises(SystemExit, match=r"^error: no Prefect server is configured: start one .* and set PREFECT_API_URL"),
        ):
            app(command)


def test_a_team_needs_a_server_that_answers(tmp_path: Path) -> None:
    for url in ("http://user:password@127.0.0.1:1/api", "http://127.0.0.1:70000/api", "nonsense"):
        for command in (["worker", "cpu", "--clone", str(tmp_path)], ["reap"]):
            with temporary_settings({PREFECT_API_URL: url}), pytest.raises(SystemExit) as error:
                app(command)
            shown = url.replace("user:password@", "")
            assert str(error.value).startswith(f"error: Prefect's server at {shown} does not answer (")
            assert str(error.value).endswith("check PREFECT_API_URL, and that the server runs")


def test_an_address_that_cannot_be_used_gets_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    for port in ("70000", "0", "-1"):
        with pytest.raises(SystemExit, match=rf"^error: 127.0.0.1:{port} is not a valid address: .* by --host and --port$"):
            app(["serve", "hopper", "--port", port])
    result = CliRunner().invoke(app, ["serve", "hopper", "--port", "abc"])
    assert result.exit_code == 2 and "Invalid value for '--port'" in result.output and "Traceback" not in result.output
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_server(("127.0.0.1", 0)) as other:
        port, free = str(listener.getsockname()[1]), str(other.getsockname()[1])
        other.close()
        with pytest.raises(SystemExit, match=rf"^error: cannot listen on 127.0.0.1:{port} "):
            app(["serve", "hopper", "--port", port])
        for name in ("PREFECT_SERVER_API", "MLFLOW"):
            for variable in ("PREFECT_SERVER_API_PORT", "MLFLOW_PORT"):
                monkeypatch.setenv(variable, free)
            monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db")
            for taken, words in ((port, "cannot listen on"), ("70000", "127.0.0.1:70000"), ("abc", "127.0.0.1:abc")):
                monkeypatch.setenv(f"{name}_PORT", taken)
                with pytest.raises(SystemExit, match=rf"^error: {words} .* by {name}_HOST and {name}_PORT$"):
                    app(["ui"])


def test_datasets_come_with_their_facts() -> None:
    line = next(line for line in tap("datasets").splitlines() if "door-human-v0" in line)
    assert line.split() == ["door-human-v0", "d4rl", "AdroitHandDoor-v1", "200", "-56.5", "2880.6"]


def test_validate_describes_a_file(params_yaml_with: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    fetch = {"path": "mine.hdf5", "max_episode_steps": 100}
    folder = params_yaml_with(datasets={"mine": {"fetch": fetch}}).parent
    monkeypatch.chdir(folder)
    rng, rows = np.random.default_rng(0), 30
    with h5py.File("mine.hdf5", "w") as file:
        file["observations"] = rng.normal(size=(rows, 4))
        file["actions"] = np.full((rows, 2), 3.0)
        file["rewards"] = np.ones(rows)
        file["terminals"] = np.arange(rows) % 10 == 9
    text = " ".join(tap("validate", "mine").split())
    for fact in ("transitions 30", "episodes 3", "return mean 10, min 10, max 10", "constant action dims 0, 1"):
        assert fact in text
    assert "note: 30 of 30 actions reach outside [-1, 1]" in text
    assert not list(folder.glob("*.html"))
    assert "page: mine.html" in tap("validate", "mine", "--html", "mine.html")
    assert "Constant action dimensions 0, 1: at 3." in Path("mine.html").read_text()
    with h5py.File("mine.hdf5", "a") as file:
        file["observations"][12, 3] = np.nan
    with pytest.raises(ValueError, match="observations has a value that is not a finite float32, the first in row 12"):
        tap("validate", "mine", "--html", "nan.html")
    assert not Path("nan.html").exists()
