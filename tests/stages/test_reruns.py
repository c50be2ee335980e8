"""What goes stale after which edit: the table in docs/architecture.md, row by row, and `deps` against the real imports."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any

import grimp
import networkx
import pytest
import yaml
from conftest import ROOT, run, tiny_tree
from dvc.repo import Repo

from pipelines.orchestration.repro import instances
from pipelines.stages.params import code_of
from tap.methods.catalog import CATALOG
from tap.settings import METHODS, params_section

pytestmark = pytest.mark.xdist_group("pipeline")  # one finished project for all

STAGES = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
TRAINING = ["train_vqvae", "train_prior", "train_critic", "train_actor"]
# Imported by stages, yet no part of what their results depend on: what tracks, registers, serves and describes, and what reads
# params and files, whose effect stands in the files themselves.
BESIDE = ("pipelines.command_line", "pipelines.stages.params", "tap.data.catalog", "tap.files", "tap.methods.catalog",
          "tap.results", "tap.serving", "tap.settings", "tap.tracking", "tap.yaml_file")  # fmt: skip
EVALUATIONS = {"evaluate", "ablations", "model_ablations"}  # of TAP
# The module of a method's training, and the module of its policy, by method.
OF_METHODS = {name: (f"pipelines.stages.{params_section(name)}", f"tap.methods.{CATALOG[name].module}") for name in METHODS}


def modules_of(stage: str) -> set[str]:
    """The modules of the stage's `deps`; a folder stands for all of its modules."""
    files = [dep for dep in STAGES[stage]["deps"] if dep.startswith(("tap/", "pipelines/"))]
    found = {file for dep in files for file in ([dep] if dep.endswith(".py") else (ROOT / dep).rglob("*.py"))}
    paths = {Path(file).relative_to(ROOT) if Path(file).is_absolute() else Path(file) for file in found}
    return {".".join(path.with_suffix("").parts) for path in paths if path.name != "__init__.py"}


def imported_by(stage: str, *others: str) -> set[str]:
    """The modules that the stage's module and `others` import, other than through modules beside its results."""
    graph = grimp.build_graph("tap", "pipelines")
    modules = {STAGES[stage]["cmd"].split()[2], *others}
    packages = {name for name in graph.modules if graph.find_children(name)}
    for name in graph.modules:
        if name.startswith(BESIDE) and name not in modules and (stage, name) != ("params", "tap.settings"):
            for imported in graph.find_modules_directly_imported_by(name):
                graph.remove_import(importer=name, imported=imported)
    return modules.union(*(graph.find_upstream_modules(module) for module in modules)) - packages


@pytest.mark.parametrize("stage", STAGES)
def test_deps_name_the_imported_code_that_decides_results(stage: str) -> None:
    """With the digests of each method's own code, which are among its params."""
    if stage in ("train_methods", "methods"):
        of_methods = [of_method if stage == "train_methods" else of_method[1:] for of_method in OF_METHODS.values()]
    else:
        of_methods = [()]
    every = set()
    for modules in of_methods:
        imported = imported_by(stage, *modules)
        missing = imported - modules_of(stage) - code_of(*modules).keys()
        assert {name for name in missing if not name.startswith(BESIDE)} == set()
        every |= imported
    files = {dep.removesuffix(".py").replace("/", ".") for dep in STAGES[stage]["deps"] if dep.endswith(".py")}
    assert files <= every
    beside = {name for name in modules_of(stage) if name.startswith(BESIDE)}
    assert stage == "params" or beside <= {"tap.methods.catalog", "tap.results"}  # which the report prints


