"""A policy: models, Normalizer and the planner's params, in one folder of safetensors and JSON files."""

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np
import torch

from tap.data.observations import check_observations, ood_reasons
from tap.data.windows import Normalizer
from tap.files import write_json
from tap.model.actor import Actor, load_actor, save_actor
from tap.model.critic import Critic, load_critic, save_critic
from tap.model.prior import Prior, load_prior, save_prior
from tap.model.serialization import load_description
from tap.model.vqvae import VQVAE, load_vqvae, save_vqvae
from tap.planning.anytime import Anytime, searches_within
from tap.planning.plan import Plan, TimedPlan
from tap.planning.planner import Planner
from tap.settings import PlannerParams


class Policy:
    """Acts by planning. `plan` and `act` take raw observations (N, O) and one random generator per state, on the CPU."""

    def __init__(
        self,
        vqvae: VQVAE,
        normalizer: Normalizer,
        prior: Prior,
        params: PlannerParams,
        device: torch.device,
        critic: Critic | None = None,
        actor: Actor | None = None,
    ) -> None:
        self.vqvae, self.normalizer, self.prior, self.params, self.device = vqvae, normalizer, prior, params, device
        self.critic, self.actor = critic, actor
        self.planner = self._planner(params)

    def _planner(self, params: PlannerParams) -> Planner:
        return Planner(self.vqvae, self.prior, self.normalizer, params, self.critic, self.actor)

    @property
    def observation_dim(self) -> int:
        return self.vqvae.layout.observation_dim

    @property
    def action_dim(self) -> int:
        return self.vqvae.layout.action_dim

    @property
    def budget_ms(self) -> float:
        """The longest time to plan for a state; 0: as long as the search takes."""
        return self.params.budget_ms or 0.0

    def plan(self, observations: np.ndarray, generators: Sequence[torch.Generator]) -> Plan:
        """The best plan from each observation, within `budget_ms` if there is one. Raises ValueError as `check` does."""
        if self.budget_ms:
            return self.plan_within(observations, generators, len(observations) * self.budget_ms / 1000)
        return self.planner.plan(self._states(observations), generators)

    def plan_within(self, observations: np.ndarray, generators: Sequence[torch.Generator], seconds: float) -> TimedPlan:
        """The best plan from each observation, one after another, that is found in `seconds` for all of N.

        Raises ValueError as `check` does.
        """
        self.check(observations)
        end = self.anytime.clock() + seconds
        plans: list[TimedPlan] = []
        for row, generator in enumerate(generators):
            share = (end - self.anytime.clock()) / (len(generators) - row)
            found = self.anytime.plan(observations[row : row + 1], generator, share)
            # Means have scores of different kinds, by critic or decoder: there the wider search is the better one.
            best = list(found.values())[-1] if self.params.averages else max(found.values(), key=lambda plan: plan.score[0])
            plans.append(TimedPlan(**vars(best), searched=np.array([list(found)[-1]])))
        return TimedPlan(**{name: np.concatenate([getattr(plan, name) for plan in plans]) for name in vars(plans[0])})

    @cached_property
    def anytime(self) -> Anytime[Plan]:
        """The searches of `plan_within`, which keeps what it has measured of them."""

        def search(params: PlannerParams) -> Callable[[np.ndarray, torch.Generator], Plan]:
            planner = self._planner(params)
            return lambda observation, generator: planner.plan(self._states(observation), [generator])

        return Anytime({name: search(params) for name, params in searches_within(self.params).items()})

    def ood_reasons(self, observations: np.ndarray, plan: Plan) -> list[dict[str, str]]:
        """Why each of N plans from raw observations (N, O) is out of distribution, one dict per plan, empty if it is not.

        "state": the state is far outside the training data; the sentence names the dimension in which it is farthest.
        "plan": the plan, or of a mean over codes the code with the highest weight, is less likely than the planner's threshold
        beta^M (paper, section 3.3).
        """
        reasons = ood_reasons(observations, self.normalizer, self.vqvae.layout.observation)
        threshold, num_codes = self.params.likelihood_threshold, self.planner.num_codes
        for row in np.flatnonzero(plan.log_probability < num_codes * math.log(threshold)):
            reasons[row]["plan"] = (
                f"the plan has probability {math.exp(plan.log_probability[row]):.2g},"
                f" less than the threshold {threshold:g}^{num_codes} = {threshold**num_codes:.2g}"
            )
        return reasons

    def candidates(self, observations: np.ndarray, generators: Sequence[torch.Generator]) -> Plan:
        """All C plans that the search scores, or the mean weighs, from each observation: arrays are (N, C, ...)."""
        return self.planner.candidates(self._states(observations), generators)

    def check(self, observations: np.ndarray) -> None:
        """Raise ValueError as `check_observations` does."""
        check_observations(observations, self.observation_dim)

    def _states(self, observations: np.ndarray) -> torch.Tensor:
        self.check(observations)
        return torch.as_tensor(observations, dtype=torch.float32, device=self.device)

    def act(self, observations: np.ndarray, generators: Sequence[torch.Generator]) -> np.ndarray:
        """The first action (N, A) of each observation's best plan."""
        return self.plan(observations, generators).actions[:, 0]

    def save(self, folder: Path) -> None:
        """Write the policy into `folder`, which can then be moved and loaded anywhere."""
        save_vqvae(folder, self.vqvae, self.normalizer)
        save_prior(folder, self.prior)
        if self.critic:
            save_critic(folder, self.critic)
        if self.actor:
            save_actor(folder, self.actor)
        write_json(folder / "planner.json", self.params.model_dump(mode="json"))

    @classmethod
    def load(cls, folder: Path, device: str = "cpu") -> Self:
        """Read a policy that `save` wrote. Raises ValueError if files are missing or damaged."""
        params = load_description(folder, "planner", PlannerParams)
        return cls.join(folder, folder, folder, folder, params, torch.device(device))

    @classmethod
    def join(
        cls,
        vqvae_folder: Path,
        prior_folder: Path,
        critic_folder: Path,
        actor_folder: Path,
        params: PlannerParams,
        device: torch.device,
    ) -> Self:
        """Assemble a policy from the output folders of the training stages; critic and actor only if the search needs them.

        Raises ValueError as `load` does.
        """
        vqvae, normalizer = load_vqvae(vqvae_folder, device)
        prior = load_prior(prior_folder, vqvae.params, vqvae.layout.observation_dim, device)
        critic = load_critic(critic_folder, vqvae, device) if params.search == "critic_weighted" else None
        actor = load_actor(actor_folder, vqvae.layout, device) if params.averages and params.actor else None
        return cls(vqvae, normalizer, prior, params, device, critic, actor)
