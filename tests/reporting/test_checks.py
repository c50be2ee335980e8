import pytest
from stage_files import diagnosis_json

from tap.reporting.checks import advice, offline_checks_table
from tap.results import Diagnosis, OfflineChecks

GOOD = {
    "windows": 2000, "held_out": True, "own_code_error": 0.05, "mean_error": 0.4, "drawn_code_error": 0.5, "return_std": 50.0,
    "predicted_gain": 5.0, "advantage_slope": 0.9, "advantage_slope_error": 0.1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, "the prior's mean explains 60% of the actions' variance"),
        ({}, "the critic's advantages show in the data"),
        ({}, "the critic's weights promise 10% of the std of returns"),
        ({"own_code_error": 0.3}, "codes lose 30% of the actions; train the VQ-VAE longer"),
        ({"mean_error": 1.1}, "the prior knows no more than the mean of all actions"),
        ({"actor_error": 0.3}, "the prior's mean explains 60% of the actions' variance, the actor 70%; if behaviour cloning"),
        ({"actor_error": 0.45}, "the actor 55%; if behaviour cloning"),
        ({"actor_error": 0.7}, "the actor only 30%; train it longer, or set planner.actor to false"),
        ({"advantage_slope": 0.3}, "worth 30% of what they promise; raise planner.temperature"),
        ({"advantage_slope": 0.3, "advantage_slope_error": 0.2}, "the critic's advantages do not show in the data"),
        ({"predicted_gain": 0.5}, "planner.search prior_mean is simpler"),
        ({"predicted_gain": None, "advantage_slope": None}, "compare planner.search prior_mean and critic_weighted"),
        ({"return_std": 0.0}, "all are the same, so plans cannot be chosen by them; are the rewards recorded?"),
        ({"predicted_gain": None, "drawn_code_error": 0.7}, "one drawn code errs far more than the mean"),
    ],
)
def test_each_question_has_a_sentence(changes: dict[str, float | None], sentence: str) -> None:
    assert any(sentence in each for each in advice(OfflineChecks.model_validate(GOOD | changes)))


def test_the_table_has_a_line_for_each_checked_policy() -> None:
    checked = Diagnosis.model_validate(diagnosis_json(offline=GOOD | {"actor_error": 0.3}))
    table = offline_checks_table([Diagnosis.model_validate(diagnosis_json()), checked])
    assert table is not None
    (line,) = table.lines
    assert line.cells == ("0.05", "0.40", "0.50", "0.30", "0.90 ± 0.10", "5 of 50")
    assert "seed 0; 2000 windows of held-out episodes. Imitation: " in line.note
    assert offline_checks_table([Diagnosis.model_validate(diagnosis_json())]) is None
