"""Stage teacher: TAP's models and planner -> for each method, what it learns from: data/teacher/DATASET-SEED/METHOD.json.

A method that learns from TAP's decisions gets the planner's params and the digests of the models; the others learn from data
alone, and get none. So DVC trains the one again when they change, and leaves the others as they are.

Example: python -m pipelines.stages.teacher hopper-medium-replay 0
"""

from pipelines.command_line import Dataset, Seed, main
from pipelines.stages.params import EvaluateStage
from tap.files import folder_sha256
from tap.methods.catalog import CATALOG
from tap.results import TAP_MODELS, Teacher, instance_key, teacher_path, weights_folder


def run(dataset: Dataset, seed: Seed) -> None:
    key, params = instance_key(dataset, seed), EvaluateStage.read(dataset).params.planner
    # With a budget of time decisions are not reproducible, so what is learned is decided without.
    planner = params.model_copy(update={"budget_ms": None})
    tap = Teacher(planner=planner, models={stage: folder_sha256(weights_folder(stage, key)) for stage in TAP_MODELS})
    for method, info in CATALOG.items():
        (tap if info.learns_from_tap else Teacher()).write(teacher_path(key, method))


if __name__ == "__main__":
    main(run)
