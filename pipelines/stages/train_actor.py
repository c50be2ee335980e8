"""Stage train_actor: a dataset's states and actions -> networks for the first action of a mean over codes.

Example: python -m pipelines.stages.train_actor hopper-medium-replay 0
"""

import torch
from torch import Tensor

from pipelines.command_line import Dataset, OptionalAblation, Seed
from pipelines.stages.params import TrainActorStage
from pipelines.stages.training import DATA, launch, training_job
from tap.data.sampling import by_return
from tap.data.windows import Windows
from tap.distributed import world_size
from tap.files import sha256
from tap.model.actor import Actor, member_shares, save_actor
from tap.model.serialization import read_description
from tap.model.vqvae import load_vqvae
from tap.results import instance_key, weights_folder


def run(dataset: Dataset, seed: Seed, ablation: OptionalAblation = None) -> None:
    stage = TrainActorStage.read(dataset, ablation)
    folder = weights_folder("train_vqvae", instance_key(dataset, seed, ablation))
    of_vqvae = {"description": read_description(folder, "vqvae"), "weights": sha256(folder / "vqvae.safetensors")}
    with training_job(stage, dataset, seed, ablation, {"vqvae": of_vqvae}) as job:
        vqvae, normalizer = load_vqvae(folder, job.device)  # whose units actions are in
        layout, one_step = vqvae.layout, vqvae.params.windows.model_copy(update={"length": 1})
        training = Windows(job.training, one_step, normalizer, job.device, DATA)
        held_out = Windows(job.held_out, one_step, normalizer, job.device, DATA)
        torch.manual_seed(seed)
        actor = Actor(stage.params, layout).to(job.device)

        def loss(rows: Tensor, is_held_out: bool) -> dict[str, Tensor]:
            steps_BX = (held_out if is_held_out else training).transitions_NX[rows]
            return (actor.held_out_loss if is_held_out else actor.loss)(
                steps_BX[:, layout.observation], steps_BX[:, layout.action]
            )

        by_episode = by_return(job.training, job.params.effective_share)

        def sample(count: int, generator: torch.Generator) -> Tensor:
            return member_shares(by_episode(count, generator), actor.params.members, world_size())

        job.fit(actor, loss, len(held_out), lambda folder: save_actor(folder, actor), sample=sample)


if __name__ == "__main__":
    launch(run)
