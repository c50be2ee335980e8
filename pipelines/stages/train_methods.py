"""Stage train_methods: a dataset's episodes -> the policy of a method other than TAP, by its module train_METHOD.

Example: python -m pipelines.stages.train_methods hopper-medium-replay 0 bc
"""

from importlib import import_module

from pipelines.command_line import Dataset, Method, Seed
from pipelines.stages.training import launch
from tap.methods.catalog import CATALOG
from tap.settings import params_section


def run(dataset: Dataset, seed: Seed, method: Method) -> None:
    """Raises ValueError, with a remedy, if training needs a library that is not installed."""
    try:
        module = import_module(f"pipelines.stages.{params_section(method)}")
    except ModuleNotFoundError as error:
        if not (extra := CATALOG[method].extra):
            raise
        raise ValueError(
            f"training {method} needs {error.name}: run `pip install -c constraints.txt -e '.[{extra}]'`, or take {method} "
            "out of `methods` in params.yaml"
        ) from None
    module.run(dataset, seed)


if __name__ == "__main__":
    launch(run)
