"""Ranks that derive different plans stop together, with one message."""

import pytest
import torch

from tests.execution.layer_cases import on_virtual_ranks
from topoep_titan.execution.layer import PlanMismatchError, check_same_plan
from topoep_titan.planning.plan import contiguous_mains, unbalanced_plan


def message(transport, odd_rank: int | None):
    load_RE = torch.ones(3, 6, dtype=torch.int64)
    load_RE[0, 0] += transport.rank == odd_rank
    plan = unbalanced_plan(load_RE, contiguous_mains(3, 6), 1)
    try:
        check_same_plan(plan, transport, torch.device("cpu"))
    except PlanMismatchError as error:
        return str(error)
    return None


@pytest.mark.parametrize("odd_rank", [None, 1])
def test_different_plans_stop_every_rank(odd_rank):
    messages = on_virtual_ranks(3, 3, message, odd_rank)
    if odd_rank is None:
        assert messages == [None] * 3
    else:
        assert len(set(messages)) == 1
        assert "ranks [0, 2] agree; ranks [1] agree" in messages[0]
