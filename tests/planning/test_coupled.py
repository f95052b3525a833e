"""The coupled workload against the statistics of the models in the Expert Coupling text."""

from dataclasses import replace

import numpy as np
import pytest

from topoep_titan.errors import InputError
from topoep_titan.planning.coupled import PRESETS, TOP2, TOP6, coupled, coupling_for


def pair_counts(ids_TK: np.ndarray, experts: int) -> np.ndarray:
    """How often each pair of experts is chosen by one token, every pair once."""
    chosen_TE = np.zeros((len(ids_TK), experts))
    np.put_along_axis(chosen_TE, ids_TK.astype(np.int64), 1.0, axis=1)
    return (chosen_TE.T @ chosen_TE)[np.triu_indices(experts, 1)]


def removed_rows(ids_TK: np.ndarray, experts: int, groups: int) -> float:
    """The share of assignments that deduplication spares with contiguous groups of experts."""
    groups_TK = ids_TK // (experts // groups)
    distinct = (np.diff(np.sort(groups_TK, axis=1), axis=1) > 0).sum() + len(ids_TK)
    return 1 - distinct / groups_TK.size


def test_top2_pairs_and_next_layer():
    """Reference: the 64 hottest of 8,128 pairs hold 42 %; deduplication over 8 ranks spares 6 %;
    112 of 128 experts send at least 30 % to one expert of the next layer, the median 48 %."""
    *_, before, after = coupled(TOP2, layers=4, tokens=40_000, seed=11).numpy()
    pairs = np.sort(pair_counts(after, 128))[::-1]
    assert pairs[:64].sum() / pairs.sum() == pytest.approx(0.42, abs=0.04)
    assert removed_rows(after, 128, 8) == pytest.approx(0.06, abs=0.02)
    follows_EE = np.zeros((128, 128))
    for i in range(2):
        for j in range(2):
            np.add.at(follows_EE, (before[:, i], after[:, j]), 1)
    strongest_E = follows_EE.max(1) / np.bincount(before.ravel(), minlength=128)
    assert (strongest_E >= 0.3).sum() == pytest.approx(112, abs=8)
    assert np.median(strongest_E) == pytest.approx(0.48, abs=0.07)


def test_top6_deduplication():
    """Reference: deduplication over 8 ranks spares 25 %."""
    (ids_TK,) = coupled(TOP6, layers=1, tokens=20_000, seed=11).numpy()
    assert removed_rows(ids_TK, 128, 8) == pytest.approx(0.25, abs=0.03)


def test_two_seeds_are_two_samples_of_one_router():
    first, second = (pair_counts(coupled(TOP2, layers=1, tokens=20_000, seed=s)[0].numpy(), 128)
                     for s in (0, 1))  # fmt: skip
    other = pair_counts(
        coupled(TOP2, layers=1, tokens=20_000, seed=0, world_seed=2)[0].numpy(), 128
    )
    assert np.corrcoef(first, second)[0, 1] > 0.9
    assert abs(np.corrcoef(first, other)[0, 1]) < 0.1


def test_other_shapes_and_the_hard_form():
    assert coupling_for(128, 2) is TOP2
    assert coupling_for(128, 6) is TOP6
    hard = coupling_for(128, 8, hard=True)
    assert (hard.core, hard.spilled, hard.communities, hard.types) == (8, 4, 16, 64)
    assert coupling_for(640, 8).communities == 80
    (ids_TK,) = coupled(hard, layers=1, tokens=500, seed=0)
    assert (ids_TK.sort(dim=1).values.diff(dim=1) > 0).all()
    with pytest.raises(InputError, match="30 experts with top-k 8"):
        coupling_for(30, 8)


@pytest.mark.parametrize(("name", "times"), [("hot5", 5), ("hot8", 8), ("hot10", 10)])
def test_hot_presets_are_the_mildest_that_reach_their_name(name, times):
    """Seed 0, one layer of 16 ranks of 4,096 tokens; one step of 0.05 less does not reach it."""

    def hottest(sigma: float) -> float:
        preset = replace(PRESETS[name], load_sigma=sigma)
        load_E = np.bincount(coupled(preset, layers=1, tokens=65_536, seed=0).numpy().ravel())
        return load_E.max() / load_E.mean()

    sigma = PRESETS[name].load_sigma
    assert hottest(sigma) >= times > hottest(round(sigma - 0.05, 2))
    assert replace(PRESETS[name], load_sigma=PRESETS["top8"].load_sigma) == coupling_for(128, 8)
