"""Stage ablations: other models, or trained ones with another planner, as params.yaml's `ablations` define them -> scores.

Example: python -m pipelines.stages.ablations hopper-medium-replay 0 no-search
"""

from pipelines.command_line import Ablation, Dataset, Seed, main
from pipelines.stages.evaluate import evaluate


def run(dataset: Dataset, seed: Seed, ablation: Ablation) -> None:
    evaluate("ablations", dataset, seed, ablation)


if __name__ == "__main__":
    main(run)
