"""What each method learns from TAP, which decides whether DVC trains it again."""

from pathlib import Path

import pytest
from conftest import custom_dataset

from pipelines.stages import teacher
from pipelines.stages.params import EvaluateStage
from tap.files import write_json
from tap.results import TAP_MODELS, Teacher, teacher_path, weights_folder
from tap.settings import METHODS, Params


def test_a_reflex_has_a_teacher_whose_digests_follow_the_models_and_others_have_none(
    tiny_params: Params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DVC_STAGE", "teacher")  # so that no params.yaml is read
    planner = tiny_params.evaluate.planner.model_copy(update={"budget_ms": 5.0})
    params = tiny_params.evaluate.model_copy(update={"planner": planner})
    info, fetch = custom_dataset("mine", "Hopper-v4", 1000), tiny_params.fetch
    resolved = EvaluateStage(scale="cpu", info=info, fetch=fetch, params=params, trains=False)
    write_json(resolved.path("mine"), resolved.model_dump(mode="json"))
    for stage in TAP_MODELS:
        weights_folder(stage, "mine-0").mkdir(parents=True)
        (weights_folder(stage, "mine-0") / "weights").write_text(stage)

    def taught() -> dict[str, Teacher]:
        teacher.run("mine", 0)
        return {method: Teacher.read(teacher_path("mine-0", method)) for method in METHODS}

    before = taught()
    assert {method for method, each in before.items() if each != Teacher()} == {"reflex"}
    assert before["reflex"].planner == tiny_params.evaluate.planner  # without the budget
    for stage in TAP_MODELS:
        (weights_folder(stage, "mine-0") / "weights").write_text("changed")
        after = taught()
        assert before["reflex"].models and after["reflex"].models
        assert {name for name, digest in after["reflex"].models.items() if digest != before["reflex"].models[name]} == {stage}
        before = after
