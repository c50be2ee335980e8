"""The Trajectory Transformer's search in operations of fixed shapes, with a loop over tokens, so that its graph is small.

It is the search of tap/methods/trajectory_planner.py. There candidates share their past; as a graph, that would repeat the
model for each of a hundred tokens. Here each candidate has its own past, a token is written into a cache of full size, and the
tokens of an action, as those of a next state, are one `scan`.

Shapes: N states, W kept plans of a state, S = expansion_factor, R = N * W rows, C = R * S candidates, H steps, A action,
O observation, D tokens of a transition, E width; of the cache L layers, 2 for keys and values, G heads, P places, Q = E / G.
"""

import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan
from torch.nn import functional

from tap.methods.trajectory_model import TrajectoryModel
from tap.methods.trajectory_planner import TrajectoryPlanner, sample_bins
from tap.model.transformer import Block


def search(planner: TrajectoryPlanner, tokens_NP: Tensor, noise_NHAWS: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens (N, P), estimates (N, H, 2) and score (N,) of each state's best plan, as the planner's own search."""
    model, layout, params = planner.model, planner.layout, planner.params
    N, W, S, D = len(tokens_NP), params.beam_width, params.expansion_factor, model.token_dim
    row_R, sibling_C = torch.arange(N).repeat_interleave(W), torch.arange(N * W).repeat_interleave(S)
    hidden_RE, cache_L2RGPQ = _read(model, tokens_NP)
    hidden_RE, cache_L2RGPQ, tokens_RP = hidden_RE[row_R], cache_L2RGPQ[:, :, row_R], tokens_NP[row_R]
    estimates_RH2, paid_R, place = hidden_RE.new_empty(N * W, 0, 2), hidden_RE.new_zeros(N * W), tokens_NP.shape[1]

    for step in range(params.horizon):
        noise_AC = noise_NHAWS[:, step].transpose(0, 1).flatten(1)
        state_CO = tokens_RP[sibling_C, -layout.observation_dim :]
        hidden_CE, cache_L2CGPQ = hidden_RE[sibling_C], cache_L2RGPQ[:, :, sibling_C]
        dims = range(layout.observation_dim, layout.reward)
        hidden_CE, cache_L2CGPQ, action_CA = _tokens(planner, hidden_CE, cache_L2CGPQ, dims, place, noise_AC)
        reward_bin_C, reward_C = planner.estimate(hidden_CE, layout.reward)
        reward_place = torch.tensor([place + layout.action_dim])
        hidden_CE, cache_L2CGPQ = _append(model, cache_L2CGPQ, reward_bin_C, reward_place)
        return_C = planner.return_to_go(hidden_CE, state_CO, action_CA)
        score_NC = (paid_R[sibling_C] + planner.discount**step * return_C).view(N, -1)

        kept_NW = score_NC.topk(W if step + 1 < params.horizon else 1).indices
        kept_R = (kept_NW + W * S * torch.arange(N)[:, None]).flatten()
        past_R, place = sibling_C[kept_R], place + layout.action_dim + 1
        bins_RA = torch.cat([action_CA, reward_bin_C[:, None]], dim=1)[kept_R]
        tokens_RP = torch.cat([tokens_RP[past_R], bins_RA], dim=1)
        estimate_R2 = torch.stack([reward_C, return_C], dim=-1)[kept_R]
        estimates_RH2 = torch.cat([estimates_RH2[past_R], estimate_R2[:, None]], dim=1)
        paid_R = paid_R[past_R] + planner.discount**step * estimate_R2[:, 0]
        if step + 1 < params.horizon:
            hidden_RE, cache_L2RGPQ = hidden_CE[kept_R], cache_L2CGPQ[:, :, kept_R]
            if place == model.length * D:  # the window is full: its last transitions begin a new one
                place = params.context * D
                hidden_RE, cache_L2RGPQ = _read(model, tokens_RP[:, -place:])
            hidden_RE, cache_L2RGPQ, state_RO = _tokens(planner, hidden_RE, cache_L2RGPQ, range(layout.observation_dim), place)
            tokens_RP, place = torch.cat([tokens_RP, state_RO], dim=1), place + layout.observation_dim
    return tokens_RP, estimates_RH2, score_NC.amax(dim=1)


def _read(model: TrajectoryModel, tokens_RP: Tensor) -> tuple[Tensor, Tensor]:
    """The hidden state (R, E) after tokens that begin a window, and the cache (L, 2, R, G, P, Q) with room for a whole one."""
    hidden_RE, keys_values = model.read(tokens_RP)
    room = model.length * model.token_dim - tokens_RP.shape[1]
    return hidden_RE, functional.pad(torch.stack(keys_values), (0, 0, 0, room))


def _tokens(
    planner: TrajectoryPlanner, hidden: Tensor, cache: Tensor, dims: range, place: int, noise_AC: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states and cache after one more token of each dimension in `dims`, the first at `place`, and the tokens.

    With noise they are sampled, else the likeliest.
    """
    model, params = planner.model, planner.params

    def next_token(carry: list[Tensor], xs: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        (hidden, cache), (dim_1, place_1, *noise) = carry, xs
        logits = functional.linear(hidden, model.heads_XKE.index_select(0, dim_1)[0]).float()
        bins = sample_bins(logits, noise[0], params.top_k, params.cdf) if noise else logits.argmax(dim=-1)
        return [*_append(model, cache, bins, place_1)], bins

    places = torch.arange(place, place + len(dims))[:, None]
    xs = [torch.tensor(dims)[:, None], places, *([] if noise_AC is None else [noise_AC])]
    (hidden, cache), bins_AC = scan(next_token, [hidden, cache], xs)
    return hidden, cache, bins_AC.T


def _append(model: TrajectoryModel, cache: Tensor, tokens_C: Tensor, place_1: Tensor) -> tuple[Tensor, Tensor]:
    """The hidden states (C, E) after one more token at a place, and the cache (L, 2, C, G, P, Q) with it."""
    place_P = torch.arange(cache.shape[-2])
    up_to_1P = (place_P <= place_1)[None]
    x_C1E = (model.embed(tokens_C + place_1 % model.token_dim * model.bins) + model.transformer.positions(place_1))[:, None]
    layers = []
    for past_2CGPQ, block in zip(cache, model.transformer.blocks, strict=True):
        assert isinstance(block, Block)
        query_CG1Q, *new = block.project(x_C1E)
        layers.append(torch.where((place_P == place_1)[:, None], torch.stack(new), past_2CGPQ))
        key_CGPQ, value_CGPQ = layers[-1]
        read_CG1Q = functional.scaled_dot_product_attention(query_CG1Q, key_CGPQ, value_CGPQ, attn_mask=up_to_1P)
        x_C1E = block.add(x_C1E, read_CG1Q)
    return model.norm(x_C1E)[:, 0], torch.stack(layers)
