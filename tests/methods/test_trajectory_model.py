"""The Trajectory Transformer's model against a loop over tokens, without batches of positions and without a cache."""

import pytest
import torch
from torch import Tensor

from tap.methods.trajectory_model import Cache, TrajectoryModel
from tap.settings import TransformerParams

LAYERS, HEADS = 2, 2
X, K, T = 5, 6, 4  # dimensions of a transition, bins, transitions
D = X - 1


@pytest.fixture
def model() -> TrajectoryModel:
    torch.manual_seed(0)
    model = TrajectoryModel(TransformerParams(layers=LAYERS, width=16, heads=HEADS, dropout=0.1), X, K, T).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


def random_tokens(count: int) -> Tensor:
    return torch.randint(K, (count, T, X), generator=torch.Generator().manual_seed(1))


def plain_log_probability(model: TrajectoryModel, steps: list[list[int]], step: int, dimension: int) -> Tensor:
    """ln p(steps[step][dimension] | everything before it but returns-to-go), from the Transformer's output at the last one."""
    earlier = [(d, token) for past in steps[:step] for d, token in enumerate(past[:D])]
    earlier += [(d, token) for d, token in enumerate(steps[step][:dimension]) if d < D]
    embedded = torch.stack([model.embed.weight[d * K + token] for d, token in earlier])
    hidden, _ = model.transformer(embedded[None])
    logits = model.heads_XKE[dimension] @ model.norm(hidden[0, -1])
    return logits[steps[step][dimension]] - logits.exp().sum().log()


def test_the_likelihood_is_that_of_one_token_after_another(model: TrajectoryModel) -> None:
    tokens = random_tokens(2)
    log_probs = model.log_probabilities(tokens)
    for b, t, x in torch.cartesian_prod(torch.arange(2), torch.arange(T), torch.arange(X)).tolist():
        expected = plain_log_probability(model, tokens[b].tolist(), t, x) if (t, x) != (0, 0) else torch.zeros(())
        torch.testing.assert_close(log_probs[b, t, x], expected, rtol=1e-4, atol=1e-5)


def test_nothing_is_predicted_from_a_return_to_go(model: TrajectoryModel) -> None:
    tokens = random_tokens(2)
    other = tokens.clone()
    other[..., -1] = (other[..., -1] + 1) % K
    one, two = model.log_probabilities(tokens), model.log_probabilities(other)
    torch.testing.assert_close(one[..., :-1], two[..., :-1], rtol=0, atol=0)
    assert (one[..., -1] != two[..., -1]).all()


def test_the_loss_is_the_weighted_mean_over_the_tokens_before_the_end(model: TrajectoryModel) -> None:
    tokens, weights = random_tokens(3), torch.tensor([1.0, 1.0, 5.0, 1.0, 1.0])
    lengths = [T, 2, 1]
    valid = torch.arange(T) < torch.tensor(lengths)[:, None]
    log_probs = model.log_probabilities(tokens)
    terms = [
        -weights[x] * log_probs[b, t, x]
        for b, length in enumerate(lengths)
        for t in range(length)
        for x in range(X)
        if (t, x) != (0, 0)
    ]
    loss = model.loss(tokens, valid, weights)["loss"]
    torch.testing.assert_close(loss, torch.stack(terms).mean())

    loss.backward()
    gradient = model.embed.weight.grad
    model.zero_grad()
    tokens[~valid] = 0
    again = model.loss(tokens, valid, weights)["loss"]
    again.backward()
    torch.testing.assert_close(again, loss, rtol=0, atol=1e-6)
    torch.testing.assert_close(model.embed.weight.grad, gradient, rtol=0, atol=1e-6)


@torch.no_grad()
def test_a_cache_gives_what_reading_the_tokens_anew_does(model: TrajectoryModel) -> None:
    """Also after sequences that share a past went on in different ways, and after some of them were kept."""
    tokens = random_tokens(3)[..., :D].flatten(1)
    rows, siblings = torch.tensor([2, 0, 2, 1]), 3
    cache = Cache(model.params, len(rows), T * D + (siblings - 1) * 2, torch.device("cpu"))
    _, keys_values = model.read(tokens[:, :5])
    cache.begin(keys_values, rows)
    sequences = tokens[rows, :5]
    for kept in ([1, 6, 6, 11], [0, 3, 4, 2]):
        cache.branch(siblings)
        sequences = sequences.repeat_interleave(siblings, dim=0)
        for _ in range(2):
            new = torch.randint(K, (len(rows), siblings), generator=torch.Generator().manual_seed(cache.steps))
            sequences = torch.cat([sequences, new.view(-1, 1)], dim=1)
            hidden = model.step(new, cache)
            torch.testing.assert_close(hidden.flatten(0, 1), model.read(sequences)[0], rtol=1e-4, atol=1e-5)
        cache.select(torch.tensor(kept))
        sequences = sequences[kept]
        new = torch.randint(K, (len(rows), 1), generator=torch.Generator().manual_seed(100 + cache.steps))
        sequences = torch.cat([sequences, new], dim=1)
        torch.testing.assert_close(model.step(new, cache)[:, 0], model.read(sequences)[0], rtol=1e-4, atol=1e-5)
    assert cache.steps == sequences.shape[1] == 11
