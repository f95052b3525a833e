"""The standard draws, bit for bit, and what they must look like."""

import hashlib

import pytest
import torch

from topoep_titan.errors import InputError
from topoep_titan.planning.workloads import load_of, skew, zipf


def test_skew_is_the_agreed_draw_bit_for_bit():
    load_RE = load_of(skew(128, 8, 4, 64, router_skew=-4, seed=0), 128)
    assert load_RE.dtype == torch.int64
    assert load_RE.shape == (4, 128)
    assert (
        hashlib.sha256(load_RE.numpy().tobytes()).hexdigest()
        == "1c66ee76357eb5bc78ac6f638b45ec3e02b332763556150a256c40fcdb2a9ad6"
    )


def test_every_token_has_top_k_different_experts():
    for ids_RTK in (skew(16, 4, 2, 50, router_skew=-1, seed=1), zipf(16, 4, 2, 50, seed=1)):
        assert ids_RTK.dtype == torch.int16
        assert ids_RTK.shape == (2, 50, 4)
        assert (ids_RTK.sort(dim=2).values.diff(dim=2) > 0).all()
        assert load_of(ids_RTK, 16).sum(1).tolist() == [200, 200]


def test_zipf_follows_its_popularity():
    """With top-1 the share of the n-th expert is 1/n over the harmonic number (H_4 = 25/12)."""
    shares_E = load_of(zipf(4, 1, 1, 40_000, seed=0), 4)[0].sort(descending=True).values / 40_000
    expected_E = torch.tensor([1, 1 / 2, 1 / 3, 1 / 4]) * 12 / 25
    assert (shares_E - expected_E).abs().max() < 0.01  # four standard deviations


def test_skew_orders_uniform_to_concentrated():
    hottest = [
        int(load_of(skew(64, 4, 2, 500, router_skew=s, seed=3), 64).sum(0).max())
        for s in (0, -0.5, -1, -2, -4)
    ]
    assert hottest == sorted(hottest)


def test_bad_shapes_are_refused():
    with pytest.raises(InputError, match="4 experts with top-k 8"):
        skew(4, 8, 2, 10, router_skew=0, seed=0)
    with pytest.raises(InputError, match="tokens per rank is 0"):
        zipf(4, 2, 2, 0, seed=0)
