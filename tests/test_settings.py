import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT
from dvc.utils.serialize import load_yaml

from tap.settings import METHODS, STAGES, Runtime, Scale, load_params, params_section, read_params_file, suite_of

EVERY_SUITE = ["hopper-medium-replay", "ant-medium-v2", "door-human-v0", "antmaze-medium-diverse-v0", "my-robot"]


@pytest.mark.parametrize("scale", ["cpu", "paper"])
@pytest.mark.parametrize("dataset", EVERY_SUITE)
def test_every_suite_is_complete_at_every_scale(params_yaml_with: Callable[..., Path], dataset: str, scale: Any) -> None:
    params = load_params(params_yaml_with(dataset), dataset, scale=scale)
    assert params.train_vqvae.latent_step == 3


def test_paper_scale_is_the_papers_table(params_yaml_with: Callable[..., Path]) -> None:
    path = params_yaml_with(*EVERY_SUITE)

    def table(dataset: str) -> tuple[Any, ...]:
        p = load_params(path, dataset, scale="paper")
        vqvae, planner = p.train_vqvae, p.evaluate.planner
        return (
            (vqvae.windows.length, vqvae.windows.discount, vqvae.windows.termination_penalty, vqvae.windows.normalize),
            (vqvae.transformer.layers, vqvae.transformer.width, vqvae.transformer.heads),
            (p.train_prior.transformer.layers, p.train_prior.transformer.width),
            (vqvae.codebook.size, vqvae.codebook.dim),
            (planner.beam_width, planner.expansion_factor, planner.horizon, planner.likelihood_threshold),
            (vqvae.fit.updates, vqvae.fit.batch_size, vqvae.fit.learning_rate),
            p.evaluate.episodes,
        )

    for dataset in EVERY_SUITE:
        p = load_params(path, dataset, scale="paper")
        assert (p.train_vqvae.latent_step, p.train_vqvae.codebook.decay, p.train_vqvae.transformer.dropout) == (3, 0.99, 0.1)
        assert (p.evaluate.planner.likelihood_weight, p.evaluate.planner.samples, p.evaluate.plan_every) == (500, 2048, 1)
    long, short = (97700, 512, 2e-4), (19500, 512, 2e-4)
    assert table("ant-medium-v2") == ((24, 0.99, -100.0, True), (4, 512, 4), (4, 512), (512, 512), (64, 4, 15, 0.05), long, 20)
    antmaze = (15, 0.998, None, False), (4, 512, 4), (4, 512), (8192, 512), (2, 4, 15, 0.05), long, 100
    assert table("antmaze-medium-diverse-v0") == antmaze
    assert table("door-human-v0") == ((24, 0.99, None, True), (3, 256, 4), (3, 256), (512, 512), (256, 4, 24, 0.05), short, 20)


