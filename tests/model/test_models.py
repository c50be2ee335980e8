"""The VQ-VAE, the prior and the Transformer they share."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from tap.data.windows import Layout
from tap.model.prior import Prior
from tap.model.transformer import Dropout, Transformer, compile_blocks, extend
from tap.model.vqvae import VQVAE
from tap.planning.policy import Policy
from tap.settings import Params, load_params

LAYOUT = Layout(observation_dim=11, action_dim=3)


def random_tokens(batch: int, length: int, *, first_padding: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, valid = torch.randn(batch, length, LAYOUT.token_dim), torch.ones(batch, length, dtype=torch.bool)
    tokens[..., LAYOUT.end] = 0
    if first_padding is not None:
        valid[:, first_padding:] = False
        tokens[:, first_padding:, LAYOUT.end] = 1
    return tokens, valid


def test_the_cache_gives_what_a_whole_pass_gives(tiny_params: Params) -> None:
    torch.manual_seed(0)
    model = Transformer(tiny_params.train_prior.transformer, 6).eval()
    x = torch.randn(3, 6, 16)
    whole, _ = model(x)
    first, new = model(x[:, :2])
    rows = torch.tensor([2, 0, 0])
    rest, _ = model(x[rows, 2:], extend(None, new, rows))
    torch.testing.assert_close(first, whole[:, :2], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(rest, whole[rows, 2:], rtol=1e-4, atol=1e-5)


def test_continuations_of_one_past_do_not_see_each_other(tiny_params: Params) -> None:
    """Two pasts with three continuations each, of two steps: every continuation gives what it gives alone."""
    torch.manual_seed(0)
    model = Transformer(tiny_params.train_prior.transformer, 6).eval()
    earlier, x = torch.randn(2, 2, 16), torch.randn(6, 2, 16)
    _, new = model(earlier)
    past = extend(None, new, torch.arange(2))
    together, new = model(x, past)
    rows = torch.tensor([4, 0])
    later = torch.randn(2, 1, 16)
    last, _ = model(later, extend(past, new, rows))
    for row in range(6):
        alone, _ = model(torch.cat([earlier[row // 3], x[row]])[None])
        torch.testing.assert_close(together[row], alone[0, 2:], rtol=1e-4, atol=1e-5)
    for n, row in enumerate(rows.tolist()):
        alone, _ = model(torch.cat([earlier[row // 3], x[row], later[n]])[None])
        torch.testing.assert_close(last[n], alone[0, 4:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dropout", [0.1, 0.5])
def test_dropout_is_an_independent_coin_for_each_element(dropout: float) -> None:
    """Within 4 standard deviations of the binomial; elements that share a random number must be independent."""
    torch.manual_seed(0)
    module, x = Dropout(dropout), torch.randn(1001, 999, requires_grad=True)
    random = torch.get_rng_state()
    y = module(x)
    y.backward(torch.ones_like(y))
    dropped = y == 0
    torch.testing.assert_close(y[~dropped], x[~dropped] / (1 - dropout))
    torch.testing.assert_close(x.grad, torch.where(dropped, 0.0, 1 / (1 - dropout)))
    std = (dropout * (1 - dropout) / x.numel()) ** 0.5
    assert dropped.float().mean().item() == pytest.approx(dropout, abs=4 * std)
    for shift in (1, 2, 3, 4):
        both = (dropped.flatten()[shift:] & dropped.flatten()[:-shift]).float().mean().item()
        assert both == pytest.approx(dropout**2, abs=4 * (dropout**2 * (1 - dropout**2) / x.numel()) ** 0.5)
    torch.set_rng_state(random)
    assert torch.equal(module(x), y)
    assert torch.equal(module.eval()(x), x)


@pytest.mark.slow
def test_compiled_blocks_compute_the_same(tiny_params: Params) -> None:
    torch.manual_seed(0)
    params = tiny_params.train_prior.transformer.model_copy(update={"dropout": 0.0, "layers": 2})
    plain = Transformer(params, 6)
    compiled = copy.deepcopy(plain)
    compile_blocks(compiled)
    x = torch.randn(3, 6, 16)
    for model in (plain, compiled):
        model(x)[0].square().sum().backward()
    assert list(compiled.state_dict()) == list(plain.state_dict())
    for one, other in zip(plain.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1  # one for all layers, and none fell back


def test_the_transformer_is_causal(tiny_params: Params) -> None:
    torch.manual_seed(0)
    model = Transformer(tiny_params.train_prior.transformer, 6).eval()
    x = torch.randn(1, 6, 16, requires_grad=True)
    model(x)[0][0, 2].sum().backward()
    assert x.grad is not None
    reached = x.grad[0].abs().sum(dim=1) > 0
    assert reached.tolist() == [True, True, True, False, False, False]


def test_earlier_codes_and_steps_do_not_depend_on_later_ones(tiny_policy: Policy) -> None:
    vqvae = tiny_policy.vqvae
    tokens, _ = random_tokens(2, 6)
    changed = tokens.clone()
    changed[:, 3:] += 1
    torch.testing.assert_close(vqvae.features(tokens)[:, 0], vqvae.features(changed)[:, 0])
    codes = torch.tensor([[1, 2], [3, 4]])
    one, _ = vqvae.decode(codes[:, :1], tokens[:, 0, LAYOUT.observation])
    both, _ = vqvae.decode(codes, tokens[:, 0, LAYOUT.observation])
    torch.testing.assert_close(one.transitions_BTX, both.transitions_BTX[:, :3], rtol=1e-4, atol=1e-5)


def test_predicted_observations_are_offsets_from_the_first_state(tiny_policy: Policy) -> None:
    vqvae = tiny_policy.vqvae
    with torch.no_grad():
        vqvae.to_token.weight.zero_()
        vqvae.to_token.bias.zero_()
    observation = torch.randn(2, 11)
    decoded, _ = vqvae.decode(torch.zeros(2, 2, dtype=torch.long), observation)
    expected = functional.pad(observation, (0, 5))[:, None].expand(-1, 6, -1)
    torch.testing.assert_close(decoded.transitions_BTX, expected)


def variant(params: Params, **changes: object) -> VQVAE:
    torch.manual_seed(0)
    vqvae = VQVAE(params.train_vqvae.model_copy(update=changes), LAYOUT)
    with torch.no_grad():
        for parameter in vqvae.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    vqvae.codebook.vectors_KD.normal_()
    return vqvae.eval()


def test_an_unconditional_decoder_does_not_see_the_state(tiny_params: Params) -> None:
    codes, states = torch.tensor([[1, 2], [1, 2]]), torch.randn(2, 11)
    blind, seeing = (variant(tiny_params, decoder=name) for name in ("unconditional", "conditional"))
    one, other = blind.decode(codes, states)[0].transitions_BTX
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    one, other = seeing.decode(codes, states)[0].transitions_BTX
    assert not torch.allclose(one, other)


@pytest.mark.parametrize("latent_step", [1, 2, 3])
def test_the_latent_step_sets_the_number_of_codes(tiny_params: Params, latent_step: int) -> None:
    vqvae = variant(tiny_params, latent_step=latent_step)
    tokens, _ = random_tokens(2, 6)
    codes = vqvae.encode(tokens)
    assert codes.shape == (2, 6 // latent_step)
    decoded, new = vqvae.decode(codes[:, :1], tokens[:, 0, LAYOUT.observation])
    assert decoded.transitions_BTX.shape == (2, latent_step, LAYOUT.transition_dim)
    rest, _ = vqvae.decode(codes[:, 1:], tokens[:, 0, LAYOUT.observation], extend(None, new, torch.arange(2)))
    whole, _ = vqvae.decode(codes, tokens[:, 0, LAYOUT.observation])
    torch.testing.assert_close(rest.transitions_BTX, whole.transitions_BTX[:, latent_step:], rtol=1e-4, atol=1e-5)


def test_codes_of_an_attention_bottleneck_belong_to_no_particular_steps(tiny_params: Params) -> None:
    vqvae = variant(tiny_params, bottleneck="attention")
    tokens, _ = random_tokens(2, 6)
    changed = tokens.clone()
    changed[:, -1] += 3  # the last step reaches the first code, which pooling would not allow
    assert not torch.allclose(vqvae.features(tokens)[:, 0], vqvae.features(changed)[:, 0])
    state = tokens[:1, 0, LAYOUT.observation]
    first = [vqvae.decode(torch.tensor([[1, code]]), state)[0].transitions_BTX[:, 0] for code in (2, 3)]
    assert not torch.allclose(*first)  # and the last code the first step
    shorter, _ = vqvae.decode(torch.tensor([[1]]), state)
    assert shorter.transitions_BTX.shape == (1, 3, LAYOUT.transition_dim)


def test_an_attention_bottleneck_masks_a_suffix_of_codes_in_training_only(tiny_params: Params) -> None:
    """With the second code masked, its value does not matter: about half of many windows ignore it."""
    bottleneck = variant(tiny_params, bottleneck="attention", transformer=without_dropout(tiny_params)).bottleneck
    one = torch.randn(1, 2, 16).expand(400, -1, -1)
    other = torch.cat([one[:, :1], torch.randn(400, 1, 16)], dim=1)
    expanded = []
    for x in (one, other):
        torch.manual_seed(1)  # the same masks for both
        expanded.append(bottleneck.train().expand(x))
    same = (expanded[0] - expanded[1]).abs().amax(dim=(1, 2)) < 1e-6
    assert 0.4 < same.float().mean() < 0.6
    assert not torch.isclose(bottleneck.eval().expand(one), bottleneck.expand(other)).all(dim=(1, 2)).any()


def without_dropout(params: Params) -> object:
    return params.train_vqvae.transformer.model_copy(update={"dropout": 0.0})


@pytest.mark.parametrize("first_action", [1.0, 10.0])
def test_the_loss_equals_a_plain_computation(tiny_params: Params, first_action: float) -> None:
    weights = tiny_params.train_vqvae.loss_weights.model_copy(update={"first_action": first_action})
    vqvae = variant(tiny_params, loss_weights=weights)
    tokens, valid = random_tokens(3, 6, first_padding=4)
    losses = vqvae.loss(tokens, valid)
    features = vqvae.features(tokens)
    codes = vqvae.encode(tokens)
    decoded, _ = vqvae.decode(codes, tokens[:, 0, LAYOUT.observation])
    first = torch.tensor([1.0] * 11 + [5.0 * first_action] * 3 + [1.0, 1.0])
    later = torch.tensor([1.0] * 11 + [5.0] * 3 + [1.0, 1.0])
    squares = [
        ((later if t else first) * (decoded.transitions_BTX[b, t] - tokens[b, t, :-1]) ** 2).mean()
        for b in range(3)
        for t in range(6)
        if valid[b, t]
    ]
    end = functional.binary_cross_entropy(decoded.end_logits_BT.sigmoid(), tokens[..., -1])
    commitment = ((features - vqvae.codebook.vectors_KD[codes]) ** 2).mean()
    torch.testing.assert_close(losses["loss"], torch.stack(squares).mean() + end + commitment, rtol=1e-4, atol=1e-5)
    assert losses["code_counts"].sum() == 3 * 2


def test_the_content_of_padding_does_not_change_the_reconstruction_loss(tiny_policy: Policy) -> None:
    tokens, valid = random_tokens(3, 6, first_padding=3)
    other = tokens.clone()
    other[:, 3:, LAYOUT.transition] += 7
    for name in ("observation", "action", "reward", "return_to_go"):
        torch.testing.assert_close(tiny_policy.vqvae.loss(tokens, valid)[name], tiny_policy.vqvae.loss(other, valid)[name])


def test_prior_probabilities_sum_to_one_over_all_sequences(tiny_policy: Policy) -> None:
    observation = torch.randn(1, 11)
    codes = torch.cartesian_prod(torch.arange(8), torch.arange(8))
    log_probs = tiny_policy.prior.log_probabilities(codes, observation.expand(64, -1)).sum(dim=1)
    torch.testing.assert_close(log_probs.exp().sum(), torch.tensor(1.0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("changes", [{}, {"bottleneck": "attention"}, {"decoder": "unconditional"}])
def test_every_parameter_moves_after_one_update(tiny_params: Params, changes: dict[str, str]) -> None:
    from tap.training import make_optimizer

    torch.manual_seed(0)
    vqvae = VQVAE(tiny_params.train_vqvae.model_copy(update=changes), LAYOUT)
    prior = Prior(tiny_params.train_prior, tiny_params.train_vqvae, observation_dim=11)
    tokens, valid = random_tokens(16, 6, first_padding=5)
    with torch.no_grad():
        codes = vqvae.train().codebook(vqvae.features(tokens))[1]
    losses = (
        (vqvae, lambda: vqvae.loss(tokens, valid)["loss"]),
        (prior, lambda: prior.loss(codes, tokens[:, 0, LAYOUT.observation])["loss"]),
    )
    for model, loss in losses:
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        optimizer = make_optimizer(model, tiny_params.train_vqvae.fit)
        loss().backward()
        optimizer.step()
        still = [name for name, parameter in model.named_parameters() if torch.equal(parameter, before[name])]
        assert still == []


@pytest.mark.parametrize(
    ("dataset", "observation_dim", "action_dim", "vqvae_millions", "prior_millions"),
    [("hopper-medium-replay", 11, 3, 25.8, 13.1), ("door-human-v0", 39, 28, 5.1, 2.6)],
)
def test_paper_scale_has_the_published_models_size(
    dataset: str,
    observation_dim: int,
    action_dim: int,
    vqvae_millions: float,
    prior_millions: float,
    params_yaml_with: Callable[..., Path],
) -> None:
    params = load_params(params_yaml_with(dataset), dataset, scale="paper")
    vqvae = VQVAE(params.train_vqvae, Layout(observation_dim, action_dim))
    prior = Prior(params.train_prior, params.train_vqvae, observation_dim)
    size = sum(p.numel() for p in vqvae.parameters()) / 1e6
    assert size == pytest.approx(vqvae_millions, rel=0.05)
    assert sum(p.numel() for p in prior.parameters()) / 1e6 == pytest.approx(prior_millions, rel=0.1)
