"""The Decision Transformer's model (Chen et al., NeurIPS 2021): actions as a function of the return that shall follow them.

    step     t                t+1
    tokens   R_t  s_t  a_t    R_t+1  s_t+1  a_t+1      each embedded, plus an embedding of t in the episode, then LayerNorm
    output        a_t                a_t+1             predicted from the state's token, which attends to all tokens before it

torchrl's Decision Transformer needs the package transformers, so this is built from the project's own Transformer.

Shapes: B batch, T steps of a window, O observation, A action, E width.
"""

import torch
from torch import Tensor, nn

from tap.data.windows import Layout
from tap.model.transformer import Transformer
from tap.settings import TransformerParams

MAX_STEPS = 1000  # of an episode, with an embedding each; later ones share the last. As in the published code
TOKENS = 3  # of a step


class DecisionModel(nn.Module):
    """A causal Transformer over the last steps of an episode."""

    def __init__(self, params: TransformerParams, layout: Layout, context: int) -> None:
        super().__init__()
        self.embed_return = nn.Linear(1, params.width)
        self.embed_observation = nn.Linear(layout.observation_dim, params.width)
        self.embed_action = nn.Linear(layout.action_dim, params.width)
        self.embed_step = nn.Embedding(MAX_STEPS, params.width)
        nn.init.zeros_(self.embed_step.weight)  # so that a step which no training episode has reached adds nothing
        self.embed_norm = nn.LayerNorm(params.width)
        self.transformer = Transformer(params, TOKENS * context)
        self.norm = nn.LayerNorm(params.width)
        self.predict_action = nn.Linear(params.width, layout.action_dim)

    def forward(self, return_BT: Tensor, observation_BTO: Tensor, action_BTA: Tensor, step_BT: Tensor) -> Tensor:
        """The actions (B, T, A) that are predicted for each step, all normalised.

        That of step t depends on returns-to-go and observations up to t, and on actions before t. `step_BT` counts from the
        start of the episode.
        """
        B, T = return_BT.shape
        step_BTE = self.embed_step(step_BT.clamp(max=MAX_STEPS - 1))
        tokens = (
            self.embed_return(return_BT[..., None]) + step_BTE,
            self.embed_observation(observation_BTO) + step_BTE,
            self.embed_action(action_BTA) + step_BTE,
        )
        x_BPE, _ = self.transformer(self.embed_norm(torch.stack(tokens, dim=2)).flatten(1, 2))
        predicted_BTA: Tensor = self.predict_action(self.norm(x_BPE.view(B, T, TOKENS, -1)[:, :, 1]))
        return predicted_BTA
