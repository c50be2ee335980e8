from typing import Any

from rows_of import rows_of
from test_tables import columns_of

from tap.reporting.report import experiment_tables
from tap.reporting.studies import STUDIES, compare, complete, study_table

STUDY = {study.name: study for study in STUDIES}


def test_the_base_is_the_column_of_its_own_setting() -> None:
    rows = rows_of(beta_1e_2=({"likelihood_threshold": 0.01}, [20.0, 30.0]), horizon_3=({"horizon": 3}, [10.0, 10.0]))
    assert columns_of(study_table(STUDY["beta"], rows)) == {
        "β = 0.01": ("25.0 ± 5.0", "93.2"),
        "β = 0.1": ("50.0 ± 10.0", "97.0"),
    }
    assert columns_of(study_table(STUDY["horizon"], rows)) == {"H = 3": ("10.0 ± 0.0", "29.39"), "H = 12": ("50.0 ± 10.0", "–")}


def test_latent_steps_are_compared_at_one_horizon() -> None:
    one = {"latent_step": 1}
    assert columns_of(study_table(STUDY["latent_step"], rows_of(latent_step_1=(one, [5.0, 5.0])))).keys() == {"L = 1", "L = 3"}
    far = rows_of(base=({"horizon": 15}, [40.0, 60.0]), latent_step_1=(one, [5.0, 5.0]))
    assert columns_of(study_table(STUDY["latent_step"], far)).keys() == {"L = 1"}
    both = rows_of(base=({"horizon": 15}, [40.0, 60.0]), latent_step_1=(one, [5.0, 5.0]), horizon_12=({}, [7.0, 7.0]))
    assert columns_of(study_table(STUDY["latent_step"], both))["L = 3"] == ("7.0 ± 0.0", "87.3")


def test_an_ablation_that_did_something_else_is_in_no_column() -> None:
    rows = rows_of(beta_1e_2=({"likelihood_threshold": 0.3}, [20.0, 30.0]))
    assert study_table(STUDY["beta"], rows) is None


def test_context_alone_makes_no_table() -> None:
    sampled = {"search": "prior_sampling"}
    rows = rows_of(prior_sampling=(sampled, [30.0, 30.0]), horizon_12=({}, [7.0, 7.0]))
    assert {study.name for study in STUDIES if study_table(study, rows)} == {"sampling"}
    rows = rows_of(prior_sampling=(sampled, [30.0, 30.0]), attention_bottleneck=(sampled, [35.0, 35.0]))
    assert columns_of(study_table(STUDY["attention"], rows)) == {
        "beam search": ("50.0 ± 10.0", "87.3"),
        "pooling, sample prior": ("30.0 ± 0.0", "79.0"),
        "attention, sample prior": ("35.0 ± 0.0", "79.7"),
    }
    assert [table.title for table in experiment_tables(rows_of(), [])] == ["Locomotion: results"]


def test_means_are_over_datasets_with_all_columns() -> None:
    sampled: dict[str, Any] = {"search": "prior_sampling"}
    uniform: dict[str, Any] = {"search": "uniform_sampling"}
    rows = [
        *rows_of("hopper-medium-v2", prior_sampling=(sampled, [10.0, 20.0]), uniform_sampling=(uniform, [1.0, 3.0])),
        *rows_of("ant-medium-v2", prior_sampling=(sampled, [30.0, 40.0]), uniform_sampling=(uniform, [5.0, 7.0])),
        *rows_of("walker2d-medium-v2", prior_sampling=(sampled, [90.0, 90.0])),
    ]
    table = study_table(STUDY["sampling"], rows)
    assert table is not None
    ours, paper = table.lines[-2:]
    assert ours.cells == ("50.0 ± 7.1", "25.0 ± 3.5", "4.0 ± 0.7")  # errors sqrt(2) * 10, 5 and 1, over 2
    assert paper.cells == ("77.7", "76.5", "64.7")  # (63.4 + 92.0) / 2, (64.3 + 88.8) / 2, (39.6 + 89.8) / 2
    assert (ours.note, paper.label) == ("of the 2 datasets with all columns", "mean of the paper, on D4RL's 2 datasets")


def test_unlike_datasets_have_no_mean() -> None:
    other = {"search": "prior_sampling"}
    mine = rows_of("hopper-medium-v2", prior_sampling=(other, [10.0, 20.0]))
    for dataset, source in (("hopper-medium-v2", "d4rl"), ("hopper-medium", "recollected"), ("ant-medium-v2", "d4rl")):
        rows = [*mine, *rows_of(dataset, source, prior_sampling=(other, [10.0, 20.0]))]
        assert not any(line.label.startswith("mean") for table in experiment_tables(rows, []) for line in table.lines)
    _, comparisons = compare(STUDY["sampling"], [*mine, *rows_of("ant-medium-v2", "d4rl", prior_sampling=(other, [1.0, 2.0]))])
    assert [each.base.first.dataset for each in complete(comparisons)] == ["hopper-medium-v2"]
