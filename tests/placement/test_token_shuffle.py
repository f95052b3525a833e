"""Next-rank prediction and even assignment: by hand, against optimal assignment, and the text."""

import pytest
import torch
from scipy.optimize import linear_sum_assignment

from topoep_titan.errors import InputError
from topoep_titan.placement.shuffle import assign_evenly, fit_predictor
from topoep_titan.placement.statistics import SetSample, coselection, pearson


def test_assignment_by_hand():
    """Tokens 0 to 2 want rank 0, which takes two: token 1 would lose least and must leave."""
    scores_TR = torch.tensor([[5.0, 1.0], [3.0, 2.0], [4.0, 1.0], [1.0, 2.0]])
    assert assign_evenly(scores_TR).tolist() == [0, 1, 0, 1]


def test_assignment_is_even_deterministic_and_near_the_optimum():
    """Within 3 % of the Hungarian method on scores without structure, full of ties."""
    generator = torch.Generator().manual_seed(0)
    scores_TR = torch.randint(0, 7, (256, 8), generator=generator).float()
    rank_T = assign_evenly(scores_TR)
    assert torch.bincount(rank_T).tolist() == [32] * 8
    assert torch.equal(rank_T, assign_evenly(scores_TR.clone()))
    rows, columns = linear_sum_assignment(-scores_TR.repeat_interleave(32, dim=1).numpy())
    best = scores_TR[torch.arange(256), torch.from_numpy(columns // 32)[rows.argsort()]].sum()
    assert scores_TR[torch.arange(256), rank_T].sum() >= 0.97 * best
    assert torch.bincount(assign_evenly(torch.zeros(12, 3))).tolist() == [4, 4, 4]
    with pytest.raises(InputError, match="10 tokens do not divide evenly over 4 ranks"):
        assign_evenly(torch.zeros(10, 4))


def test_a_rule_is_learned():
    """Expert x of the last layer is followed by expert x + 1; the layer before it says nothing."""
    generator = torch.Generator().manual_seed(0)
    before_TK, last_TK = (torch.randint(8, (2000, 1), generator=generator) for _ in range(2))
    main_E = torch.arange(8) % 4
    predictor = fit_predictor([last_TK, before_TK], (last_TK + 1) % 8, main_E, ranks=4)
    scores_TR = predictor.scores([last_TK[:100], before_TK[:100]])
    assert torch.equal(scores_TR.argmax(1), main_E[(last_TK[:100, 0] + 1) % 8])
    assert scores_TR.amax(1).mean() == pytest.approx(1.0, abs=0.1)
    with pytest.raises(InputError, match="1 layers of history; fitted on 2"):
        predictor.scores([last_TK])


def test_coselection_by_hand():
    W_EE = coselection(torch.tensor([[0, 1], [1, 0], [1, 2]]), 3)
    assert W_EE.tolist() == [[0, 2, 0], [2, 0, 1], [0, 1, 0]]
    assert pearson(W_EE, 3 * W_EE + 1) == pytest.approx(1.0)
    assert pearson(W_EE, -W_EE) == pytest.approx(-1.0)


def test_sample_keeps_a_few_tokens_of_every_microbatch():
    sample = SetSample(6, 2, seed=0)
    for microbatch in range(4):
        sample.add(torch.full((50, 3), microbatch))
    assert sorted(sample.drain()[:, 0].tolist()) == [1, 1, 2, 2, 3, 3]  # the oldest are gone
    sample.add(torch.full((50, 3), 9))
    assert sample.drain().tolist() == [[9, 9, 9]] * 2
    assert len(SetSample(6, 2, seed=0).drain()) == 0