@pytest.mark.parametrize("name", [*TRAINING, *METHODS])
def test_a_checkpoint_is_of_the_code_that_deps_name(name: Any) -> None:
    if name in METHODS and CATALOG[name].extra:
        pytest.importorskip("torchrl", reason="the extra offline-rl is not installed")
    module = name if name in TRAINING else params_section(name)
    stage = name if name in TRAINING else "train_methods"
    code = f"import json, pipelines.stages.{stage}, pipelines.stages.{module}, pipelines.stages.training as t; "
    code += "print(json.dumps(list(t.decisive_code())))"
    loaded = json.loads(subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True).stdout)
    named = modules_of(stage) | (set() if name in TRAINING else code_of(*OF_METHODS[name]).keys())
    assert {name for name in loaded if name not in ("tap.model", "tap.methods.catalog")} == named


@pytest.fixture(scope="module")
def edited(reproduced: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the finished project, for edits."""
    folder = tmp_path_factory.mktemp("reruns") / "project"
    shutil.copytree(reproduced, folder)
    run(folder, "dvc", "repro", "--quiet")  # other tests may have left the report stale
    assert first_stale(folder) == set()
    return folder


def first_stale(project: Path) -> set[str]:
    """Of the stages that are stale, by `dvc status` once params are resolved, those that build on no other stale one."""
    with chdir(project), pytest.MonkeyPatch.context() as patch, Repo() as repo:
        patch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)  # the stage `params` runs "python"
        repo.reproduce(["params"])
        stale = set(repo.status())
        graph = networkx.relabel_nodes(repo.index.graph, lambda stage: stage.addressing)  # edges lead to what a stage reads
        first = {name for name in stale if not stale & networkx.descendants(graph, name)}
        return {name.rpartition(":")[2] for name in first}  # without the path of dvc.yaml


def test_the_flow_knows_what_dvc_knows_about_the_order(project: Path) -> None:
    with chdir(project), Repo() as repo:
        of_dvc = networkx.relabel_nodes(repo.index.graph, lambda stage: stage.addressing.rpartition(":")[2])
        every = instances(None, None)
    assert set(of_dvc) == set(map(str, every))
    of_dvc.remove_node("params")
    of_flow = networkx.DiGraph((str(each), str(other)) for each in every for other in every if each.builds_on(other))
    assert set(networkx.transitive_closure(of_flow).edges) == set(networkx.transitive_closure(of_dvc).edges)


def edit_params(project: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = yaml.safe_load((project / "params.yaml").read_text())
    change(content)
    (project / "params.yaml").write_text(yaml.safe_dump(content))


def names(stages: set[str], dataset: str = "my-hopper") -> set[str]:
    """The stages' instances of a dataset."""
    of_models = ("ablation_vqvae", "ablation_prior", "ablation_critic", "ablation_actor", "model_ablations")
    ablated = {"ablations": "-no-search"} | dict.fromkeys(of_models, "-unconditional")
    variants = ablated | {"train_methods": "-bc", "methods": "-bc"}
    return {f"{stage}@{dataset}{'' if stage == 'fetch' else '-3'}{variants.get(stage, '')}" for stage in stages}


def set_to(value: Any, *path: str) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        for key in path[:-1]:
            content = content.setdefault(key, {})
        content[path[-1]] = value

    return change


@pytest.fixture(autouse=True)
def restored(request: pytest.FixtureRequest) -> Any:
    """Each test finds the project as it was."""
    if "edited" not in request.fixturenames:
        yield
        return
    edited = request.getfixturevalue("edited")
    run(edited, "git", "stash", "--quiet", check=False)
    yield
    run(edited, "git", "checkout", "--quiet", ".")


@pytest.mark.parametrize(
    ("change", "stale"),
    [
        (set_to(1.0, "evaluate", "planner", "likelihood_weight"), names(EVALUATIONS | {"teacher"})),
        (set_to(3, "datasets", "my-hopper", "evaluate", "episodes"), names(EVALUATIONS | {"teacher"})),
        (set_to(0.1, "train_bc", "fit", "weight_decay"), names({"train_methods"})),
        (set_to([], "methods"), set()),
        (set_to(2, "ablations", "no-search", "evaluate", "planner", "beam_width"), names({"ablations"})),
        (set_to(2.0, "train_vqvae", "loss_weights", "action"), names({"train_vqvae", "ablation_vqvae"})),
        (set_to(0.9, "datasets", "my-hopper", "train_vqvae", "windows", "discount"), names({"train_vqvae", "ablation_vqvae"})),
        (set_to(0.2, "train_vqvae", "codebook", "dead_usage"), names({"train_vqvae", "ablation_vqvae"})),
        (set_to(0.2, "train_prior", "fit", "weight_decay"), names({"train_prior", "ablation_prior"})),
        (set_to(0.02, "train_critic", "fit", "weight_decay"), names({"train_critic", "ablation_critic"})),
        (set_to(0.02, "train_actor", "fit", "weight_decay"), names({"train_actor", "ablation_actor"})),
        (set_to(True, "fetch", "clip_actions"), names({"fetch"})),
    ],
)
def test_a_changed_param(edited: Path, change: Callable[[dict[str, Any]], None], stale: set[str]) -> None:
    edit_params(edited, change)
    assert first_stale(edited) == stale


@pytest.mark.parametrize(
    ("file", "stages"),
    [
        ("tap/tracking/run.py", set()),
        ("tap/tracking/registry.py", set()),
        ("tap/tracking/model_card.py", set()),
        ("tap/serving/policy.py", set()),
        ("tap/files.py", set()),
        ("pipelines/cli.py", set()),
        ("pipelines/orchestration/flow.py", set()),
        ("README.md", set()),
        ("tap/planning/planner.py", EVALUATIONS),
        ("tap/evaluation/rollout.py", EVALUATIONS | {"methods"}),
        ("tap/methods/behaviour_cloning.py", {"train_methods"}),
        ("tap/methods/iql.py", set()),  # another method, which is not listed
        ("pipelines/stages/train_iql.py", set()),
        ("tap/model/prior.py", {"train_prior", "ablation_prior"}),
        ("tap/model/critic.py", {"train_critic", "ablation_critic"}),
        ("tap/model/actor.py", {"train_actor", "ablation_actor"}),
        ("tap/model/vqvae.py", {"train_vqvae", "ablation_vqvae"}),
        ("tap/data/windows.py", {"train_vqvae", "ablation_vqvae"}),
        ("tap/data/hdf5.py", {"fetch"}),
    ],
)
def test_changed_code(edited: Path, file: str, stages: set[str]) -> None:
    with (edited / file).open("a") as module:
        module.write("\n# a comment\n")
    assert first_stale(edited) == names(stages)


def test_the_report_alone(edited: Path) -> None:
    with (edited / "tap/reporting/tables.py").open("a") as module:
        module.write("\n# a comment\n")
    assert first_stale(edited) == {"report"}


def test_a_dataset_added(edited: Path) -> None:
    fetch = yaml.safe_load((edited / "params.yaml").read_text())["datasets"]["my-hopper"]["fetch"]
    edit_params(edited, set_to({"fetch": fetch} | tiny_tree(), "datasets", "another"))
    assert first_stale(edited) == {"fetch@another"}


def test_a_row_of_the_table_for_another_dataset(edited: Path) -> None:
    table = edited / "tap/data/d4rl_table.csv"
    table.write_text(table.read_text().replace("3234.3", "3000.0"))
    assert table.read_text().count("3000.0") > 3
    assert first_stale(edited) == set()


def test_equal_weights_leave_what_follows_up_to_date(edited: Path) -> None:
    """Trained again from nothing, by another run: lineage differs, weights do not."""
    lineage = edited / "data/lineage/train_vqvae/my-hopper-3.json"
    before = lineage.read_text()
    shutil.rmtree(edited / ".checkpoints")
    run(edited, "dvc", "repro", "--force", "--single-item", "train_vqvae@my-hopper-3")
    assert lineage.read_text() != before
    assert first_stale(edited) == set()
