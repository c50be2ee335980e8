"""The reflex for the stage train_methods: the decisions of TAP's planner at a dataset's states -> a network that takes them."""

from typing import ClassVar

import torch
from torch import Tensor

from pipelines.stages.params import TrainMethodStage
from pipelines.stages.training import DATA, training_job
from tap.data.episodes import Selection
from tap.data.windows import Windows
from tap.methods.reflex import Reflex, decisions
from tap.planning.policy import Policy
from tap.results import TAP_MODELS, Teacher, instance_key, teacher_path, weights_folder
from tap.settings import TrainBcParams


class TrainReflexStage(TrainMethodStage):
    stage: ClassVar[str] = "train_reflex"
    params: TrainBcParams


def run(dataset: str, seed: int) -> None:
    stage, key = TrainReflexStage.read(dataset), instance_key(dataset, seed)
    teacher = Teacher.read(teacher_path(key, "reflex"))
    assert teacher.planner is not None
    with training_job(stage, dataset, seed, None, {"teacher": teacher.as_json()}) as job:
        vqvae, prior, critic, actor = (weights_folder(model, key) for model in TAP_MODELS)
        planner = Policy.join(vqvae, prior, critic, actor, teacher.planner, job.device)
        layout, normalizer = planner.vqvae.layout, planner.normalizer
        one_step = planner.vqvae.params.windows.model_copy(update={"length": 1})
        generator = torch.Generator().manual_seed(seed)

        def lesson(episodes: Selection) -> tuple[Tensor, Tensor]:
            """Each state of the episodes, and the planner's action at it, normalised."""
            states_NO = Windows(episodes, one_step, normalizer, job.device, DATA).transitions_NX[:, layout.observation]
            raw_NO = normalizer.denormalize(states_NO, layout.observation).cpu().numpy()
            raw_NA = torch.from_numpy(decisions(planner, raw_NO, generator)).to(job.device)
            return states_NO, normalizer.normalize(raw_NA, layout.action)

        training, held_out = lesson(job.training), lesson(job.held_out)
        torch.manual_seed(seed)
        reflex = Reflex(stage.params, layout, normalizer).to(job.device)
        reflex.planner = planner

        def loss(rows: Tensor, is_held_out: bool) -> dict[str, Tensor]:
            states_NO, actions_NA = held_out if is_held_out else training
            return reflex.loss(states_NO[rows], actions_NA[rows])

        job.fit(reflex, loss, len(held_out[0]), reflex.save)
