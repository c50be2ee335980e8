import pytest
from rows_of import rows_of
from stage_files import UNSCORED, cloned_json, diagnosis_json, evaluation, evaluation_json

from tap.reporting.report import experiment_tables
from tap.reporting.rows import summary, table_rows
from tap.reporting.tables import Line, Table, departures_table, main_tables, markdown, sampled_plans_table
from tap.results import Diagnosis, Evaluation


def columns_of(table: Table | None) -> dict[str, tuple[str, ...]]:
    """The table's columns, top to bottom."""
    assert table is not None
    return dict(zip(table.head, zip(*(line.cells for line in table.lines), strict=True), strict=True))


def test_differences_are_paired_by_seed() -> None:
    rows = rows_of(base=({}, [40.0, 60.0, 80.0]), stop_at_end=({"stop_at_end": True}, [41.0, 63.0, 85.0]))
    columns = columns_of(departures_table(rows))
    # Differences 1, 3, 5: mean 3, s = 2, error 2 / sqrt(3), where unpaired scores would err by 17.
    assert columns["difference"] == ("+3.0 ± 1.2",)
    assert (columns["score"], columns["base's score"]) == (("63.0 ± 12.7",), ("60.0 ± 11.5",))


def test_only_common_seeds_are_compared() -> None:
    rows = rows_of(base=({}, [40.0, 60.0]), no_search=({"beam_width": 1}, [30.0]))
    columns = columns_of(departures_table(rows))
    assert columns["difference"] == ("-10.0",)
    assert columns["score"] == ("30.0 ± 1.5 (1 seed, ± over episodes)",)


@pytest.mark.parametrize(
    ("source", "label"), [("recollected", "recollected, not D4RL's data"), ("bundled", "bundled, not D4RL's")]
)
def test_the_papers_numbers_are_never_without_the_label_of_their_data(source: str, label: str) -> None:
    one = {"likelihood_threshold": 0.01}
    rows = rows_of(
        "hopper-medium-replay-v2", source, beta_1e_2=(one, [20.0, 30.0]), latent_step_1=({"latent_step": 1}, [5.0, 5.0])
    )
    tables = experiment_tables(rows, [])
    papers_texts = {"87.3 ± 2.3", "93.2", "97.0", "61.9", "95.0", "94.7"}
    found = set()
    for table in tables:
        over = [group for group, count in table.groups for _ in range(count)] or [""] * len(table.head)
        for line in table.lines:
            assert not line.ours or label in line.note
            for group, cell in zip(over, line.cells, strict=True):
                if cell in papers_texts:
                    found.add(cell)
                    assert "D4RL's" in (group if line.ours else line.label)
    assert found == papers_texts
    for text in map(markdown, tables):
        for line in text.splitlines():
            if any(f"| {number} |" in line for number in papers_texts):
                assert "D4RL's hopper-medium-replay-v2" in line


def test_the_main_table_is_by_suite_with_all_methods_of_the_papers() -> None:
    rows = [*rows_of("hopper-medium-v2"), *rows_of("pen-expert-v1"), *rows_of("antmaze-umaze-v2"), *rows_of("my-point", "file")]
    tables = main_tables(rows)
    assert [table.title.removesuffix(": results") for table in tables] == [
        "Locomotion",
        "Adroit hands",
        "AntMaze",
        "Other datasets",
    ]
    assert {table.head[:3] for table in tables} == {("TAP", "data: mean", "data: best tenth")}  # no other method was run
    assert [table.head[3:] for table in tables] == [
        ("TAP", "BC", "CQL", "IQL", "DT", "MOReL", "TT"),
        ("TAP", "BC", "CQL", "MOPO", "Opt-MOPO", "TT"),  # no IQL on pen-expert
        (),
        (),
    ]
    assert tables[0].lines[0].cells == (
        "50.0 ± 10.0",
        "22.1",
        "51.5",
        "63.4 ± 1.4",
        "63.9",
        "58.0",
        "66.3",
        "67.6",
        "95.4",
        "61.1",
    )
    assert "the paper's: D4RL's pen-expert-v0" in tables[1].lines[0].note
    assert "paper" not in tables[2].caption + tables[3].caption