def test_the_layers_rank_as_documented(params_yaml_with: Callable[..., Path]) -> None:
    path = params_yaml_with(
        datasets={"hopper-a": {"evaluate": {"planner": {"beam_width": 7}}}, "hopper-b": None},
        ablations={"wide": {"evaluate": {"planner": {"beam_width": 99}}}},
    )
    default = load_params(path, "hopper-b").evaluate.planner.beam_width
    assert default not in (7, 99)
    assert load_params(path, "hopper-a").evaluate.planner.beam_width == 7
    assert load_params(path, "hopper-a", ablation="wide").evaluate.planner.beam_width == 99
    assert load_params(path, "hopper-a").train_vqvae.windows.termination_penalty == -100.0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"train_vqvae": {"fit": {"updtes": 3}}},
            "datasets.hopper-a.train_vqvae.fit.updtes: unknown key; did you mean 'updates'",
        ),
        ({"train_vqvae": {"fitt": {"updates": 3}}}, "datasets.hopper-a.train_vqvae.fitt: unknown key; did you mean 'fit'"),
        ({"train_vqvea": {}}, "datasets.hopper-a.train_vqvea: unknown stage; did you mean 'train_vqvae'"),
        (
            {"train_vqvae": {"fit": {"updates": "many"}}},
            r"datasets.hopper-a.train_vqvae.fit.updates: .*integer.* \(is 'many'\)",
        ),
        ({"train_vqvae": {"fit": 3}}, "datasets.hopper-a.train_vqvae.fit: fit is a section, not a value"),
        ({"train_vqvae": {"latent_step": 5}}, "train_vqvae: windows.length 12 is not a multiple of latent_step 5"),
        (
            {"evaluate": {"planner": {"horizon": 7}}},
            "evaluate.planner.horizon 7 is not a multiple of train_vqvae.latent_step 3",
        ),
        (
            {"evaluate": {"planner": {"horizon": 18}}},
            "evaluate.planner.horizon 18 is longer than train_vqvae.windows.length 12",
        ),
        ({"evaluate": {"plan_every": 15}}, "evaluate.plan_every 15 is more than evaluate.planner.horizon 12"),
        (
            {"train_vqvae": {"bottleneck": "attention"}, "evaluate": {"planner": {"search": "beam"}}},
            "evaluate.planner.search: a beam search decodes partial plans",
        ),
        (
            {"train_vqvae": {"bottleneck": "attention"}, "evaluate": {"planner": {"search": "prior_mean"}}},
            "evaluate.planner.search: prior_mean decodes single codes",
        ),
        (
            {"evaluate": {"plan_every": 4, "planner": {"search": "critic_weighted"}}},
            "evaluate.plan_every 4 is more than train_vqvae.latent_step 3: plans of .* critic_weighted are one code long",
        ),
        ({"fetch": "hopper.hdf5"}, "datasets.hopper-a.fetch: fetch is a section, not a value"),
        ({"evaluate": {"planner": {"temperature": 0}}}, "datasets.hopper-a.evaluate.planner.temperature: .*greater than 0"),
        ({"train_vqvae": {"windows": {"bootstrap_truncated": True, "discount": 1.0}}}, "needs a discount below 1"),
        (
            {"train_prior": {"fit": {"updates": 50, "warmup_updates": 50}}},
            "train_prior.fit: warmup_updates 50 is not below updates 50",
        ),
        ({"train_prior": {"transformer": {"heads": 5}}}, "train_prior.transformer: width .* is not a multiple of heads 5"),
        ({"train_mopo": {"dynamics": {"elites": 8}}}, "train_mopo.dynamics: elites 8 are more than members 7: lower elites"),
        (
            {"train_mopo": {"dynamics": {"updates": 100}, "fit": {"warmup_updates": 100}}},
            "train_mopo: fit.warmup_updates 100 is not below dynamics.updates 100",
        ),
        (
            {"train_prior": {"fit": {"learning_rate": float("nan")}}},
            "datasets.hopper-a.train_prior.fit.learning_rate: .*finite",
        ),
    ],
)
def test_mistakes_name_their_path(params_yaml_with: Callable[..., Path], overrides: dict[str, Any], message: str) -> None:
    path = params_yaml_with(datasets={"hopper-a": overrides})
    with pytest.raises(ValueError, match=message) as error:
        load_params(path, "hopper-a")
    assert str(error.value).startswith(str(path))


@pytest.mark.parametrize("seeds", [["0"], [1.0], [True]])
def test_seeds_are_integers_as_dvc_writes_them_into_the_names_of_stages(
    params_yaml_with: Callable[..., Path], seeds: list[Any]
) -> None:
    with pytest.raises(ValueError, match=r"params\.yaml: seeds.*: Input should (be a valid integer|not be true or false)"):
        read_params_file(params_yaml_with(seeds=seeds))


@pytest.mark.parametrize(
    "overrides",
    [
        {"train_vqvae": {"fit": {"updates": True}}},
        {"train_vqvae": {"fit": {"betas": [0.9, False]}}},
        {"train_vqvae": {"windows": {"termination_penalty": True}}},
        {"fetch": {"max_episode_steps": True}},
    ],
)
def test_true_is_not_one(params_yaml_with: Callable[..., Path], overrides: dict[str, Any]) -> None:
    path = params_yaml_with(datasets={"hopper-a": overrides})
    with pytest.raises(ValueError, match=r"datasets\.hopper-a\..*: Input should not be true or false \(is "):
        load_params(path, "hopper-a")


def test_of_many_mistakes_the_first_are_listed(params_yaml_with: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match=r"params\.yaml: and 80 more mistakes$") as error:
        read_params_file(params_yaml_with(**{f"unknown{number}": 1 for number in range(100)}))
    assert len(str(error.value).splitlines()) == 21


def test_typos_at_the_top_and_in_names(params_yaml_with: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match="sceds: unknown key; did you mean 'seeds'"):
        read_params_file(params_yaml_with(sceds=[1]))
    path = params_yaml_with("hopper-medium-v2")
    with pytest.raises(ValueError, match="'hopper-medum-v2' is not listed; did you mean 'hopper-medium-v2'"):
        load_params(path, "hopper-medum-v2")
    with pytest.raises(ValueError, match="ablations: 'no-serch' is not listed; did you mean 'no-search'"):
        load_params(path, "hopper-medium-v2", ablation="no-serch")
    with pytest.raises(ValueError, match=r"scale: Input should be 'cpu' or 'paper'"):
        read_params_file(params_yaml_with(scale="papper"))
    scales = {"cpu": {"train_vqvea": {"all": {}}}}
    with pytest.raises(ValueError, match=r"scales.cpu.train_vqvea: unknown stage; did you mean 'train_vqvae'"):
        load_params(params_yaml_with("hopper-a", scales=scales), "hopper-a")
    scales = {"paper": {"train_vqvae": {"locomtion": {}}}}  # a suite, and at the scale that is not chosen
    with pytest.raises(ValueError, match=r"scales.paper.train_vqvae.locomtion: unknown suite; did you mean 'locomotion'"):
        load_params(params_yaml_with("hopper-a", scales=scales), "hopper-a")


