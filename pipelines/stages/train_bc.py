"""Stage train_bc: a dataset's episodes -> a network that imitates their actions (behaviour cloning).

Example: python -m pipelines.stages.train_bc hopper-medium-replay 0
"""

import torch
from torch import Tensor

from pipelines.command_line import Dataset, Seed
from pipelines.stages.params import TrainBcStage
from pipelines.stages.training import DATA, launch, training_job
from tap.data.windows import Layout, Windows, fit_normalizer
from tap.methods.behaviour_cloning import BehaviourCloning
from tap.settings import WindowParams

# One step; its reward and return-to-go are not used.
WINDOWS = WindowParams(length=1, discount=1.0, termination_penalty=None, bootstrap_truncated=False, normalize=True)


def run(dataset: Dataset, seed: Seed) -> None:
    stage = TrainBcStage.read(dataset)
    with training_job(stage, dataset, seed, None, {}) as job:
        if job.run:
            job.run.set_tags({"method": "bc"})
        normalizer = fit_normalizer(job.training, WINDOWS)
        training = Windows(job.training, WINDOWS, normalizer, job.device, DATA)
        held_out = Windows(job.held_out, WINDOWS, normalizer, job.device, DATA)
        layout = Layout(job.training.observation_dim, job.training.action_dim)
        torch.manual_seed(seed)
        policy = BehaviourCloning(stage.params, layout, normalizer).to(job.device)

        def loss(rows: Tensor, is_held_out: bool) -> dict[str, Tensor]:
            steps_BX = (held_out if is_held_out else training).transitions_NX[rows]
            return policy.loss(steps_BX[:, layout.observation], steps_BX[:, layout.action])

        job.fit(policy, loss, len(held_out), policy.save)


if __name__ == "__main__":
    launch(run)
