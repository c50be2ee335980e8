import csv
from pathlib import Path
from typing import Any

import pytest
from recordings import fetch

import tap.data.catalog
from tap.data.catalog import DatasetInfo, d4rl_facts, known_datasets, lookup


def test_the_committed_table_says_what_the_d4rl_package_says(monkeypatch: pytest.MonkeyPatch) -> None:
    urls, minima, maxima = d4rl_facts()
    if not urls:
        pytest.skip("the d4rl extra is not installed")
    installed = known_datasets()
    monkeypatch.setattr(tap.data.catalog, "d4rl_facts", lambda: ({}, {}, {}))
    committed = known_datasets.__wrapped__()
    assert committed == installed
    d4rl = [info for info in committed.values() if info.source == "d4rl"]
    assert len(d4rl) == 56
    assert all((info.url, info.reference_min_score) == (urls[info.id], minima[info.id]) for info in d4rl)
    assert all(info.reference_max_score == maxima[info.id] for info in d4rl)


def test_the_catalog_has_the_papers_datasets_and_their_limits() -> None:
    known = known_datasets()
    assert len(known) == 20 + 24 + 14 + 1 + 6
    assert (known["ant-random-v2"].environment, known["ant-random-v2"].max_episode_steps) == ("Ant-v4", 1000)
    assert (known["pen-cloned-v1"].environment, known["pen-cloned-v1"].max_episode_steps) == ("AdroitHandPen-v1", 100)
    assert known["door-human-v0"].max_episode_steps == 200
    steps = [
        known[f"antmaze-{name}-v0"].max_episode_steps for name in ("umaze-diverse", "medium-play", "large-play", "ultra-play")
    ]
    assert steps == [700, 1000, 1000, 2000]
    assert known["antmaze-ultra-play-v0"].url is None
    with (Path(tap.data.catalog.__file__).parent / "d4rl_table.csv").open(newline="") as file:
        assert {row["id"] for row in csv.DictReader(file)} == set(known) - {"hopper-medium-replay"}


def test_lookup_of_the_bundled_dataset() -> None:
    info = lookup("hopper-medium-replay", fetch())
    assert (info.source, info.path, info.environment) == (
        "bundled",
        Path("data/bundled/hopper-medium-replay.hdf5"),
        "Hopper-v4",
    )
    assert (info.reference_min_score, info.reference_max_score) == (-20.272305, 3234.3)


def test_lookup_applies_overrides() -> None:
    changes = {"path": "my.hdf5", "environment": "Hopper-v5", "max_episode_steps": 500, "suite": "custom"}
    info = lookup("hopper-medium-v2", fetch(**changes))
    assert (info.source, info.path, info.environment) == ("file", Path("my.hdf5"), "Hopper-v5")
    assert (info.max_episode_steps, info.suite, info.reference_max_score) == (500, "custom", 3234.3)
    own = lookup("mine", fetch(path="my.hdf5", max_episode_steps=50))
    assert own == DatasetInfo("mine", "custom", "file", Path("my.hdf5"), None, None, 50, None, None)


@pytest.mark.parametrize(
    ("dataset", "changes", "words"),
    [
        ("hoper-medium-v2", {}, ["did you mean 'hopper-medium-v2'", "path: FILE.hdf5"]),
        ("mine", {"path": "my.hdf5"}, ["max_episode_steps"]),
        ("mine", {"max_episode_steps": 10}, ["path"]),
        ("hopper-medium-v2", {"source": "d4rl", "path": "my.hdf5"}, ["source: file"]),
        ("hopper-medium-v2", {"source": "bundled"}, ["not bundled"]),
        ("antmaze-ultra-play-v0", {}, ["datasets.antmaze-ultra-play-v0.fetch.path"]),
        ("stochastic-hopper-expert", {}, ["docs/d4rl.md", "datasets.stochastic-hopper-expert.fetch.path"]),
        ("hopper-medium-replay", {"source": "d4rl"}, ["no download address"]),
        ("mine", {"path": "my.hdf5", "max_episode_steps": 10, "reference_min_score": 1.0}, ["reference_max_score"]),
        ("hopper-medium-v2", {"reference_max_score": -100.0}, ["min below max"]),
    ],
)
def test_lookup_explains_what_is_missing(dataset: str, changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        lookup(dataset, fetch(**changes))
    assert all(word in str(error.value) for word in words)
