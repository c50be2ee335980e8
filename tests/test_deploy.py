"""The containers of docs/deploy and the deployments of prefect.yaml name commands, flows and pools that exist."""

import importlib
from typing import Any

import pytest
import typer
import yaml
from conftest import ROOT
from prefect import Flow

from pipelines.cli import app
from pipelines.orchestration.worker import POOLS


def load(name: str) -> list[Any]:
    return list(yaml.safe_load_all((ROOT / name).read_text()))


def worker_commands() -> list[list[str]]:
    (compose,), (stateful_set, _) = load("docs/deploy/compose.yaml"), load("docs/deploy/kubernetes.yaml")
    (container,) = stateful_set["spec"]["template"]["spec"]["containers"]
    return [compose["services"]["worker"]["command"], container["args"]]


@pytest.mark.parametrize("arguments", worker_commands())
def test_a_containers_command_is_one_that_tap_takes(arguments: list[str]) -> None:
    name, *rest = arguments
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    context = command.make_context(name, list(rest))
    assert context.params["pool"] in POOLS and context.params["git"]


@pytest.mark.parametrize("deployment", load("prefect.yaml")[0]["deployments"], ids=lambda each: each["name"])
def test_a_deployment_runs_a_flow_in_a_pool_that_workers_have(deployment: dict[str, Any]) -> None:
    path, _, name = deployment["entrypoint"].partition(":")
    module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    assert isinstance(getattr(module, name), Flow)
    assert deployment["work_pool"]["name"] in POOLS
