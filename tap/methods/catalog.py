"""The methods other than TAP: how each is called and described, and where its policy is.

Their names, which params.yaml lists under `methods`, are `tap.settings.METHODS`.
"""

from dataclasses import dataclass

from tap.settings import METHODS, Method


@dataclass(frozen=True)
class MethodInfo:
    """A method in words, and its policy. Methods may share a policy, and differ in training."""

    title: str  # in tables
    summary: str  # in model cards
    module: str  # of the policy, below tap.methods
    policy: str  # the class in it, which saves NAME.json and NAME.safetensors by its attribute `name`
    extra: str | None = None  # of pyproject.toml, that training needs and acting does not
    learns_from_tap: bool = False  # from its decisions, after its models are trained


CATALOG: dict[Method, MethodInfo] = {
    "bc": MethodInfo(
        "behaviour cloning",
        "A network that imitates the data: it minimises the squared error of its actions, given the observation.",
        "behaviour_cloning",
        "BehaviourCloning",
    ),
    "bc-10": MethodInfo(
        "10 % BC",
        "A network that imitates the best episodes of the data, which have the highest returns and a tenth of the steps: it "
        "minimises the squared error of its actions, given the observation.",
        "behaviour_cloning",
        "BehaviourCloning",
    ),
    "iql": MethodInfo(
        "IQL",
        "Implicit Q-learning: a network that imitates the data's actions, the more the higher a critic values them. The critic "
        "learns from recorded actions alone.",
        "squashed_policy",
        "IqlPolicy",
        extra="offline-rl",
    ),
    "cql": MethodInfo(
        "CQL",
        "Conservative Q-learning: a network whose actions a critic values highly. The critic is trained to value other actions "
        "than the recorded ones low.",
        "squashed_policy",
        "CqlPolicy",
        extra="offline-rl",
    ),
    "tt": MethodInfo(
        "Trajectory Transformer",
        "A Transformer that predicts the dimensions of each transition in the data, one after another. Each decision is a beam "
        "search over actions, with the states and rewards that it predicts.",
        "trajectory_transformer",
        "TrajectoryTransformer",
    ),
    "tt-q": MethodInfo(
        "Trajectory Transformer (+Q)",
        "A Transformer that predicts the dimensions of each transition in the data, one after another. Each decision is a beam "
        "search over actions, with the states and rewards that it predicts, and with a critic's value of what follows: it is "
        "trained as implicit Q-learning's.",
        "trajectory_transformer_q",
        "TrajectoryTransformerQ",
    ),
    "dt": MethodInfo(
        "Decision Transformer",
        "A Transformer that predicts the data's actions, given the return that followed and the steps before. It is asked for "
        "a high return, and acts on the history of the episode: without one, an observation is taken for an episode's first.",
        "decision_transformer",
        "DecisionTransformer",
    ),
    "mopo": MethodInfo(
        "MOPO",
        "Model-based offline policy optimisation: a network trained in a learned model of the environment, whose rewards are "
        "lowered where the model is uncertain.",
        "squashed_policy",
        "MopoPolicy",
        extra="offline-rl",
    ),
    "reflex": MethodInfo(
        "reflex of TAP",
        "A network distilled from TAP's decisions at the data's states, which acts without planning. It carries the planner "
        "along: with a budget of time it acts by the widest search that fits.",
        "reflex",
        "Reflex",
        learns_from_tap=True,
    ),
}
assert tuple(CATALOG) == METHODS
