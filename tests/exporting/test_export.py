"""Exported policies against the policies: every planner as ONNX, and a whole folder that a registry's version becomes."""

import json
import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import random_episodes
from stage_files import validation_json
from typer.testing import CliRunner

pytest.importorskip("onnxscript", reason="the extra export is not installed")
import onnx
import onnxruntime
from onnx import numpy_helper

from pipelines.cli import app
from pipelines.exporting.check import check, expect
from pipelines.exporting.data import DataFacts, data_facts
from pipelines.exporting.decision import Decision, decision_of
from pipelines.exporting.folder import TEMPLATE, write_folder
from pipelines.exporting.formats import trace, write_onnx
from tap.data.action_bounds import no_bounds
from tap.data.episodes import save_episodes
from tap.data.history import History
from tap.data.windows import Layout, Normalizer, fit_normalizer
from tap.files import write_json
from tap.methods.behaviour_cloning import BehaviourCloning
from tap.methods.decision_transformer import DecisionTransformer
from tap.methods.discretizer import Discretizer
from tap.methods.policy import MethodPolicy
from tap.methods.squashed_policy import CqlPolicy, IqlPolicy, MopoPolicy
from tap.methods.trajectory_transformer import TrajectoryTransformer
from tap.methods.trajectory_transformer_q import TrajectoryTransformerQ
from tap.model.actor import Actor
from tap.model.critic import Critic
from tap.planning.policy import Policy
from tap.serving.policy import row_generators
from tap.settings import Params, Runtime
from tap.tracking import run as tracking
from tap.tracking.registry import MODEL_DIGEST, log_policy

LAYOUT, STATES = Layout(11, 3), np.random.default_rng(1).normal(size=(32, 11)).astype(np.float32)
HISTORIES = [History(STATES[:row], STATES[:row, :3] / 3, STATES[:row, 3]) for row in range(len(STATES))]
PLANNERS: dict[str, dict[str, Any]] = {
    "beam": {"search": "beam"},
    "without replacement": {"search": "beam", "replacement": False},
    "stop at end": {"search": "beam", "stop_at_end": True, "partial_threshold": True},
    "prior sampling": {"search": "prior_sampling"},
    "uniform sampling": {"search": "uniform_sampling"},
    "prior mean": {"search": "prior_mean"},
    "prior mean with actor": {"search": "prior_mean", "actor": True},
    "critic weighted with actor": {"search": "critic_weighted", "actor": True, "likeliest_codes": 4},
}


def with_planner(policy: Policy, params: Params, **changes: Any) -> Policy:
    """The policy with another planner, and with critic and actor of random weights."""
    torch.manual_seed(1)
    critic, actor = Critic(params.train_critic, policy.vqvae).eval(), Actor(params.train_actor, LAYOUT).eval()
    critic.held_out_error = 2.0
    planner = policy.params.model_copy(update=changes)
    return Policy(policy.vqvae, policy.normalizer, policy.prior, planner, policy.device, critic, actor)


def one_at_a_time(decision: Decision, model: Path, seed: int = 0) -> dict[str, np.ndarray]:
    """What a model's outputs are at each of STATES, with noise from the generators that a request's rows have."""
    session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    rows = []
    for state, generator in zip(STATES, row_generators(seed, len(STATES)), strict=True):
        noise = torch.rand(1, decision.noise_size, generator=generator).numpy()
        rows.append(session.run(None, {"observation": state[None]} | ({"noise": noise} if decision.noise_size else {})))
    outputs = [output.name for output in session.get_outputs()]
    return {name: np.concatenate(parts) for name, parts in zip(outputs, zip(*rows, strict=True), strict=True)}


@pytest.mark.parametrize("changes", PLANNERS.values(), ids=PLANNERS)
def test_every_planner_finds_the_same_plans_as_onnx(
    changes: dict[str, Any], tiny_policy: Policy, tiny_params: Params, tmp_path: Path
) -> None:
    policy = with_planner(tiny_policy, tiny_params, **changes)
    expected = policy.plan(STATES, row_generators(0, len(STATES)))
    decision = decision_of(policy, no_bounds(3)).eval()
    write_onnx(trace(decision), decision, tmp_path / "model.onnx")
    found = one_at_a_time(decision, tmp_path / "model.onnx")
    np.testing.assert_array_equal(found["codes"], expected.codes)
    np.testing.assert_allclose(found["actions"], expected.actions, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found["predicted_return"], expected.predicted_return, rtol=1e-4, atol=1e-3)
    assert len(np.unique(expected.codes, axis=0)) > 1


