"""Slots of a plan as DeepEP's experts: its index arithmetic, with a stand-in for its buffer."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.execution.layer_cases import TOKENS, E, K, S, errors_of, gloo_transport
from tests.execution.test_layer import PLANS, check


class Buffer:
    """What ``execution/deepep.py`` says that DeepEP does, over one gloo group, without haste."""

    def __init__(self, group, slots: int, most_tokens: int):
        self.group, self.rank, self.ranks = group, group.rank(), group.size()
        self.own, self.most_tokens = slots // self.ranks, most_tokens

    def shared(self, mine):
        theirs = [None] * self.ranks
        dist.all_gather_object(theirs, mine, group=self.group)
        return theirs

    def dispatch(
        self, x, *, topk_idx=None, topk_weights=None, num_experts=None,
        num_max_tokens_per_rank=None, num_sms=0, do_expand=False, do_cpu_sync=None, handle=None,
    ):  # fmt: skip
        if handle is not None:
            assert topk_idx is None
            assert not do_cpu_sync
            rows = torch.cat([t[i] for t, i in zip(self.shared(x), handle.tokens_of)])
            return rows, None, None, handle, None
        assert do_cpu_sync
        assert not do_expand
        assert len(x) <= num_max_tokens_per_rank <= self.most_tokens
        assert num_experts == self.own * self.ranks
        assert len(set(self.shared(num_max_tokens_per_rank))) == 1
        rows, slots, weights, tokens_of = [], [], [], []
        for x_TD, idx_TK, weight_TK in self.shared((x, topk_idx, topk_weights)):
            local_TK = idx_TK - self.rank * self.own
            local_TK[(local_TK < 0) | (local_TK >= self.own)] = -1
            tokens = (local_TK >= 0).any(1).nonzero().flatten()
            tokens_of.append(tokens)
            rows.append(x_TD[tokens])
            slots.append(local_TK[tokens])
            weights.append(weight_TK[tokens] * (local_TK[tokens] >= 0))
        slot_NK = torch.cat(slots)
        counts = torch.bincount(slot_NK[slot_NK >= 0], minlength=self.own).tolist()
        handle = SimpleNamespace(
            num_sms=num_sms, num_recv_tokens_per_expert_list=counts, tokens_of=tokens_of,
            sent=topk_idx.shape,
        )  # fmt: skip
        return torch.cat(rows), slot_NK, torch.cat(weights), handle, None

    def combine(self, rows, *, handle, topk_weights=None):
        tokens, top_k = handle.sent
        sums = rows.new_zeros(tokens, rows.shape[1])
        weights = None if topk_weights is None else topk_weights.new_zeros(tokens, top_k)
        for theirs, their_weights, tokens_of in self.shared((rows, topk_weights, handle.tokens_of)):
            begin = sum(map(len, tokens_of[: self.rank]))
            mine = slice(begin, begin + len(tokens_of[self.rank]))
            sums.index_add_(0, tokens_of[self.rank], theirs[mine])
            if weights is not None:
                weights.index_add_(0, tokens_of[self.rank], their_weights[mine])
        return sums, weights, None


def open_buffer_of(group):
    def open_buffer(width, tokens, top_k, slots):
        assert top_k == K
        assert slots == E + group.size() * S
        assert tokens == max(TOKENS[: group.size()])
        return Buffer(group, slots, tokens), 24

    return open_buffer


def deepep_errors(rank, ranks, world, chunks):
    transport = gloo_transport(rank, ranks, world, world)
    if transport is None:
        return None
    opened = open_buffer_of(transport.group)
    return {
        (planner, routing): errors_of(
            transport, "deepep", chunks, planner, routing, open_buffer=opened
        )
        for planner in (PLANS if world == 4 else ("full slots",))
        for routing in ("hot", "one expert")
    }


@pytest.mark.ranks
@pytest.mark.parametrize(("world", "chunks"), [(4, 1), (4, 2), (2, 2)])
def test_plans_through_deepep_equal_the_oracle(four_ranks, world, chunks):
    """Every plan, replicas included; ragged ranks, one of them without tokens."""
    for errors in four_ranks.run(deepep_errors, world, chunks)[:world]:
        for (planner, _), case in errors.items():
            check([case], planner)
