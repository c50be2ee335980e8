from pathlib import Path
from typing import Any

import pytest
from stage_files import UNSCORED, cloned_json, diagnosis_json, evaluation, evaluation_json, write

from tap.reporting.rows import SOURCES, headline, load_diagnoses, load_evaluations, summary, table_rows
from tap.results import Evaluation


def test_the_error_is_over_seeds_not_over_pooled_episodes() -> None:
    (row,) = table_rows([evaluation(seed=0, normalized_score=40.0), evaluation(seed=1, normalized_score=60.0)])
    assert (row.score.mean, row.score.standard_error, row.over) == (50, pytest.approx(10), "seeds")  # s = 200**0.5, n = 2
    (row,) = table_rows([evaluation()])
    assert (row.score.mean, row.score.standard_error, row.over) == (40, 1.5, "episodes")


def test_without_reference_scores_the_score_is_the_return() -> None:
    (row,) = table_rows([evaluation(**UNSCORED)])
    assert not row.normalized
    assert row.score.mean == 1200
    assert row.score.standard_error == pytest.approx(((200**2 + 100**2 + 300**2) / 2 / 3) ** 0.5)
    (row,) = table_rows([evaluation(**UNSCORED), evaluation(**UNSCORED, seed=1, returns=[1600.0] * 3)])
    assert (row.score.mean, row.score.standard_error) == (1400, pytest.approx(200))


@pytest.mark.parametrize(
    "change",
    [
        {"digest": "cd" * 32},
        {"source": "file"},
        {"scale": "paper"},
        {"environment": "Hopper-v5"},
        {"environment_seed": 2000},
        {"episodes": 20},
        {"planner": {"search": "prior_sampling"}},
        {"simulator": "gymnasium 1.4.0, mujoco 3.0.0"},
        {"recipe": "another"},
    ],
)
def test_unlike_runs_are_not_averaged(change: dict[str, Any]) -> None:
    rows = table_rows([evaluation(), evaluation(seed=1), evaluation(seed=2, **change)])
    assert [len(row.evaluations) for row in rows] == [2, 1]


def test_ablations_belong_to_their_experiment() -> None:
    ablated = evaluation(ablation="no-search", normalized_score=10.0, planner={"beam_width": 1})
    here, elsewhere = table_rows([evaluation(), ablated, evaluation(scale="paper")])
    found = here.ablation("no-search")
    assert found is not None and found.score.mean == 10
    assert elsewhere.ablations == ()


def test_other_methods_belong_to_their_experiment_and_are_no_rows() -> None:
    cloned = [
        Evaluation.model_validate(cloned_json(seed=seed, normalized_score=score)) for seed, score in ((0, 20.0), (1, 24.0))
    ]
    here, elsewhere = table_rows([evaluation(), evaluation(seed=1), *cloned, evaluation(scale="paper")])
    found = here.method("bc")
    assert found is not None and (found.score.mean, found.score.standard_error) == (22, pytest.approx(2))
    assert (found.search_value, found.state_prediction_error) == (None, None)
    assert here.first.method == elsewhere.first.method == "tap"
    assert elsewhere.method("bc") is None and here.ablations == ()
    assert headline([here])["hopper-medium-replay"]["bc_score"] == 22


def test_latency_is_the_median_seeds_and_the_slowest_seeds_95th_percentile() -> None:
    latencies = [{"median": median, "p95": p95, "batch_median": 50} for median, p95 in ((10, 40), (20, 25), (60, 90))]
    (row,) = table_rows([evaluation(seed=seed, latency_ms=latency) for seed, latency in enumerate(latencies)])
    assert (row.latency.median, row.latency.p95) == (20, 90)


def test_headline_has_a_few_rounded_numbers_of_each_base() -> None:
    runs = [evaluation(seed=seed, normalized_score=score) for seed, score in enumerate((40.0, 45.0, 50.5))]
    rows = table_rows(
        [
            *runs,
            evaluation(ablation="no-search", normalized_score=1.0),
            evaluation(dataset="mine", returns=[7.0], episodes=1, **UNSCORED),
        ]
    )
    assert headline(rows) == {
        # Mean 135.5 / 3, deviations -5.17, -0.17, 5.33: s = sqrt(55.17 / 2) = 5.252, over sqrt(3).
        "hopper-medium-replay": {"score": 45.17, "standard_error": 3.03, "decision_ms": 20.0, "data_score": 22.1},
        "mine": {"score": 7.0, "standard_error": None, "decision_ms": 20.0, "data_score": 700.0},
    }


def test_no_results_is_an_error_with_its_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dvc repro evaluate"):
        load_evaluations(tmp_path)
    write(tmp_path / "metrics/ablations/x-0-no-search.json", evaluation_json(ablation="no-search"))
    write(tmp_path / "metrics/methods/x-0-bc.json", cloned_json())
    with pytest.raises(ValueError, match="dvc repro evaluate"):
        load_evaluations(tmp_path)


def test_an_invalid_file_is_named(tmp_path: Path) -> None:
    content = evaluation_json()
    del content["episodes"]
    write(tmp_path / "metrics/evaluate/x-0.json", content)
    with pytest.raises(ValueError, match=r"x-0\.json.*episodes"):
        load_evaluations(tmp_path)


def test_diagnoses_are_read_in_order_and_broken_ones_named(tmp_path: Path) -> None:
    for dataset, seed in (("pen-human-v0", 0), ("hopper-medium-v2", 10), ("hopper-medium-v2", 9)):
        write(tmp_path / f"metrics/diagnose/{dataset}-{seed}.json", diagnosis_json(dataset=dataset, seed=seed))
    order = [("hopper-medium-v2", 9), ("hopper-medium-v2", 10), ("pen-human-v0", 0)]
    assert [(each.dataset, each.seed) for each in load_diagnoses(tmp_path)] == order
    write(tmp_path / "metrics/diagnose/x-0.json", diagnosis_json(prior={}))
    with pytest.raises(ValueError, match=r"x-0\.json is not valid \(prior.predicted_return_median: .*dvc repro --force"):
        load_diagnoses(tmp_path)


def test_the_summary_has_every_policy_with_its_source() -> None:
    evaluations = [
        evaluation(seed=seed, normalized_score=score, training_minutes=4.0) for seed, score in ((0, 10.0), (1, 30.0))
    ]
    evaluations += [evaluation(ablation="no-search", normalized_score=5.0, planner={"beam_width": 1})]
    evaluations += [Evaluation.model_validate(cloned_json())]
    ((name, policies),) = summary(table_rows(evaluations)).items()
    first = evaluations[0]
    assert name == f"{first.dataset} ({SOURCES[first.source]})"
    assert list(policies) == ["tap", "no-search", "bc", "data", "data-best-tenth"]
    tap = policies["tap"]
    assert (tap["mean"], tap["standard_error"], tap["seeds"]) == (20.0, 10.0, [0, 1])
    assert (tap["training_minutes"], tap["environment_seed"]) == (4.0, first.environment_seed)
    assert policies["no-search"]["standard_error_over"] == "episodes"
    assert policies["data"]["mean"] == first.behaviour.mean_normalized_score