@pytest.mark.parametrize("kind", [BehaviourCloning, IqlPolicy, CqlPolicy, MopoPolicy])
def test_every_reactive_method_acts_alike_as_onnx_within_bounds(
    kind: type[MethodPolicy], tiny_params: Params, tmp_path: Path
) -> None:
    policy, bounds = reactive(kind, tiny_params), (np.full(3, -0.1, np.float32), np.array([0.1, np.inf, 0.05], np.float32))
    decision = decision_of(policy, bounds).eval()
    write_onnx(trace(decision), decision, tmp_path / "model.onnx")
    own = policy.act(STATES, [])
    expected = np.clip(own, *bounds)
    np.testing.assert_allclose(one_at_a_time(decision, tmp_path / "model.onnx")["actions"][:, 0], expected, atol=1e-5)
    assert (own < bounds[0]).any() and (own > bounds[1]).any() and (own == expected).any()


def reactive(kind: type[MethodPolicy], params: Params) -> Any:
    torch.manual_seed(0)
    windows = params.train_vqvae.windows
    normalizer = fit_normalizer(random_episodes([30, 40], observation_dim=11, action_dim=3), windows)
    return kind(getattr(params, f"train_{kind.name}"), LAYOUT, normalizer).eval()


@pytest.mark.parametrize(("kind", "horizon"), [(TrajectoryTransformer, 3), (TrajectoryTransformerQ, 1)])
def test_the_trajectory_transformer_finds_the_same_plans_as_onnx(
    kind: type[TrajectoryTransformer], horizon: int, tiny_params: Params, tmp_path: Path
) -> None:
    """With three steps, the window of two is filled, and read again."""
    params = getattr(tiny_params, f"train_{kind.name.replace('-', '_')}")
    search = params.search.model_copy(update={"horizon": horizon, "context": 1})
    windows = params.windows.model_copy(update={"length": 2})
    torch.manual_seed(0)
    rows = torch.randn(500, LAYOUT.transition_dim)
    policy = kind(
        params.model_copy(update={"search": search, "windows": windows}), LAYOUT, Normalizer.fit([rows.numpy()])
    ).eval()
    policy.discretizer = Discretizer.fit(rows, params.bins, "quantile")
    with torch.no_grad():
        policy.model.heads_XKE.mul_(50)  # so that it is not indifferent
    decision = decision_of(policy, no_bounds(3)).eval()
    write_onnx(trace(decision), decision, tmp_path / "model.onnx")
    expected, found = policy.plan(STATES, row_generators(0, len(STATES))), one_at_a_time(decision, tmp_path / "model.onnx")
    assert expect(decision, STATES, HISTORIES).decided_N.mean() > 0.8
    np.testing.assert_array_equal(found["codes"], expected.codes)
    np.testing.assert_allclose(found["actions"], expected.actions, rtol=1e-5)
    np.testing.assert_allclose(found["predicted_return"], expected.predicted_return, rtol=1e-4, atol=1e-4)
    assert len(np.unique(expected.codes, axis=0)) > 1


def test_a_planner_in_int8_is_refused_in_a_sentence(tiny_policy: Policy) -> None:
    params = tiny_policy.params.model_copy(update={"precision": "int8"})
    policy = Policy(tiny_policy.vqvae, tiny_policy.normalizer, tiny_policy.prior, params, tiny_policy.device)
    with pytest.raises(ValueError, match=r"planner\.precision int8 .*: export a version with a planner in float32"):
        decision_of(policy, no_bounds(3))


def test_a_decision_transformer_without_memory_is_refused_in_a_sentence(tiny_params: Params) -> None:
    params = tiny_params.model_copy(update={"train_dt": tiny_params.train_dt.model_copy(update={"context": 1})})
    with pytest.raises(ValueError, match=r"train_dt\.context 1 is not exported: export a version with a longer one"):
        decision_of(reactive(DecisionTransformer, params), no_bounds(3))


