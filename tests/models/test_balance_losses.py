"""The auxiliary losses: equal to the published formulas, and to a summand of the loss."""

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from topoep_titan.models.family import linear
from topoep_titan.models.router import BalancedRouter

E, K, D, TOKENS = 6, 2, 5, 12  # per sequence


def router(**fields) -> BalancedRouter:
    config = BalancedRouter.Config(
        num_experts=E, gate=linear(D, E), top_k=K, aux_scale=0.3, **fields
    )
    built = config.build().train()
    built.tokens_per_step = 2 * TOKENS
    torch.manual_seed(0)
    torch.nn.init.normal_(built.gate.weight)
    return built


def inputs() -> Tensor:
    return torch.randn(2, TOKENS, D, generator=torch.Generator().manual_seed(1))


def published_loss(score_BLE: Tensor, ids_BLK: Tensor) -> Tensor:
    """DeepSeek-V2, equations 23 to 25, for each sequence; their mean."""
    losses = []
    for score_LE, ids_LK in zip(score_BLE, ids_BLK):
        f_E = torch.bincount(ids_LK.flatten(), minlength=E) * E / (K * TOKENS)
        losses.append((f_E * score_LE.mean(0)).sum())
    return torch.stack(losses).mean()


def published_device_losses(score_BLE: Tensor, ids_BLK: Tensor, groups: int, kept: int):
    """DeepSeek-V2, equations 26 to 28 and 29 to 31, token by token; means over sequences."""
    device, communication = [], []
    for score_LE, ids_LK in zip(score_BLE, ids_BLK):
        for group in range(groups):
            members = range(group * E // groups, (group + 1) * E // groups)
            p = sum(score_LE[:, x].mean() for x in members)
            f = [(ids_LK == x).sum() * E / (K * TOKENS) for x in members]
            sent = sum(any(int(x) in members for x in ids_K) for ids_K in ids_LK)
            device.append(sum(f) / len(f) * p)
            communication.append(groups / (kept * TOKENS) * sent * p)
    return sum(device) / len(score_BLE), sum(communication) / len(score_BLE)


def test_device_and_communication_losses_are_the_published_ones():
    groups = {"num_expert_groups": 3, "num_limited_groups": 2, "group_score": "max"}
    fields = {"score_func": "softmax", "aux_scope": "sequence", **groups}
    one = router(device_scale=0.7, communication_scale=0.11, **fields)
    weights, _, _ = one(inputs())
    weights.square().sum().backward()

    other = router(**fields).eval()  # no loss of its own
    weights, ids, scores = other(inputs())
    device, communication = published_device_losses(scores, ids, groups=3, kept=2)
    summand = 0.3 * published_loss(scores, ids) + 0.7 * device + 0.11 * communication
    (weights.square().sum() + summand).backward()
    torch.testing.assert_close(one.gate.weight.grad, other.gate.weight.grad)
    torch.testing.assert_close(one.aux_sum, summand.detach())


@pytest.mark.parametrize("score_func", ["softmax", "sigmoid"])
def test_gradient_is_that_of_the_published_loss_as_a_summand(score_func):
    one = router(score_func=score_func, aux_scope="sequence")
    weights, ids, scores = one(inputs())
    weights.square().sum().backward()

    other = router(score_func=score_func, aux_scope="sequence").eval()  # no loss of its own
    weights, ids, scores = other(inputs())
    share = scores / scores.sum(-1, keepdim=True)
    summand = 0.3 * published_loss(share, ids)
    (weights.square().sum() + summand).backward()
    torch.testing.assert_close(one.gate.weight.grad, other.gate.weight.grad)
    torch.testing.assert_close(one.aux_sum, summand.detach())


def test_batch_scope_is_transformers_loss_of_one_layer():
    one = router(score_func="softmax", aux_scope="batch")
    _, ids, scores = one(inputs())
    # load_balancing_loss_func of transformers: E * sum over k and x of mean one-hot * mean score
    mask_NKE = torch.nn.functional.one_hot(ids.flatten(0, 1), E).float()
    published = E * (mask_NKE.mean(0) * scores.flatten(0, 1).mean(0)).sum()
    torch.testing.assert_close(one.aux_sum, 0.3 * published.detach() / K)


def test_level_load_costs_the_coefficient_and_collapse_more():
    one = router(score_func="softmax", aux_scope="sequence")
    one.gate.weight.data = 100 * torch.eye(E)[:, :D]
    level = torch.eye(D).repeat(2, 3, 1)[:, :TOKENS]
    one.top_k = 1
    one(level)
    # Twelve tokens over experts 0 to 4: f = (3, 3, 2, 2, 2) * 6 / 12, p the same shares.
    assert float(one.aux_sum) == pytest.approx(0.3 * 6 * (9 + 9 + 4 + 4 + 4) / 144)
    one.aux_sum = 0.0
    one(level[:, :1].expand(-1, TOKENS, -1))
    assert float(one.aux_sum) == pytest.approx(0.3 * E)


def test_microbatches_add_up_to_the_whole_step():
    whole, parts = (router(score_func="softmax", aux_scope="sequence") for _ in range(2))
    whole(inputs())[0].sum().backward()
    for sequence in inputs().split(1):
        parts(sequence)[0].sum().backward()
    torch.testing.assert_close(parts.gate.weight.grad, whole.gate.weight.grad)
    torch.testing.assert_close(parts.aux_sum, whole.aux_sum)


def test_recomputation_changes_no_gradient_and_counts_once():
    plain, recomputed = (router(score_func="softmax", aux_scope="sequence") for _ in range(2))
    plain(inputs())[0].square().sum().backward()
    checkpoint(recomputed, inputs(), use_reentrant=False)[0].square().sum().backward()
    assert torch.equal(plain.gate.weight.grad, recomputed.gate.weight.grad)
    assert plain.aux_sum == recomputed.aux_sum > 0


def test_no_loss_in_evaluation_and_none_without_a_coefficient():
    one = router(score_func="softmax", aux_scope="sequence").eval()
    one(inputs())
    assert one.aux_sum == 0
    one.train().tokens_per_step = None
    with pytest.raises(RuntimeError, match="connect_routers"):
        one(inputs())
