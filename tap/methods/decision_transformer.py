"""The Decision Transformer (Chen et al., NeurIPS 2021): a policy that imitates those recorded actions which a return followed.

It is asked for a return, the target, and remembers the last steps of the episode. At each step, the return-to-go is what the
rewards so far leave of the target.

Shapes: N states, B batch, T steps of a window, O observation, A action, F token.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from tap.data.history import History, check_histories
from tap.data.windows import Layout, Normalizer
from tap.distributed import all_reduce_sum
from tap.methods.decision_model import DecisionModel
from tap.methods.policy import Action, MethodPolicy
from tap.settings import Section, TrainDtParams, WindowParams


def window_params(params: TrainDtParams) -> WindowParams:
    """Windows of the context's length, with undiscounted sums of the recorded rewards as returns-to-go."""
    return WindowParams(
        length=params.context, discount=1.0, termination_penalty=None, bootstrap_truncated=False, normalize=True
    )


def with_return_scale(normalizer: Normalizer, return_scale: float | None) -> Normalizer:
    """The Normalizer which divides returns-to-go by `return_scale`; without one, it remains as it is."""
    if return_scale is None:
        return normalizer
    mean, std = normalizer.mean.copy(), normalizer.std.copy()
    mean[-1], std[-1] = 0, return_scale  # the last column of a transition
    return replace(normalizer, mean=mean, std=std)


class DecisionTransformer(MethodPolicy):
    """The model, and the target return. Equal observations and histories give equal actions."""

    name: ClassVar[str] = "dt"
    params_type: ClassVar[type[Section]] = TrainDtParams
    params: TrainDtParams
    target_return: Tensor  # in the environment's units

    def __init__(self, params: TrainDtParams, layout: Layout, normalizer: Normalizer) -> None:
        super().__init__(params, layout, normalizer)
        self.model = DecisionModel(params.transformer, layout, params.context)
        self.register_buffer("target_return", torch.zeros(()))

    @property
    def remembered_steps(self) -> int:
        return self.params.context - 1

    def loss(self, tokens_BTF: Tensor, valid_BT: Tensor, first_B: Tensor) -> dict[str, Tensor]:
        """This process's share of the mean squared error of actions over all valid steps; sum it over processes.

        Windows as `Windows.gather` returns them; `first_B` are the places of their first steps in the episodes. By the causal
        order, what follows an episode's end does not matter.
        """
        layout = self.layout
        step_BT = first_B[:, None] + torch.arange(valid_BT.shape[1], device=first_B.device)
        action_BTA = tokens_BTF[..., layout.action]
        predicted_BTA = self.model(
            tokens_BTF[..., layout.return_to_go], tokens_BTF[..., layout.observation], action_BTA, step_BT
        )
        count = all_reduce_sum(valid_BT.sum() * layout.action_dim)
        squared_BTA = (predicted_BTA.float() - action_BTA).square() * valid_BT[..., None]
        return {"loss": squared_BTA.sum() / count}

    @torch.no_grad()
    def plan(
        self, observations: np.ndarray, generators: Sequence[torch.Generator], histories: Sequence[History] | None = None
    ) -> Action:
        """The action at each of N raw observations (N, O), after its history; without histories, at the start of an episode.

        `generators` are not used. Raises ValueError as `check` does.
        """
        self.check(observations, histories)
        past = histories or [History.empty(self.observation_dim, self.action_dim)] * len(observations)
        windows = [self._window(*row) for row in zip(observations, past, strict=True)]
        target, device, layout = self.target_return, self.target_return.device, self.layout
        paid_NT, observation_NTO, action_NTA, step_NT = (
            torch.as_tensor(np.stack(field), device=device) for field in zip(*windows, strict=True)
        )
        predicted_NTA = self.model(
            self.normalizer.normalize((target - paid_NT)[..., None], slice(layout.return_to_go, None))[..., 0],
            self.normalizer.normalize(observation_NTO, layout.observation),
            self.normalizer.normalize(action_NTA, layout.action),
            step_NT,
        )
        present_N = torch.tensor([min(len(history.observations), self.remembered_steps) for history in past], device=device)
        normal_NA = predicted_NTA[torch.arange(len(past), device=device), present_N]
        return Action(self.normalizer.denormalize(normal_NA, layout.action)[:, None].cpu().numpy())

    def act(
        self, observations: np.ndarray, generators: Sequence[torch.Generator], histories: Sequence[History] | None = None
    ) -> np.ndarray:
        """The action (N, A) at each observation; as `plan`."""
        return self.plan(observations, generators, histories).actions[:, 0]

    def check(self, observations: np.ndarray, histories: Sequence[History] | None = None) -> None:
        """Raise ValueError as `check_observations` and `check_histories` do."""
        super().check(observations)
        if histories is not None:
            check_histories(histories, len(observations), self.observation_dim, self.action_dim, self.remembered_steps)

    def _window(self, observation: np.ndarray, history: History) -> tuple[np.ndarray, ...]:
        """The last steps and the present one, in raw units: rewards before each (T,), (T, O), (T, A), steps (T,).

        Always a whole window, so that a decision takes equally long and rounds alike at each step. The padding follows the
        present step, as it follows an episode's end in training: an action never depends on what comes after it.
        """
        earlier, length = min(len(history.observations), self.remembered_steps), self.params.context
        paid_T, step_T = np.zeros(length, np.float32), np.zeros(length, np.int64)
        observation_TO = np.zeros((length, self.observation_dim), np.float32)
        action_TA = np.zeros((length, self.action_dim), np.float32)
        first, steps = len(history.observations) - earlier, len(history.rewards)
        observation_TO[:earlier], observation_TO[earlier] = history.observations[first:], observation
        action_TA[:earlier] = history.actions[first:]
        paid = np.concatenate([[0.0], np.cumsum(history.rewards, dtype=np.float64)])
        paid_T[: earlier + 1] = paid[steps - earlier :]
        step_T[: earlier + 1] = np.arange(steps - earlier, steps + 1)
        return paid_T, observation_TO, action_TA, step_T