@pytest.mark.parametrize("seed", [0, 7, -1, 2**70])
def test_the_runner_draws_the_noise_that_a_server_draws_for_the_same_request(seed: int) -> None:
    runner = runpy.run_path(str(TEMPLATE / "run.py"))
    for row, generator in enumerate(row_generators(seed, 3)):
        expected = torch.rand(1000, generator=generator).numpy()
        np.testing.assert_array_equal(runner["noise"](runner["generator_seed"](seed, row), 1000), expected)


def test_states_and_bounds_are_those_of_the_training_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    episodes, layout = random_episodes([30, 40], observation_dim=4, action_dim=2), Layout(4, 2)
    normalizer = Normalizer.fit([np.random.default_rng(0).normal(size=(50, 8)).astype(np.float32)])
    save_episodes(Path("data/raw/mine/episodes"), [episodes], episodes.lengths)
    changes = {
        "action_bounds": "theirs",
        "action_low": [-2.0, None],
        "action_high": [3.0, 0.5],
        "action_names": ["a", "b"],
    }
    write_json(Path("data/raw/mine/validation.json"), validation_json() | changes)
    found = data_facts("mine", "ab" * 32, normalizer, layout, np.random.default_rng(0))
    np.testing.assert_array_equal(found.bounds, [[-2, -np.inf], [3, 0.5]])
    np.testing.assert_array_equal(found.states_NO, episodes.observations)  # fewer than 256, so all
    for row, start in ((0, 0), (29, 0), (30, 30), (69, 30)):  # of episodes of 30 and 40 steps
        assert len(found.histories[row].rewards) == row - start
        np.testing.assert_array_equal(found.histories[row].actions, episodes.actions[start:row])
    assert found.action_names == ["a", "b"] and found.drawn_from == "data/raw/mine/episodes"
    other = data_facts("mine", "cd" * 32, normalizer, layout, np.random.default_rng(0))
    assert normalizer.min is not None and normalizer.max is not None
    assert (normalizer.min[:4] <= other.states_NO).all() and (other.states_NO <= normalizer.max[:4]).all()
    assert other.states_NO.shape == (256, 4) and np.isinf(other.bounds).all() and "does not hold" in other.drawn_from


# ---------------------------------------------------------------- a whole folder


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where this file's tests share one exported folder, because it takes half a minute."""
    return tmp_path_factory.mktemp("built")


