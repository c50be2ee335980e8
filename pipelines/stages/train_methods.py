"""Stage train_methods: a dataset's episodes -> the policy of a method other than TAP, by its module train_METHOD.

Example: python -m pipelines.stages.train_methods hopper-medium-replay 0 bc
"""

from importlib import import_module

from pipelines.command_line import Dataset, Method, Seed
from pipelines.stages.training import launch
from tap.settings import params_section


def run(dataset: Dataset, seed: Seed, method: Method) -> None:
    import_module(f"pipelines.stages.{params_section(method)}").run(dataset, seed)


if __name__ == "__main__":
    launch(run)