@pytest.mark.parametrize("name", ["a/b", "a.b", "a b", "-a", ""])
def test_names_that_would_not_name_files_and_stages_are_refused(params_yaml_with: Callable[..., Path], name: str) -> None:
    with pytest.raises(
        ValueError, match=rf"datasets: '{re.escape(name)}' names files and stages: use letters, digits, - and _"
    ):
        read_params_file(params_yaml_with(name))
    with pytest.raises(ValueError, match=r"ablations: .* names files and stages"):
        read_params_file(params_yaml_with("hopper-a", ablations={name: {}}))


def test_params_are_read_as_dvc_reads_them(params_yaml_with: Callable[..., Path]) -> None:
    path = params_yaml_with("hopper-a")
    original = path.read_text()
    path.write_text(re.sub(r"^seeds:.*?(?=^\w)", "seeds: [010, 0o17]\n", original, flags=re.MULTILINE | re.DOTALL))
    assert read_params_file(path).seeds == load_yaml(path)["seeds"] == [10, 15]
    path.write_text(original + "seeds: [3]\n")
    with pytest.raises(ValueError, match=r'params.yaml, line \d+: found duplicate key "seeds": keep one'):
        read_params_file(path)
    path.write_text(f"<<<<<<< HEAD\n{original}=======\n{original}>>>>>>> other\n")
    with pytest.raises(ValueError, match=r"params.yaml, line 1: two versions conflict since a merge: keep one version"):
        read_params_file(path)
    with pytest.raises(ValueError, match="seeds: 1 is listed twice: keep one"):
        read_params_file(params_yaml_with("hopper-a", seeds=[1, 2, 1]))


def test_a_variable_that_is_set_but_empty_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [str(field.validation_alias) for field in Runtime.model_fields.values()]
    for name in names:
        monkeypatch.delenv(name, raising=False)
    default = Runtime(_env_file=None)  # type: ignore[call-arg]
    for name in names:
        monkeypatch.setenv(name, "")
    assert Runtime(_env_file=None) == default  # type: ignore[call-arg]
    assert default.outbox == Path(".tracking")


@pytest.mark.parametrize("dataset", EVERY_SUITE)
@pytest.mark.parametrize("scale", ["cpu", "paper"])
def test_every_method_holds_out_what_tap_holds_out(params_yaml_with: Callable[..., Path], dataset: str, scale: Any) -> None:
    params = load_params(params_yaml_with(dataset, methods=list(METHODS)), dataset, scale=scale)
    for section in ("train_prior", *map(params_section, METHODS)):
        assert getattr(params, section).fit.held_out == params.train_vqvae.fit.held_out


def test_an_unknown_method_is_refused(params_yaml_with: Callable[..., Path]) -> None:
    known = ".*".join(f"'{method}'" for method in METHODS)
    with pytest.raises(ValueError, match=rf"methods.0: Input should be {known} \(is 'cb'\)"):
        read_params_file(params_yaml_with(methods=["cb"]))
    assert read_params_file(params_yaml_with(methods=[])).methods == []


def test_a_listed_method_needs_its_params_and_another_does_not(params_yaml_with: Callable[..., Path]) -> None:
    content = yaml.safe_load(params_yaml_with(*EVERY_SUITE).read_text())
    del content["train_bc"]
    path = params_yaml_with(*EVERY_SUITE)
    path.write_text(yaml.safe_dump(content | {"methods": []}))
    assert load_params(path, EVERY_SUITE[0]).train_bc is None
    path.write_text(yaml.safe_dump(content | {"methods": ["bc"]}))
    with pytest.raises(ValueError, match="train_bc: is missing, but `methods` lists 'bc'"):
        load_params(path, EVERY_SUITE[0])


