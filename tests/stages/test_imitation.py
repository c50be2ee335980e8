"""A dataset without rewards and without an environment through all stages: `dvc repro`, promotion, `tap run`."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import copy_project, custom_dataset, metrics, run, tiny_tree
from mlflow import MlflowClient
from stage_files import validation

from pipelines.stages.evaluate import with_objective
from pipelines.stages.params import EvaluateStage
from tap.data.episodes import Episodes
from tap.methods.behaviour_cloning import BehaviourCloning
from tap.settings import Params

pytestmark = pytest.mark.xdist_group("imitation")  # one finished project for all

STEPS = 6  # of a plan


@pytest.fixture(scope="module")
def imitated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its file has rewards and actions beyond its upper bound, which fetch is told."""
    folder = tmp_path_factory.mktemp("imitation")
    fetch = {"path": "my-hopper.hdf5", "max_episode_steps": 100, "reward": "none", "action_high": [0.0, None, 0.5]}
    ablate = {"datasets": ["arms"], "planners": ["no-search"], "models": []}
    copy_project(folder, {"arms": tiny_tree() | {"fetch": fetch}}, seeds=[3], methods=["bc"], ablate=ablate)
    run(folder, "dvc", "repro")
    return folder


def test_actions_are_evaluated_on_the_held_out_episode(imitated: Path) -> None:
    """Of behaviour cloning, one step after another."""
    (tap,), (cloned,) = metrics(imitated).values(), metrics(imitated, "methods").values()
    (ablated,) = metrics(imitated, "ablations").values()
    episodes = Episodes.load(imitated / "data/raw/arms/episodes")
    assert not episodes.rewards.any()
    _, held_out = episodes.split(0.1, np.random.default_rng(3))
    (index,) = held_out.indices
    policy, variance = BehaviourCloning.load(imitated / "data/bc/arms-3"), episodes.actions.astype(float).var(axis=0)
    errors, hold_errors = [], []
    for row in range(episodes.offsets[index] + 1, episodes.offsets[index + 1]):
        (action,) = policy.act(episodes.observations[row : row + 1], [])
        action = [min(action[0], 0.0), action[1], min(action[2], 0.5)]
        errors.append((action - episodes.actions[row]) ** 2 / variance)
        hold_errors.append((episodes.actions[row - 1] - episodes.actions[row]) ** 2 / variance)
    assert cloned["action_error"] == pytest.approx(np.mean(errors), rel=1e-4)
    assert cloned["scores"] == [cloned["action_error"]] and cloned["error_ahead"] == [cloned["action_error"]]
    for each in (tap, cloned, ablated):
        assert each["hold_error"] == pytest.approx(np.mean(hold_errors), rel=1e-4)
        assert (each["has_rewards"], each["held_out"], each["decisions"]) == (False, True, len(errors))
        assert not {"returns", "behaviour", "environment", "search_value_mean"} & each.keys()
    assert len(tap["error_ahead"]) == len(tap["rmse"]) == STEPS
    assert tap["planner"]["objective"] == ablated["planner"]["objective"] == "likelihood"


def test_a_search_that_weighs_returns_is_refused_without_rewards(tiny_params: Params) -> None:
    weighted = tiny_params.evaluate.planner.model_copy(update={"search": "critic_weighted"})
    stage = EvaluateStage(
        scale="cpu",
        info=custom_dataset("arms", "Hopper-v4", 100),
        fetch=tiny_params.fetch,
        params=tiny_params.evaluate.model_copy(update={"planner": weighted}),
        trains=False,
    )
    assert with_objective(stage, validation()) is stage
    with pytest.raises(ValueError, match=r"arms has no rewards, .*critic_weighted to weigh: use prior_mean"):
        with_objective(stage, validation(has_rewards=False))


def test_the_critic_is_not_trained_for_nothing(imitated: Path) -> None:
    (critic,), (prior,) = (metrics(imitated, stage).values() for stage in ("train_critic", "train_prior"))
    assert (critic["step"], prior["step"]) == (1, 20)
    evaluated = json.loads((imitated / "data/metrics/evaluate/arms-3.json").read_text())
    assert set(evaluated["runs"]) == {"train_vqvae", "train_prior", "evaluate"}


def test_no_returns_are_pretended(imitated: Path) -> None:
    report = imitated / "data/report"
    page, results = (report / "index.html").read_text(), (report / "results.md").read_text()
    assert "imitation, no rewards" in page and "imitation, no rewards" in results
    assert "hold the last action" in page and "behaviour cloning" in results
    assert not {"TAP returns", "mean return 0", "Episode returns"} & {
        part for part in ("TAP returns", "mean return 0", "Episode returns") if part in page + results
    }
    assert (report / "arms-action-error.png").exists() and not (report / "arms-returns.png").exists()
    diagnosis = json.loads((imitated / "data/metrics/diagnose/arms-3.json").read_text())
    assert "prior" not in diagnosis and not {"return_std", "advantage_slope"} & diagnosis["offline"].keys()
    (tap,), (cloned,) = metrics(imitated).values(), metrics(imitated, "methods").values()
    scores = json.loads((imitated / "data/scores/arms.json").read_text())
    assert scores["action_error"] == round(tap["action_error"], 4) and "score" not in scores
    assert scores["bc_action_error"] == round(cloned["action_error"], 4)


def test_runs_carry_the_errors(imitated: Path) -> None:
    client = MlflowClient(f"sqlite:///{imitated}/mlflow.db")
    (tap,) = metrics(imitated).values()
    (found,) = client.search_runs(["1"], "tags.dvc_stage = 'evaluate@arms-3'")
    assert found.data.metrics["action_error"] == pytest.approx(tap["action_error"])
    assert "return_mean" not in found.data.metrics and found.data.tags["rewards"] == "imitation, no rewards"
    history = client.get_metric_history(found.info.run_id, "error_ahead")
    assert [each.value for each in sorted(history, key=lambda each: each.step)] == pytest.approx(tap["error_ahead"])


def test_the_policy_of_the_least_error_is_promoted_and_clips_its_actions(imitated: Path) -> None:
    errors = {
        each["method"]: each["action_error"] for stage in ("evaluate", "methods") for each in metrics(imitated, stage).values()
    }
    summary = run(imitated, sys.executable, "-m", "pipelines.cli", "run").stdout
    assert "stages are up to date" in summary and "promoted (there was no champion)" in summary
    assert "hold the last action" in summary
    script = (
        "import json, mlflow, numpy as np;"
        "version = mlflow.MlflowClient().get_model_version_by_alias('tap-arms', 'champion');"
        "model = mlflow.pyfunc.load_model('models:/tap-arms@champion', model_config={'device': 'cpu'});"
        "states = np.random.default_rng(0).normal(size=(64, 11));"
        "print(json.dumps([version.tags, version.description, model.predict(states).tolist()]))"
    )
    tags, card, actions = json.loads(run(imitated, sys.executable, "-c", script).stdout.splitlines()[-1])
    assert tags["method"] == min(errors, key=errors.__getitem__) and tags["score_metric"] == "action_error"
    assert tags["held_out"] == "True" and not {"returns", "environment"} & tags.keys() and "return" not in tags["validation"]
    assert "imitation, no rewards" in card and "hold the last action" in card and "- simulator:" not in card
    highest = np.max(actions, axis=0)
    assert highest[0] <= 0 and highest[2] <= 0.5
