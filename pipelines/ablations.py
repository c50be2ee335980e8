"""Stage ablations: the same trained policy with another planner, as params.yaml's `ablations` name them.

Example: python -m pipelines.ablations hopper-medium-replay 0 no-search
"""

from pipelines.evaluate import evaluate
from pipelines.stage import main


def run(dataset: str, seed: int, ablation: str) -> None:
    evaluate(dataset, seed, "ablations", f"{dataset}-{seed}-{ablation}", ablation)


if __name__ == "__main__":
    main(run)
