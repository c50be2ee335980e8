"""The Decision Transformer's model against a plain one: numpy, one token after another, without masks or batches."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tap.data.windows import Layout
from tap.methods.decision_model import MAX_STEPS, DecisionModel
from tap.settings import TransformerParams

CONTEXT, LAYOUT = 6, Layout(3, 2)


@pytest.fixture
def model() -> DecisionModel:
    """With weights so large that everything matters."""
    torch.manual_seed(0)
    made = DecisionModel(TransformerParams(layers=2, width=8, heads=2, dropout=0.0), LAYOUT, CONTEXT).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5)
    return made.eval()


def inputs(steps: int, batch: int = 1, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (batch, steps), (batch, steps, 3), (batch, steps, 2)
    first = torch.randint(0, 50, (batch, 1), generator=generator)
    numbers = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return *numbers, first + torch.arange(steps)


def affine(layer: nn.Linear, x: np.ndarray) -> np.ndarray:
    return x @ layer.weight.detach().numpy().T + layer.bias.detach().numpy()


def normed(layer: nn.LayerNorm, x: np.ndarray) -> np.ndarray:
    unit = (x - x.mean()) / np.sqrt(x.var() + layer.eps)
    return unit * layer.weight.detach().numpy() + layer.bias.detach().numpy()


def plain_actions(model: DecisionModel, returns: Tensor, observations: Tensor, actions: Tensor, steps: Tensor) -> np.ndarray:
    """The predicted actions (T, A) of one window."""
    columns = [each[0].numpy() for each in (returns[..., None], observations, actions)]
    embeds = model.embed_return, model.embed_observation, model.embed_action
    table = model.embed_step.weight.detach().numpy()
    tokens = [
        normed(model.embed_norm, affine(embed, column[t]) + table[min(step, MAX_STEPS - 1)])
        for t, step in enumerate(steps[0].tolist())
        for embed, column in zip(embeds, columns, strict=True)
    ]
    tokens = [
        token + position.detach().numpy() for token, position in zip(tokens, model.transformer.positions.weight, strict=False)
    ]
    for block in model.transformer.blocks:
        read = []
        for token in tokens:  # queries, keys and values of both heads: (3, H, Q)
            read.append(affine(block.query_key_value, normed(block.attention_norm, token)).reshape(3, 2, -1))
        after = []
        for p, token in enumerate(tokens):
            heads = []
            for head in range(2):
                scores = np.array([read[p][0, head] @ read[q][1, head] for q in range(p + 1)]) / math.sqrt(4)
                weights = np.exp(scores - scores.max())
                heads.append(sum(w * read[q][2, head] for q, w in enumerate(weights / weights.sum())))
            token = token + affine(block.attention_out, np.concatenate(heads))
            hidden = affine(block.mlp[1], normed(block.mlp[0], token))
            hidden = hidden * 0.5 * (1 + np.array([math.erf(h / math.sqrt(2)) for h in hidden]))
            after.append(token + affine(block.mlp[3], hidden))
        tokens = after
    return np.stack([affine(model.predict_action, normed(model.norm, token)) for token in tokens[1::3]])


@pytest.mark.parametrize("steps", [1, 2, CONTEXT])
def test_it_predicts_what_a_plain_model_does(model: DecisionModel, steps: int) -> None:
    window = inputs(steps)
    with torch.no_grad():
        np.testing.assert_allclose(model(*window)[0].numpy(), plain_actions(model, *window), rtol=1e-9)


def test_an_action_depends_on_nothing_after_its_observation(model: DecisionModel) -> None:
    window = inputs(CONTEXT, batch=2)
    with torch.no_grad():
        before = model(*window)
        for changed, name in enumerate(("returns", "observations", "actions", "steps")):
            for t in range(CONTEXT):
                other = [each.clone() for each in window]
                other[changed][:, t] += 1
                differs = (model(*other) != before).any(dim=2)
                first = t + 1 if name == "actions" else t  # it depends on earlier actions alone
                assert not differs[:, :first].any() and differs[:, first:].all(), (name, t)


def test_rows_do_not_depend_on_each_other(model: DecisionModel) -> None:
    window = inputs(CONTEXT, batch=5)
    with torch.no_grad():
        together = model(*window)
        for row in range(5):
            torch.testing.assert_close(model(*(each[row : row + 1] for each in window)), together[row : row + 1])


def test_steps_beyond_the_last_embedding_share_it(model: DecisionModel) -> None:
    *window, _ = inputs(CONTEXT)
    late, later = (torch.arange(CONTEXT)[None] + first for first in (MAX_STEPS - 1, MAX_STEPS + 500))
    with torch.no_grad():
        assert torch.equal(model(*window, late), model(*window, later))
        assert not torch.equal(model(*window, late), model(*window, late - 100))


def test_a_step_that_was_never_trained_adds_nothing() -> None:
    torch.manual_seed(0)
    fresh = DecisionModel(TransformerParams(layers=1, width=8, heads=2, dropout=0.0), LAYOUT, CONTEXT).double().eval()
    *window, steps = inputs(CONTEXT)
    with torch.no_grad():
        assert torch.equal(fresh(*window, steps), fresh(*window, steps + 300))