def test_ablate_lists_names_of_the_right_kind(params_yaml_with: Callable[..., Path]) -> None:
    for ablate, message in (
        ({"datasets": ["ant"], "planners": [], "models": []}, "ablate.datasets: 'ant' is not listed under datasets: add it"),
        ({"datasets": [], "planners": ["no-serch"], "models": []}, "ablate.planners: 'no-serch' .* did you mean 'no-search'"),
        ({"datasets": [], "planners": ["unconditional"], "models": []}, "'unconditional' belongs under ablate.models"),
        ({"datasets": [], "planners": [], "models": ["no-search"]}, "'no-search' belongs under ablate.planners"),
    ):
        with pytest.raises(ValueError, match=message):
            read_params_file(params_yaml_with("hopper-medium-v2", ablate=ablate))


@pytest.mark.parametrize("dataset", ["hopper-medium-replay", "pen-human-v0"])
@pytest.mark.parametrize("ablation", read_params_file(ROOT / "params.yaml").ablations)
def test_every_ablation_changes_what_it_names_and_nothing_else(
    params_yaml_with: Callable[..., Path], ablation: str, dataset: str
) -> None:
    path = params_yaml_with(dataset)
    # Nothing changes where it is the scale's own; a horizon may be longer than the windows of the cpu scale.
    scale: Scale = "paper" if ablation in ("horizon-15", "horizon-21") else "cpu"
    plain = load_params(path, dataset, scale=scale)
    ablated = load_params(path, dataset, scale=scale, ablation=ablation)
    changed = {stage for stage in STAGES if getattr(plain, stage) != getattr(ablated, stage)}
    named = set(read_params_file(path).ablations[ablation].model_dump(exclude_defaults=True))
    own = ablation == f"horizon-{plain.evaluate.planner.horizon}" and scale == "paper"
    assert changed == named - ({"evaluate"} if own else set())


def test_a_value_set_twice_is_refused(params_yaml_with: Callable[..., Path]) -> None:
    path = params_yaml_with(evaluate={"seed": 1, "episodes": 3})
    with pytest.raises(ValueError, match=r"evaluate.episodes and scales.cpu.evaluate.all.episodes both set one value"):
        load_params(path, "hopper-medium-replay")


def test_a_missing_or_broken_file_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        read_params_file(tmp_path / "params.yaml")
    (tmp_path / "params.yaml").write_text("scale: [")
    with pytest.raises(ValueError, match="not valid YAML"):
        read_params_file(tmp_path / "params.yaml")


def test_a_batch_is_shared_equally_or_not_at_all(params_yaml_with: Callable[..., Path]) -> None:
    fit = load_params(params_yaml_with(), "hopper-medium-replay", scale="paper").train_vqvae.fit
    assert fit.batch_size_per_process(8) == 64
    with pytest.raises(ValueError, match=r"fit\.batch_size 512 is not divisible by the world size 3"):
        fit.batch_size_per_process(3)


def test_suites_are_told_by_the_first_word() -> None:
    names = ["hopper-medium-v2", "pen-human-v0", "antmaze-ultra-play-v0", "ant-medium-v2", "stochastic-hopper-expert", "robot"]
    assert [suite_of(name) for name in names] == ["locomotion", "adroit", "antmaze", "locomotion", "locomotion", "custom"]


def test_the_environment_sets_runtime_and_never_params(monkeypatch: pytest.MonkeyPatch) -> None:
    before = load_params(ROOT / "params.yaml", "hopper-medium-replay")
    monkeypatch.setenv("TAP_DEVICE", "cuda:1")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://localhost:1")
    for name in ("SCALE", "TAP_SCALE", "SEEDS", "EPISODES"):
        monkeypatch.setenv(name, "3")
    assert (Runtime().device, Runtime().tracking_uri) == ("cuda:1", "http://localhost:1")
    assert load_params(ROOT / "params.yaml", "hopper-medium-replay") == before


def test_without_rewards_there_is_none_to_replace(params_yaml_with: Callable[..., Path]) -> None:
    """The suite's default is a penalty."""
    imitated = {"fetch": {"path": "mine.hdf5", "max_episode_steps": 5, "reward": "none"}}
    path = params_yaml_with(datasets={"hopper-mine": imitated})
    with pytest.raises(ValueError, match=r"train_vqvae\.windows\.termination_penalty replaces a reward.*set it to null"):
        load_params(path, "hopper-mine")
    path = params_yaml_with(datasets={"hopper-mine": imitated | {"train_vqvae": {"windows": {"termination_penalty": None}}}})
    assert load_params(path, "hopper-mine").fetch.reward == "none"


def test_returns_are_not_weighed_where_plans_are_chosen_by_likelihood(params_yaml_with: Callable[..., Path]) -> None:
    planner = {"search": "critic_weighted", "objective": "likelihood"}
    path = params_yaml_with(datasets={"mine": {"evaluate": {"planner": planner}}})
    with pytest.raises(
        ValueError, match="critic_weighted needs returns, but plans are chosen by likelihood alone: use prior_mean"
    ):
        load_params(path, "mine")