@pytest.fixture
def exported(built: Path, tiny_policy: Policy, tiny_policy_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The version of a registry, a tiny TAP with a beam search, exported by the command line."""
    monkeypatch.chdir(built)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{built}/mlflow.db")
    if not (built / "robot").exists():
        facts: dict[str, Any] = {"dataset": "my-tiny", "dataset_digest": "ab" * 32, "seed": 0, "scale": "cpu"}
        with tracking.start_run("evaluate", name="evaluate", params={}, tags=facts, runtime=Runtime()) as run:
            digest = log_policy(run, tiny_policy_folder, STATES[:2], 3)
            protocol = "2 episodes, seeds 0-1, re-planned every 3 steps, last checkpoint"
            run.register("tap-my-tiny", facts | {"method": "tap", "protocol": protocol, MODEL_DIGEST: digest}, "# A card\n")
        result = CliRunner().invoke(app, ["export", "my-tiny@1", "robot"], catch_exceptions=False)
        assert result.exit_code == 0 and "checked at 256 states" in result.output, result.output
    return built / "robot"


@pytest.fixture
def without_torch(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs Python with numpy and onnxruntime alone."""
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    for module in (np, onnxruntime):
        package = Path(str(module.__file__)).parent
        for folder in (package, package.with_name(f"{package.name}.libs")):
            if folder.exists():
                (libraries / folder.name).symlink_to(folder)

    def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        path = [str(libraries), sysconfig.get_path("stdlib"), sysconfig.get_config_var("DESTSHARED")]
        start = f"import sys; sys.path[:] = {path}; "
        return subprocess.run([sys.executable, "-I", "-S", "-c", start + code, *arguments], capture_output=True, text=True)

    return run


def test_a_folder_acts_without_torch_or_this_project(
    exported: Path, without_torch: Callable[..., subprocess.CompletedProcess[str]], tiny_policy: Policy
) -> None:
    for module in ("torch", "tap", "pipelines"):
        assert f"No module named '{module}'" in without_torch(f"import {module}").stderr
    code = (
        f"sys.path.append({str(exported)!r}); import json, run; policy = run.Policy(); "
        "print(json.dumps(policy.act(json.loads(sys.argv[1]), 5).tolist()))"
    )
    result = without_torch(code, json.dumps(STATES.tolist()))
    assert result.returncode == 0, result.stderr
    np.testing.assert_allclose(json.loads(result.stdout), tiny_policy.act(STATES, row_generators(5, len(STATES))), atol=1e-4)
    runs = without_torch(f"import runpy; runpy.run_path({str(exported / 'run.py')!r}, run_name='__main__')")
    assert runs.returncode == 0 and "expected" in runs.stdout, runs.stderr


def test_the_runner_refuses_wrong_observations_in_a_sentence(exported: Path) -> None:
    policy = runpy.run_path(str(exported / "run.py"))["Policy"]()
    for wrong, sentence in ((np.zeros((2, 12)), r"needs \(n, 11\)"), (np.full((1, 11), np.nan), "not finite")):
        with pytest.raises(ValueError, match=sentence):
            policy.act(wrong)


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no compiler")
def test_the_example_in_cpp_is_compiled_by_the_readme_and_acts_alike(exported: Path, tiny_policy: Policy) -> None:
    seed, state = 12345, STATES[0]
    arguments = [str(seed), *map(str, state)]
    found = run_example(exported, *arguments)
    expected = tiny_policy.act(state[None], [torch.Generator().manual_seed(seed)])[0]
    np.testing.assert_allclose(found, expected, atol=1e-4)
    command = ["./act", "../model.pt2", *arguments[:-1]]
    wrong = subprocess.run(command, cwd=exported / "cpp", capture_output=True, text=True, timeout=100)
    assert wrong.returncode == 2 and "11 numbers of an observation" in wrong.stderr


def test_a_policy_that_remembers_acts_alike_through_an_episode(
    without_torch: Callable[..., subprocess.CompletedProcess[str]], tiny_params: Params, tmp_path: Path
) -> None:
    policy, folder = reactive(DecisionTransformer, tiny_params), tmp_path / "robot"
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5)
    facts = {"model": "tap-x", "version": "1", "method": "dt", "dataset": "x", "plan_every": 1}
    checked = write_folder(policy, facts, DataFacts(STATES, HISTORIES, "here", no_bounds(3)), folder)
    assert checked.onnx.action_difference < 1e-4 and checked.package.action_difference < 1e-4

    code = (
        f"sys.path.append({str(folder)!r}); import json, run; states, *histories = json.loads(sys.argv[1]); "
        "print(json.dumps(run.Policy().act(states, histories=histories).tolist()))"
    )
    histories = [{name: array.tolist() for name, array in vars(history).items()} for history in HISTORIES[:12]]
    result = without_torch(code, json.dumps([STATES[:12].tolist(), *histories]))
    assert result.returncode == 0, result.stderr
    own = policy.act(STATES, [], HISTORIES)
    np.testing.assert_allclose(json.loads(result.stdout), own[:12], atol=1e-4)
    assert np.abs(own - policy.act(STATES, [])).max(axis=1)[1:].min() > 1e-3  # so that histories matter
    runs = without_torch(f"import runpy; runpy.run_path({str(folder / 'run.py')!r}, run_name='__main__')")
    assert runs.returncode == 0, runs.stderr

    if shutil.which("g++"):
        found = run_example(folder, *map(str, STATES[:8].flatten())).reshape(8, 3)
        history = History.empty(11, 3)
        for state, action in zip(STATES[:8], found, strict=True):
            np.testing.assert_allclose(action, policy.act(state[None], [], [history])[0], atol=1e-4)
            history = history.after(state, action, 0.0, 100)


