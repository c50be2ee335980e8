"""Parameters of Prefect's flows, which whoever may write to its server chooses."""

from typing import Any

import pytest
from conftest import ROOT
from prefect.exceptions import ParameterTypeError

from pipelines.orchestration.flow import pipeline, promote
from pipelines.orchestration.reap import reap
from pipelines.orchestration.sweep import sweep, train_evaluate

HERE = {"dataset": "hopper-medium-replay", "seed": 0}
WRONG_TYPES: list[tuple[Any, dict[str, Any]]] = [
    (train_evaluate, HERE | {"seed": "0; rm -rf ."}),
    (train_evaluate, HERE | {"seed": 1.5}),
    (train_evaluate, HERE | {"gpus": 0}),
    (train_evaluate, HERE | {"parent_run": "' or tags.stage = 'sweep"}),
    (train_evaluate, HERE | {"parent_run": "../../etc"}),
    (train_evaluate, HERE | {"dataset": ["hopper"]}),
    (train_evaluate, HERE | {"command": "rm"}),
    (sweep, {"pool": "../gpu"}),
    (sweep, {"gpus": -1}),
    (sweep, {"datasets": "hopper"}),
    (pipeline, {"jobs": 0}),
    (pipeline, {"seeds": [None]}),
    (promote, {"dataset": None}),
    (promote, {"dataset": "hopper", "rollback": "rm"}),
    (reap, {"after": float("nan")}),
    (reap, {"after": -1}),
]


@pytest.mark.parametrize(("flow", "parameters"), WRONG_TYPES)
def test_parameters_of_wrong_types_are_refused_before_the_flow_runs(flow: Any, parameters: dict[str, Any]) -> None:
    with pytest.raises((ParameterTypeError, ValueError, TypeError)):
        flow.validate_parameters(parameters)


@pytest.mark.parametrize(
    "dataset", ["../../etc", "/etc/passwd", "hopper-medium-replay/../x", "$(mkdir witness)", "", "a\nb", "'"]
)
@pytest.mark.parametrize("flow", [train_evaluate, promote, pipeline, sweep])
def test_a_dataset_that_params_yaml_does_not_list_is_refused(flow: Any, dataset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a file or a process is named after it."""
    monkeypatch.chdir(ROOT)
    for precondition in ("require_remote", "_commit"):
        monkeypatch.setattr(f"pipelines.orchestration.sweep.{precondition}", lambda: "")
    arguments: dict[str, Any] = {"datasets": [dataset]} if flow in (pipeline, sweep) else {"dataset": dataset}
    if flow is train_evaluate:
        monkeypatch.setattr("pipelines.orchestration.sweep.runtime.flow_run", type("FlowRun", (), {"id": "0"}))
        arguments["seed"] = 0
    with pytest.raises(ValueError, match=r"params\.yaml: datasets: .* is not listed"):
        flow.fn(**arguments)
