"""The rules in which the published routers and embeddings differ, each on a case done by hand."""

import math

import pytest
import torch

from tests.models.published_cases import CASES
from topoep_titan.models.family import linear
from topoep_titan.models.hf_config import from_hf_table
from topoep_titan.models.rope import HalfSplitRoPE, InterleavedRoPE
from topoep_titan.models.router import BalancedRouter


def router(**fields) -> BalancedRouter:
    """Two inputs, four experts; expert x scores input 0 times its weight."""
    config = BalancedRouter.Config(num_experts=4, gate=linear(1, 4), **fields)
    return config.build().eval()


def route(router: BalancedRouter, scores: list[float], bias: list[float] | None = None):
    """Route one token that has these scores (softmax of their logarithms, or sigmoid of logits)."""
    logits = torch.tensor(scores)
    logits = logits.log() if router.score_func == "softmax" else logits.logit()
    router.gate.weight.data = logits.unsqueeze(1)
    bias = None if bias is None else torch.tensor(bias)
    weights, ids, _ = router(torch.ones(1, 1, 1), bias)
    return dict(zip(ids[0, 0].tolist(), weights[0, 0].tolist()))


def test_groups_by_their_best_expert_and_by_their_two_best():
    scores = [0.4, 0.0001, 0.3, 0.2999]  # group 0 has the best expert, group 1 the better pair
    groups = {"num_expert_groups": 2, "num_limited_groups": 1, "top_k": 1}
    by_best = router(score_func="softmax", group_score="max", **groups)
    by_pair = router(score_func="softmax", group_score="top2_sum", **groups)
    assert list(route(by_best, scores)) == [0]
    assert list(route(by_pair, scores)) == [2]


def test_scale_applies_once_and_without_renormalising():
    plain = router(score_func="softmax", top_k=2, route_scale=16.0)
    assert route(plain, [0.1, 0.2, 0.3, 0.4]) == pytest.approx({3: 6.4, 2: 4.8})
    renormalised = router(score_func="softmax", top_k=2, route_norm=True)
    assert route(renormalised, [0.1, 0.2, 0.3, 0.4]) == pytest.approx({3: 4 / 7, 2: 3 / 7})


def test_selection_bias_chooses_but_does_not_weigh():
    sigmoid = router(score_func="sigmoid", top_k=2, route_norm=True)
    chosen = route(sigmoid, [0.2, 0.5, 0.6, 0.1], bias=[0.0, 0.0, 0.0, 0.6])
    assert chosen == pytest.approx({3: 0.1 / 0.7, 2: 0.6 / 0.7})


def test_partial_rotary_turns_the_first_half_and_pairs_across_it():
    rope = HalfSplitRoPE.Config(dim=4, max_seq_len=8, theta=1e4).build()
    query = torch.arange(1.0, 9.0).expand(1, 2, 1, 8)  # two positions, one head of eight
    turned, _ = rope(query, query)
    # At position 1 the pair (0, 2) turns by 1 radian, the pair (1, 3) by 1e4^(-2/4) = 0.01.
    c, s, d, t = math.cos(1), math.sin(1), math.cos(0.01), math.sin(0.01)
    expected = [c - 3 * s, 2 * d - 4 * t, 3 * c + s, 4 * d + 2 * t, 5, 6, 7, 8]
    assert turned[0, 1, 0].tolist() == pytest.approx(expected)
    assert turned[0, 0, 0].tolist() == pytest.approx(range(1, 9))


def test_deepseek_pairs_neighbours():
    rope = InterleavedRoPE.Config(dim=4, max_seq_len=8, theta=1e4).build()
    query = torch.arange(1.0, 5.0).expand(1, 2, 1, 4)
    turned, _ = rope(query, query)
    c, s, d, t = math.cos(1), math.sin(1), math.cos(0.01), math.sin(0.01)
    expected = [c - 2 * s, 2 * c + s, 3 * d - 4 * t, 4 * d + 3 * t]
    assert turned[0, 1, 0].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("seq_len", [8, 64])  # below and above the original length of 16
def test_yarn_is_on_whatever_the_length_and_enters_the_softmax_scale(seq_len):
    model = from_hf_table(CASES["deepseek_v2"])
    model.max_seq_len = seq_len
    attention = model.build_spec("").model.layers[0].attention.build()
    # Section 3.1.4 of the DeepSeek-V2 paper: sqrt(t) = 0.0707 ln s + 1 with s = 40.
    mscale = 0.0707 * math.log(40) + 1
    assert attention.softmax_scale == pytest.approx(16**-0.5 * mscale**2)
    plain = InterleavedRoPE.Config(dim=8, max_seq_len=seq_len, theta=1e4).build()
    assert not torch.allclose(attention.rope.cache[1], plain.cache[1])
    model.yarn_factor = 1.0
    attention = model.build_spec("").model.layers[0].attention.build()
    assert attention.softmax_scale == pytest.approx(16**-0.5)
    assert torch.equal(attention.rope.cache, plain.cache)


def test_eps_of_every_norm():
    glm = from_hf_table(CASES["glm4_moe"]).build_spec("").model
    assert glm.norm.eps == glm.layers[1].ffn_norm.eps == 1e-5
    lite = from_hf_table(CASES["deepseek_v2_lite"]).build_spec("").model
    assert lite.norm.eps == lite.layers[0].attention_norm.eps == 1e-5
    assert lite.layers[0].attention.kv_norm.eps == 1e-6  # fixed in the published code
