"""The Decision Transformer (Chen et al., NeurIPS 2021): a policy that imitates those recorded actions which a return followed.

It is asked for a return, the target, and remembers the last steps of the episode. At each step, the return-to-go is what the
rewards so far leave of the target.

Shapes: N states, B batch, T steps of a window, U = T - 1, O observation, A action, F token.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

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
        past = self.past(observations, histories).values()
        return Action(self.decide(*(each.to(self.target_return.device) for each in past))[:, None].cpu().numpy())

    def past(self, observations: np.ndarray, histories: Sequence[History] | None) -> dict[str, Tensor]:
        """What `decide` needs of N raw observations and their histories, by name; zeros before the start of an episode."""
        T, N = self.params.context, len(observations)
        given: dict[str, np.ndarray] = {
            "observations": np.zeros((N, T, self.observation_dim), np.float32),
            "past_actions": np.zeros((N, T - 1, self.action_dim), np.float32),
            "returns": np.zeros((N, T), np.float32),
            "step": np.zeros(N, np.int64),
        }
        given["observations"][:, -1] = observations
        for n, history in enumerate(histories or ()):
            steps = len(history.rewards)
            if last := min(steps, T - 1):
                given["observations"][n, -1 - last : -1] = history.observations[-last:]
                given["past_actions"][n, -last:] = history.actions[-last:]
            given["returns"][n, -1 - last :] = np.concatenate([[0.0], np.cumsum(history.rewards, dtype=np.float64)])[
                -1 - last :
            ]
            given["step"][n] = steps
        return {name: torch.from_numpy(array) for name, array in given.items()}

    def decide(self, observation_NTO: Tensor, action_NUA: Tensor, return_NT: Tensor, step_N: Tensor) -> Tensor:
        """The action (N, A) at the last of T raw observations, after U = T - 1 actions, in the environment's units.

        `return_NT` are the sums of the rewards before each observation, and `step_N` counts the steps before the last.

        Always a whole window, so that a decision takes equally long and rounds alike at each step. The padding follows the
        present step, as it follows an episode's end in training: an action never depends on what comes after it.
        """
        layout, T = self.layout, return_NT.shape[1]
        earlier_N1 = step_N[:, None].clamp(max=T - 1)
        place_T = torch.arange(T, device=step_N.device)

        def from_first(last: Tensor) -> Tensor:
            """Steps (N, T, ...), of which the last are of the episode, with those at the beginning."""
            padded = torch.cat([last, torch.zeros_like(last)], dim=1)
            index_NT = place_T + T - 1 - earlier_N1
            return padded.take_along_dim(index_NT.view(*index_NT.shape, *[1] * (last.dim() - 2)), dim=1)

        step_NT = (step_N[:, None] - earlier_N1 + place_T) * (place_T <= earlier_N1)
        to_go_NT = self.target_return - from_first(return_NT)
        predicted_NTA = self.model(
            self.normalizer.normalize(to_go_NT[..., None], slice(layout.return_to_go, None))[..., 0],
            self.normalizer.normalize(from_first(observation_NTO), layout.observation),
            self.normalizer.normalize(from_first(functional.pad(action_NUA, (0, 0, 0, 1))), layout.action),
            step_NT,
        )
        normal_NA = predicted_NTA.take_along_dim(earlier_N1[..., None], dim=1)[:, 0]
        return self.normalizer.denormalize(normal_NA, layout.action)

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
