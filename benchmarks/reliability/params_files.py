"""Files params.yaml made at random: a valid one of all sections, with edits of its lines and characters."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dvc.utils.serialize import load_yaml
from hypothesis import strategies as st

from pipelines.stages.params import FOLDER, StageParams
from tap.settings import METHODS, STAGES, ParamsFile, params_section, suite_of

FIT = """
    updates: 20
    effective_share: 1.0
    batch_size: 16
    learning_rate: 1.0e-3
    schedule: constant
    warmup_updates: 0
    ema_decay: 0
    weight_decay: 0.1
    betas: [0.9, 0.95]
    clip_norm: 1.0
    held_out: 0.1
    log_every: 5
    checkpoint_every: 10
"""
TRANSFORMER = "{layers: 1, width: 16, heads: 2, dropout: 0.0}"
BASE = f"""# Params of two datasets.
scale: cpu
seeds: [0, 1]
datasets:
  hopper-medium-v2:
    train_vqvae:
      windows: {{termination_penalty: -10.0}}
    evaluate:
      planner:
        beam_width: 8
  mine:
    fetch:
      path: mine.hdf5
      max_episode_steps: 50
      environment_kwargs: {{gravity: 9.8}}
methods: [bc]
ablate:
  datasets: [mine]
  planners: [wide]
  models: [small]
ablations:
  wide: {{evaluate: {{planner: {{beam_width: 99}}}}}}
  small:
    train_vqvae:
      codebook: {{size: 4}}
fetch:
  clip_actions: false
  max_jump: null
train_vqvae:
  latent_step: 3
  bottleneck: pool
  decoder: conditional
  codebook: {{size: 8, dim: 4, decay: 0.9, commitment_weight: 1.0, dead_usage: 0.1}}
  transformer: {TRANSFORMER}
  loss_weights: {{observation: 1.0, action: 5.0, first_action: 1.0, reward: 1.0, return_to_go: 1.0}}
  fit:{FIT}
train_prior:
  transformer: {TRANSFORMER}
  fit:{FIT}
train_critic:
  members: 5
  width: 16
  episode_share: 0.7
  fit:{FIT}
train_actor:
  members: 2
  width: 16
  fit:{FIT}
train_bc:
  network: {{layers: 1, width: 8}}
  fit:{FIT}
evaluate:
  seed: 1000
  plan_every: 1
  episodes: 2
  latency_budget_ms: 200
  planner:
    search: beam
    horizon: 6
    expansion_factor: 2
    samples: 16
    replacement: true
    likelihood_weight: 500.0
    likelihood_threshold: 0.05
    partial_threshold: false
    stop_at_end: false
    likeliest_codes: 32
    temperature: 0.5
    actor: false
scales:
  cpu:
    train_vqvae:
      all:
        windows: {{length: 6, discount: 0.99, termination_penalty: null, bootstrap_truncated: true, normalize: true}}
      locomotion: {{windows: {{termination_penalty: -100.0}}}}
    evaluate:
      all:
        planner: {{beam_width: 4}}
  paper: {{}}
