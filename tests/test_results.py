"""The models of the files between stages, against files that stages wrote."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from pydantic import ValidationError
from stage_files import cloned_json, diagnosis_json, evaluation, evaluation_json, validation_json, write

from tap.reporting.rows import load_evaluations, summary, table_rows
from tap.results import (
    Diagnosis,
    Evaluation,
    Histogram,
    Record,
    TrainingMetrics,
    ValidationReport,
    instance_key,
    metrics_path,
    seed_files,
)

# By an early version, which wrote no `simulator`, `recipe`, `scores`, `score_metric` and `method`.
PUBLISHED = ROOT / "docs/results"
MODELS: dict[str, type[Record]] = {
    "metrics/evaluate/*.json": Evaluation,
    "metrics/ablations/*.json": Evaluation,
    "metrics/diagnose/*.json": Diagnosis,
    "metrics/train_vqvae/*.json": TrainingMetrics,
    "metrics/train_prior/*.json": TrainingMetrics,
    "raw/*/validation.json": ValidationReport,
}


@pytest.mark.parametrize("pattern", MODELS)
def test_published_files_are_read_without_loss(pattern: str) -> None:
    paths = list(PUBLISHED.glob(pattern))
    assert len(paths) >= 9
    for path in paths:
        content, read = json.loads(path.read_text()), MODELS[pattern].read(path).as_json()
        assert {key: read[key] for key in content} == content
        added = {key: value for key, value in read.items() if key not in content}
        assert added.pop("method", "tap") == "tap"
        assert set(added) <= {"simulator", "recipe", "scores", "score_metric"} and not any(added.values())


@pytest.mark.parametrize(
    ("model", "content"),
    [
        (Evaluation, evaluation_json()),
        (Evaluation, evaluation_json(normalized_score=None, ablation="no-search")),
        (Evaluation, cloned_json()),
        (Diagnosis, diagnosis_json()),
        (ValidationReport, validation_json()),
        (TrainingMetrics, {"step": 9, "loss": 0.5, "end": 0.1, "codebook_usage": 1.0, "parameters": 7}),
        (TrainingMetrics, {"step": 9, "loss": 0.5, "held_out_loss": 0.6, "parameters": 7}),
    ],
)
def test_what_is_read_is_written_again(tmp_path: Path, model: type[Record], content: dict[str, object]) -> None:
    write(tmp_path / "a.json", content)
    model.read(tmp_path / "a.json").write(tmp_path / "b.json")
    assert json.loads((tmp_path / "b.json").read_text()) == content


def test_the_keys_of_a_file_are_in_the_order_of_the_fields(tmp_path: Path) -> None:
    Evaluation.model_validate(evaluation_json(ablation="no-search")).write(tmp_path / "a.json")
    keys = list(json.loads((tmp_path / "a.json").read_text()))
    assert keys[:3] == ["dataset", "source", "digest"] and keys[-3:] == ["runs", "git_commit", "ablation"]


def test_unknown_keys_are_an_error_in_code_and_ignored_in_files(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="smoothed"):
        Histogram(counts=[1], edges=[0.0, 1.0], smoothed=True)  # type: ignore[call-arg]
    content = validation_json() | {"added_later": 1}
    content["length"] |= {"mode": 7}
    write(tmp_path / "validation.json", content)
    assert ValidationReport.read(tmp_path / "validation.json") == ValidationReport.model_validate(validation_json())


def test_errors_name_file_field_and_remedy(tmp_path: Path) -> None:
    content = validation_json()
    content["return"] = {"mean": 700.0, "min": "low", "max": 2000.0}
    del content["length"]["median"]
    write(tmp_path / "validation.json", content)
    with pytest.raises(ValueError, match=r"validation\.json is not valid \(length.median: .*; return.min: .*dvc repro --force"):
        ValidationReport.read(tmp_path / "validation.json")
    with pytest.raises(ValueError, match=r"x\.json does not exist: .*dvc repro"):
        Evaluation.read(tmp_path / "x.json")
    write(tmp_path / "x.json", "{")
    with pytest.raises(ValueError, match=r"x\.json"):
        Evaluation.read(tmp_path / "x.json")
    with pytest.raises(ValueError):
        evaluation(search_value_mean=float("nan")).write(tmp_path / "y.json")
    assert not (tmp_path / "y.json").exists()


def test_keys_are_dvcs() -> None:
    assert instance_key("hopper-medium", 3) == "hopper-medium-3"
    assert instance_key("hopper-medium", 0, "no-search") == "hopper-medium-0-no-search"
    assert metrics_path(Path("data"), "evaluate", "x-0") == Path("data/metrics/evaluate/x-0.json")


def test_seed_files_are_those_of_one_dataset_by_number(tmp_path: Path) -> None:
    for name in ("a-10.csv", "a-2.csv", "a-2-no-search.csv", "a-b-0.csv", "a-1.json"):
        write(tmp_path / name, "")
    assert seed_files(tmp_path, "a", "csv") == {2: tmp_path / "a-2.csv", 10: tmp_path / "a-10.csv"}
    assert list(seed_files(tmp_path, "a", "csv")) == [2, 10]


def test_reading_results_loads_neither_torch_nor_mlflow() -> None:
    script = "import sys, tap.results; sys.exit(bool({'torch', 'mlflow'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_published_summary_is_that_of_the_published_evaluations() -> None:
    expected = summary(table_rows(load_evaluations(PUBLISHED / "cpu")))
    assert json.loads((PUBLISHED / "summary.json").read_text()) == expected
