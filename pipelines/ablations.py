"""Stage ablations: a trained policy with another planner, or another model's, as params.yaml's `ablations` name them.

Example: python -m pipelines.ablations hopper-medium-replay 0 no-search
"""

from pipelines.evaluate import evaluate
from pipelines.stage import main


def run(dataset: str, seed: int, ablation: str) -> None:
    evaluate("ablations", dataset, seed, ablation)


if __name__ == "__main__":
    main(run)