"""
BOMB = ["a0: &a0 [x, x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
BOMB_OF_MAPPINGS = ["a0: &a0 {x: 1}"] + [
    f"a{n}: &a{n} {{{', '.join(f'k{k}: *a{n - 1}' for k in range(9))}}}" for n in range(1, 12)
]
BOMB_OF_MERGES = ["a0: &a0 {x: 1}"] + [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, 12)]
LADDER = ["a0: &a0 [x]"] + [f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, 2000)]
WORDS = r"""
on off yes No TRUE true ~ null Null NaN .nan .inf -.Inf '1' "0.5" '' "\0" "\e[2J" "\u2028" "a\nb" = << @x `x %x ! *nothing &b
010 0o17 0x1F 0b11 1_000 1e3 1E400 -0 +1 1. .5 1:30 3.0 2.5 2001-99-99 2001-12-14 2001-12-14t21:59:43.10-05:00 ünï [ { ] } [[]]
"""
VALUES = [
    *WORDS.split(),
    *("!!int x", "!!float x", "!!str 3", "!!python/object/apply:os.system [echo]", "!!binary aGk", "!!binary ?", "!!set {a}"),
    *("!!omap [a: 1]", "!!timestamp x", "!!bool x", "!!null x", "!thing {a: 1}", "!!seq {a: 1}", "!!map [1]", "&a [*a]"),
    *("&a {x: *a}", "{<<: {a: 1}}", "{<<: 3}", "{a: 1, a: 2}", "{? [1]: 2}", "{1: 2}", "{null: 1}", "{true: 1}", "{'': 1}"),
    *("[0, 0]", "['0', 1]", "- 1", "|\n  text", ">\n  text", "\U0001f600", "\ud7ff", "a: b: c", "# nothing", "-\t1"),
    *("9" * 5000, "[" * 50 + "]" * 50, "[" * 5000, "{a: " * 5000, "[" * 3000 + "]" * 3000, "{a: " * 30 + "1" + "}" * 30),
    *("[" + "1, " * 5000 + "]", "é" * 2000, "0x" + "F" * 5000),
]
INSERTED = [
    *("<<<<<<< HEAD", "=======", ">>>>>>> theirs", "<<<<<<< HEAD\nseeds: [1]\n=======\nseeds: [2]\n>>>>>>> theirs"),
    *(
        "---",
        "...",
        "%YAML 1.1",
        "%YAML 9.9",
        "%TAG ! tag:x,2000:",
        "\tseeds: [1]",
        "? [a, b]",
        "? a",
        ": b",
        "- a",
        "seeds: [3]",
    ),
    *("unknown: 1", "'': 1", "1: 1", "<<: *a", "&c scale: paper", '"\\0": 1', "\ufeff", "\x00", "\x1b[31m", "\x85", "\u2028"),
    *("seeds: [3]", "mine: {}", "  mine: {fetch: {path: x, max_episode_steps: 1}}", "datasets: {a/b: {}}"),
    *("\n".join(lines) for lines in (BOMB, BOMB_OF_MAPPINGS, BOMB_OF_MERGES, LADDER)),
    *("\n".join([*BOMB, "fetch: *a11"]), "\n".join([*BOMB_OF_MAPPINGS, "train_bc: *a11"])),
]


@dataclass(frozen=True)
class Case:
    """How to make one params.yaml: edits, each at a share of the file's lines or characters, with a text."""

    edits: list[tuple[str, float, str]]


def cases() -> st.SearchStrategy[Case]:
    leaf = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10)
    key = st.sampled_from(re.findall(r"[a-z_]+(?=:)", BASE)) | st.text(max_size=5)
    tree = st.recursive(leaf, lambda below: st.lists(below, max_size=3) | st.dictionaries(key, below, max_size=3), max_leaves=6)
    value = st.sampled_from(VALUES) | st.integers(-3, 300).map(str) | st.floats(-1, 2).map(str) | tree.map(json.dumps)
    place = st.floats(0, 1, exclude_max=True)
    text = {"value": value, "key": key, "insert": st.sampled_from(INSERTED), "characters": st.text(max_size=3)}
    edit = st.one_of(*(st.tuples(st.just(kind), place, text.get(kind, st.just(""))) for kind in ("value", "value", *EDITS)))
    return st.builds(Case, st.lists(edit, max_size=3))


def write(case: Case, path: Path) -> None:
    text = BASE
    for kind, where, new in case.edits:
        text = EDITS[kind](text, where, new)
    path.write_bytes(text.encode("utf-8", errors="surrogatepass"))


def _of_a_line(edit: Callable[[str, str], str]) -> Callable[[str, float, str], str]:
    def of_the_text(text: str, where: float, new: str) -> str:
        lines = text.split("\n")
        place = int(where * len(lines))
        return "\n".join([*lines[:place], edit(lines[place], new), *lines[place + 1 :]])

    return of_the_text


EDITS: dict[str, Callable[[str, float, str], str]] = {
    "value": _of_a_line(lambda line, new: f"{line.partition(':')[0]}: {new}"),
    "key": _of_a_line(lambda line, new: re.sub(r"[\w-]+(?=:)", lambda _: new, line, count=1)),
    "insert": _of_a_line(lambda line, new: f"{new}\n{line}"),
    "delete": _of_a_line(lambda line, new: ""),
    "duplicate": _of_a_line(lambda line, new: f"{line}\n{line}"),
    "indent": _of_a_line(lambda line, new: f" {line}"),
    "indent by a tab": _of_a_line(lambda line, new: f"\t{line.strip()}"),
    "characters": lambda text, where, new: text[: (at := int(where * len(text)))] + new + text[at + 1 :],
    "truncate": lambda text, where, new: text[: int(where * len(text))],
}

# ---------------------------------------------------------------- the plain reader


def plain_tree(path: Path) -> dict[str, Any]:
    """What DVC reads."""
    tree = load_yaml(path)
    assert isinstance(tree, dict)
    return tree


def disagreement(file: ParamsFile, resolved: Mapping[Path, StageParams], tree: Mapping[str, Any]) -> str | None:
    """The first value that is not what DVC reads, among the file's own and those merged for each dataset and stage."""
    # These name DVC's stages, so they must be the same to the letter.
    for key in ("scale", "seeds", "methods", "ablate"):
        if json.dumps(file.model_dump(mode="json")[key], sort_keys=True) != json.dumps(tree[key], sort_keys=True):
            return f"{key}: {tree[key]!r} is read as {getattr(file, key)!r}"
    for key in ("datasets", "ablations"):
        if list(getattr(file, key)) != list(tree[key]):
            return f"{key}: {list(tree[key])} are read as {list(getattr(file, key))}"
    files = {stage: stage for stage in STAGES if stage not in map(params_section, METHODS)}
    files |= {params_section(method): f"train_{method}" for method in tree["methods"]}
    for dataset, own in tree["datasets"].items():
        own = own or {}
        suite = (own.get("fetch") or {}).get("suite") or suite_of(dataset)
        merged: dict[str, Any] = {}
        _merge(merged, {stage: tree[stage] for stage in files if stage in tree})
        for stage, suites in (tree["scales"].get(tree["scale"]) or {}).items():
            for name in ("all", suite):
                _merge(merged, {stage: suites.get(name) or {}})
        _merge(merged, own)
        found = {stage: resolved[FOLDER / dataset / f"{name}.json"].model_dump()["params"] for stage, name in files.items()}
        if different := _different({stage: merged[stage] for stage in files}, found, dataset):
            return different
    return None


def _merge(into: dict[str, Any], layer: Mapping[str, Any]) -> None:
    for key, value in layer.items():
        if isinstance(value, dict):
            _merge(into.setdefault(key, {}), value)
        else:
            into[key] = value


def _different(written: Any, read: Any, where: str) -> str | None:
    if written == {} and read is None:  # layers merge, so an empty section sets nothing
        return None
    if isinstance(read, dict):
        written = {str(key): value for key, value in (written or {}).items()}
        keys = {key for key, value in read.items() if value is not None} | written.keys()
        found = (_different(written.get(key), read.get(key), f"{where}.{key}") for key in sorted(keys))
        return next(filter(None, found), None)
    if isinstance(read, list | tuple):
        same = len(read) == len(written) and not any(_different(*pair, "") for pair in zip(written, read, strict=True))
    elif isinstance(read, bool):
        words = ("on", "yes", "true", "t", "y") if read else ("off", "no", "false", "f", "n")
        same = written in (read, str(int(read))) or str(written).lower() in words
    elif isinstance(read, int | float):
        same = not isinstance(written, bool) and float(written) == float(read)
    else:
        same = str(written) == str(read)
    return None if same else f"{where}: {written!r} is read as {read!r}"
