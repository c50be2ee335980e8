"""The dependencies that pyproject.toml declares, and the tests that need no other."""

from packaging.requirements import Requirement

from benchmarks.reliability.versions import ROOT, dependencies, library_tests, oldest


def test_the_oldest_version_is_the_lower_bound() -> None:
    assert oldest(Requirement("gymnasium[mujoco]==1.4.0")) == "gymnasium[mujoco]==1.4.0"
    assert oldest(Requirement("scipy>=1.15,<2")) == "scipy==1.15"


def test_every_dependency_has_a_lower_and_an_upper_bound() -> None:
    for requirement in dependencies():
        operators = {each.operator for each in requirement.specifier}
        assert operators in ({"=="}, {">=", "<"}), requirement


def test_the_librarys_tests_are_those_that_need_no_extra() -> None:
    found = {str(file.relative_to(ROOT / "tests")) for file in library_tests()}
    assert {"model/test_models.py", "planning/test_planner.py", "data/test_hdf5.py", "test_training.py"} <= found
    assert not found & {"tracking/test_run.py", "test_cli.py", "serving/test_serving.py", "reporting/test_tables.py"}
