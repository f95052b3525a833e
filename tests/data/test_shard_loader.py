"""The loader: one case by hand, then one stream for every layout and every point of resume."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.errors import DataError
from data.loader import ShardLoader
from data.order import shuffled
from data.pack import PADDING, best_fit, pair_starts
from data.shards import verify

SEED = 5


def loader(directory, rank=0, world=1, batch_size=1, seq_len=4, **options):
    return ShardLoader(directory, "train", SEED, rank, world, batch_size, seq_len, **options)


def take(loaders, batches):
    """Global batches as lists of rows (tuples of inputs), ranks in order."""
    streams = [iter(one) for one in loaders]
    return [
        [tuple(row.tolist()) for stream in streams for row in next(stream).inputs_BL]
        for _ in range(batches)
    ]


@pytest.fixture
def numbered(make_set):
    """23 sequences of 4 in two shards: sequence i starts with token 4 * i + 1, no two alike."""
    first, second = list(range(1, 49)), list(range(49, 94))  # 48 + EOS: 12; 45 + EOS: 11 windows
    return make_set([[first], [second]])


def one_pass(directory, **options):
    return sorted(
        (batch.inputs_BL[0].tolist(), batch.labels_BL[0].tolist(), batch.positions_BL[0].tolist())
        for batch in loader(directory, infinite=False, **options)
    )


def test_windows_labels_and_positions_by_hand(make_set):
    # pairs: 1>2 2>3 3>0 | 4>5 5>0 | 6>7 7>8 8>9 9>0; windows of 4: two, one pair is left
    directory = make_set([[[1, 2, 3], [4, 5], [6, 7, 8, 9]]])
    assert one_pass(directory) == [
        ([1, 2, 3, 4], [2, 3, 0, 5], [0, 1, 2, 0]),
        ([5, 6, 7, 8], [0, 7, 8, 9], [0, 0, 1, 2]),  # 5 continues, at position 0
    ]
    assert one_pass(directory, document_mask=False)[0][2] == [0, 1, 2, 3]
    # the same shards at seq_len 5, and as one stream where EOS predicts the next document
    assert [row[0] for row in one_pass(directory, seq_len=5)] == [[1, 2, 3, 4, 5]]
    assert one_pass(directory, across_documents=True) == [
        ([1, 2, 3, 0], [2, 3, 0, 4], [0, 1, 2, 3]),
        ([4, 5, 0, 6], [5, 0, 6, 7], [0, 1, 2, 0]),
    ]


def test_best_fit_by_hand(make_set):
    # pairs 5, 3, 2, 1 in windows of 4: the long one fills a window and shares its second (room 3)
    # with the 3; the 2 takes a third with the 1, and one pair of padding
    directory = make_set([[[1, 2], [3], [4, 5, 6, 7, 8], [9, 10, 11]]], bins=True)
    verify(directory)
    assert one_pass(directory) == [
        ([1, 2, 3, 0], [2, 0, 0, -100], [0, 1, 0, 0]),
        ([4, 5, 6, 7], [5, 6, 7, 8], [0, 1, 2, 3]),
        ([8, 9, 10, 11], [0, 10, 11, 0], [0, 0, 1, 2]),
    ]
    with pytest.raises(DataError, match="packed by best_fit"):
        loader(directory, across_documents=True)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(2, 16))
def test_best_fit_cuts_no_document_that_fits(lengths, length):
    ids_D = [np.array([*[i + 1] * pairs, 0], dtype=np.uint32) for i, pairs in enumerate(lengths)]
    pack = best_fit(ids_D, list(range(len(ids_D))), length, eos_id=0)
    first_pair_D = pair_starts(pack.first_D)
    assert (pack.tokens_N.size - pack.first_D.size) % length == 0  # whole windows
    assert sorted(pack.source_D[pack.source_D != PADDING]) == list(range(len(ids_D)))
    for first, source in zip(first_pair_D, pack.source_D):
        if source != PADDING:
            start, pairs = int(first) % length, lengths[source]
            assert start + pairs <= length if pairs <= length else start == 0
    assert pack.pairs == sum(lengths)


def test_order_is_the_documented_feistel_network():
    """Against plain integers, from the definition: 12 rounds, SplitMix64, cycle walking."""

    def mix(x):
        x = (x + 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    def place(index, length, seed, epoch):
        half = 3  # 23 needs 5 bits: two halves of 3
        while True:
            left, right = index >> half, index % 2**half
            for number in range(12):
                key = mix(mix(mix(seed) + epoch) + number)
                left, right = right, left ^ (mix((right + key) % 2**64) % 2**half)
            index = left << half | right
            if index < length:
                return index

    for epoch in (0, 1):
        expected = [place(index, 23, SEED, epoch) for index in range(23)]
        assert shuffled(np.arange(23), 23, SEED, epoch).tolist() == expected


@pytest.mark.parametrize("length", [1, 2, 3, 16, 17, 1000, 65_537])
def test_every_epoch_is_another_permutation(length):
    orders = [shuffled(np.arange(length), length, SEED, epoch) for epoch in range(3)]
    for order in orders:
        assert np.array_equal(np.sort(order), np.arange(length))
    if length >= 16:
        assert not np.array_equal(orders[0], orders[1])
        assert not np.array_equal(orders[0], shuffled(np.arange(length), length, SEED + 1, 0))


def test_rank_r_takes_its_run_of_the_global_batch(numbered):
    order = shuffled(np.arange(23), 23, SEED, epoch=0)
    for rank in (0, 1):
        batch = next(iter(loader(numbered, rank, world=2, batch_size=3)))
        expected = order[3 * rank : 3 * rank + 3]
        # sequence i: tokens 4i+1 ..; the second shard starts behind 12 sequences and 48 tokens
        assert batch.inputs_BL[:, 0].tolist() == (4 * expected + 1).tolist()


def test_same_global_batches_on_every_number_of_ranks(numbered):
    streams = [
        take([loader(numbered, rank, world, 8 // world) for rank in range(world)], 9)
        for world in (1, 2, 4, 8)
    ]
    assert all(stream == streams[0] for stream in streams)
    rows = [row for batch in streams[0] for row in batch]
    for epoch in range(3):  # 72 samples: three whole epochs of 23 see every sequence once each
        assert len(set(rows[23 * epoch : 23 * (epoch + 1)])) == 23


@pytest.mark.parametrize("stops", [(1, 2), (2, 5), (3, 3), (5, 6)])  # 23 samples: batch 3 crosses
@pytest.mark.parametrize("worlds", [(4, 2, 1), (1, 4, 2), (2, 2, 2)])
def test_resumes_twice_on_any_number_of_ranks(numbered, stops, worlds):
    expected = take([loader(numbered, batch_size=8)], 8)
    seen, state = [], None
    for world, until in zip(worlds, (*stops, 8)):
        ranks = [loader(numbered, rank, world, 8 // world) for rank in range(world)]
        if state:
            for one in ranks:
                one.load_state_dict(state)
        seen += take(ranks, until - len(seen))
        states = [one.state_dict() for one in ranks]
        assert all(other == states[0] for other in states)
        state = states[0]
    assert seen == expected


def test_one_pass_gives_all_ranks_the_same_number_and_starts_anew(numbered):
    ranks = [loader(numbered, rank, 2, 5, infinite=False) for rank in range(2)]
    passes = [[len(list(rank)) for rank in ranks] for _ in range(2)]
    assert passes == [[2, 2], [2, 2]]  # 23 // 10; three samples dropped
    stopped = iter(ranks[0])
    first = next(stopped).inputs_BL
    assert np.array_equal(next(iter(ranks[0])).inputs_BL, first)  # a new pass, not the second batch
    resumed = loader(numbered, 0, 2, 5, infinite=False)
    resumed.load_state_dict(ranks[0].state_dict())
    assert len(list(resumed)) == 1
    assert len(list(resumed)) == 2


def test_state_of_other_data_or_settings_is_refused(numbered, make_set):
    state = loader(numbered).state_dict()
    changed = make_set([[[1, 2, 3, 4, 5]]], name="changed")
    with pytest.raises(DataError, match="manifest_sha256"):
        loader(changed).load_state_dict(state)
    with pytest.raises(DataError, match="seq_len 4, this run has 8"):
        loader(numbered, seq_len=8).load_state_dict(state)
    with pytest.raises(DataError, match="lacks 'samples'"):
        loader(numbered).load_state_dict({k: v for k, v in state.items() if k != "samples"})


def test_settings_that_cannot_work(numbered):
    with pytest.raises(DataError, match=r"seq_len 49 leaves no window.*48 pairs"):
        loader(numbered, seq_len=49)
    with pytest.raises(DataError, match="token id 93, the model's vocabulary ends at 92"):
        loader(numbered, vocab_size=93)
    assert loader(numbered, vocab_size=94).sequences == 23
    with pytest.raises(DataError, match="rank is 2; 2 ranks are 0 to 1"):
        loader(numbered, rank=2, world=2)
    with pytest.raises(DataError, match="23 sequences of 4, less than a global batch of 4 x 8"):
        loader(numbered, world=4, batch_size=8, infinite=False)
    with pytest.raises(DataError, match="no split 'test'; it has: train"):
        ShardLoader(numbered, "test", SEED, 0, 1, 1, 4)