def test_other_methods_are_beside_tap_if_they_were_run() -> None:
    runs = [
        Evaluation.model_validate(values(dataset=dataset, seed=seed, normalized_score=score + seed))
        for dataset, tap, cloned in (("hopper-medium-v2", 40.0, 20.0), ("walker2d-medium-v2", 60.0, 30.0))
        for values, score in ((evaluation_json, tap), (cloned_json, cloned))
        for seed in (0, 1)
    ]
    (table,) = main_tables(table_rows(runs))
    assert columns_of(table)["behaviour cloning"] == ("20.5 ± 0.5", "30.5 ± 0.5", "25.5 ± 0.4")
    assert table.groups[0] == ("this run", 4)


def test_a_method_with_fewer_seeds_than_tap_says_so() -> None:
    runs = [Evaluation.model_validate(evaluation_json(dataset="hopper-medium-v2", seed=seed)) for seed in (0, 1)]
    runs.append(Evaluation.model_validate(cloned_json(dataset="hopper-medium-v2", seed=0, normalized_score=20.0)))
    (table,) = main_tables(table_rows(runs))
    assert columns_of(table)["behaviour cloning"][0].startswith("20.0 ± ")
    assert columns_of(table)["behaviour cloning"][0].endswith(" (1 seed, ± over episodes)")


def test_a_method_in_fewer_episodes_than_tap_says_so_unless_it_was_also_run_in_as_many() -> None:
    fewer = Evaluation.model_validate(cloned_json(normalized_score=20.0, episodes=2, protocol="2 episodes", recipe="a"))
    (table,) = main_tables(rows := table_rows([evaluation(), fewer]))
    assert columns_of(table)["behaviour cloning"] == ("20.0 ± 1.5 (2 episodes)",)
    (policies,) = summary(rows).values()
    assert (policies["bc"]["episodes"], policies["tap"]["episodes"]) == (2, 3)
    as_many = Evaluation.model_validate(cloned_json(normalized_score=30.0, recipe="b"))
    for runs in ([as_many, fewer], [fewer, as_many]):
        (table,) = main_tables(rows := table_rows([evaluation(), *runs]))
        assert columns_of(table)["behaviour cloning"] == ("30.0 ± 1.5",)
        (policies,) = summary(rows).values()
        assert policies["bc"]["mean"] == 30


def test_an_ablation_in_fewer_episodes_is_not_compared() -> None:
    ablated = evaluation(ablation="no-search", episodes=2, planner={"beam_width": 1})
    (row,) = table_rows([evaluation(), ablated])
    assert row.ablations == ()


def test_returns_are_not_called_scores() -> None:
    (table,) = main_tables(table_rows([evaluation(dataset="my-point", source="file", **UNSCORED)]))
    assert table.lines[0].cells[:2] == ("1200.0 ± 152.8", "700.0")
    assert "returns, no reference scores" in table.lines[0].note


def test_markdown_escapes_what_would_be_markup() -> None:
    text = markdown(Table("T", "", ("a", "b"), (Line("x|y", "<i>", ("1", "2")),), (("ours", 1), ("theirs", 1))))
    assert text.splitlines()[2:] == ["|  | a (ours) | b (theirs) |", "| :-- | --: | --: |", "| x\\|y<br>&lt;i> | 1 | 2 |"]


def test_plans_sampled_from_the_prior_and_uniformly_are_side_by_side() -> None:
    table = sampled_plans_table([Diagnosis.model_validate(diagnosis_json())])
    assert table is not None
    (line,) = table.lines
    assert line.cells == ("0.0844", "74.3", "-0.20", "0.0844", "74.3", "+0.47")
    assert line.note == "recollected, not D4RL's data; cpu scale; seed 0; 26 plans"
    assert table.groups == (("from the prior", 3), ("uniform", 3))
    assert sampled_plans_table([]) is None