def run_example(folder: Path, *arguments: str) -> np.ndarray:
    """What the example in C++ prints, compiled as the README says."""
    source = (folder / "cpp/act.cpp").read_text()
    assert len(source.splitlines()) <= 60
    (commands,) = [part for part in (folder / "README.md").read_text().split("```bash\n") if part.startswith("cd cpp")]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    compile_ = commands.partition("./act")[0]
    subprocess.run(["bash", "-ec", compile_], cwd=folder, env=environment, check=True, timeout=600)
    command = ["./act", "../model.pt2", *arguments]
    result = subprocess.run(command, cwd=folder / "cpp", capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    return np.array(result.stdout.split(), float)


def test_a_folder_says_what_it_is(exported: Path, tiny_policy: Policy) -> None:
    facts = json.loads((exported / "policy.json").read_text())
    assert (facts["model"], facts["version"], facts["method"], facts["dataset"]) == ("tap-my-tiny", "1", "tap", "my-tiny")
    assert facts["plan_every"] == 3 and facts["noise_size"] == 8 + 8
    assert facts["planner"] == tiny_policy.params.model_dump(mode="json")
    unbounded = {"low": [None] * 3, "high": [None] * 3}
    assert facts["observation"]["dim"] == 11 and facts["action"] == {"dim": 3, "names": None} | unbounded
    for measured in (facts["check"]["onnx"], facts["check"]["package"]):
        assert measured["same_codes"] >= 0.999 and measured["action_difference"] <= 1e-4
    sample = json.loads((exported / "sample.json").read_text())
    generator = torch.Generator().manual_seed(sample["generator"])
    plan = tiny_policy.plan(np.array([sample["observation"]]), [generator])
    np.testing.assert_array_equal(plan.codes[0], sample["codes"])
    np.testing.assert_allclose(plan.actions[0, 0], sample["action"], atol=1e-6)


def test_the_check_refuses_a_model_that_was_changed(exported: Path, tiny_policy: Policy, tmp_path: Path) -> None:
    decision = decision_of(tiny_policy, no_bounds(3)).eval()
    expected = expect(decision, STATES, HISTORIES)
    folder = shutil.copytree(exported, tmp_path / "changed")
    check(folder, expected, decision, np.ones(3), "here")
    model = onnx.load(folder / "model.onnx")
    (bias,) = [each for each in model.graph.initializer if list(each.dims) == [LAYOUT.token_dim]]  # of the decoder's last layer
    array = numpy_helper.to_array(bias).copy()
    array[LAYOUT.action] += 1e-3
    bias.CopyFrom(numpy_helper.from_array(array, bias.name))
    onnx.save(model, folder / "model.onnx")
    with pytest.raises(ValueError, match=r"model\.onnx does not act as the policy .* so nothing was exported"):
        check(folder, expected, decision, np.ones(3), "here")
    shutil.copy(exported / "model.onnx", folder)
    with torch.no_grad():
        tiny_policy.prior.to_logits.bias.add_(torch.linspace(-1, 1, 8))  # other codes are likely
    with pytest.raises(ValueError, match=r"does not act as the policy .* codes are the same"):
        check(folder, expect(decision, STATES, HISTORIES), decision, np.ones(3), "here")


def test_a_failed_export_leaves_nothing(tiny_params: Params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, folder = reactive(BehaviourCloning, tiny_params), tmp_path / "robots/arm"
    facts = {"model": "tap-x", "version": "1", "method": "bc", "dataset": "x", "plan_every": 1}
    data = DataFacts(STATES, HISTORIES, "here", no_bounds(3))
    monkeypatch.setattr("pipelines.exporting.check.TOLERANCE", -1.0)
    with pytest.raises(ValueError, match="does not act as the policy"):
        write_folder(policy, facts, data, folder)
    assert list(folder.parent.iterdir()) == []
    monkeypatch.undo()
    checked = write_folder(policy, facts, data, folder)
    assert checked.onnx.same_codes is None and checked.onnx.action_difference < 1e-5
    names = {"README.md", "cpp", "model.onnx", "model.pt2", "policy.json", "run.py", "sample.json"}
    assert {path.name for path in folder.iterdir()} == names and [path.name for path in folder.parent.iterdir()] == ["arm"]
    with pytest.raises(ValueError, match="arm exists: name a folder that does not"):
        write_folder(policy, facts, data, folder)


def test_a_version_that_does_not_exist_is_refused(exported: Path) -> None:
    for policy in ("my-tiny@champion", "my-tiny@7", "other"):
        with pytest.raises(ValueError, match="lists the versions and their aliases"):
            CliRunner().invoke(app, ["export", policy, "elsewhere"], catch_exceptions=False)
    assert not Path("elsewhere").exists()


def test_without_the_extra_the_remedy_is_a_sentence(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ValueError, match=r"exporting needs onnxscript: run `pip install .*\[export\]'`"):
        CliRunner().invoke(app, ["export", "my-tiny@1", "elsewhere"], catch_exceptions=False)
