"""Every position, expert choice and gradient as transformers computes them, for tiny models."""

import pytest
import torch
from torch import nn

from tests.models.published_cases import (
    CASES,
    reference,
    shapes_of,
    token_ids,
    weight,
    write_folder,
)
from topoep_titan.models import load_hf, record_routing


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """(our model, transformers' results, our logits, our routing)"""
    folder = tmp_path_factory.mktemp(request.param)
    model = load_hf(write_folder(folder, CASES[request.param], shapes_of(request.param)))
    with record_routing(model) as routing:
        logits = model(token_ids())
    return model, reference(request.param), logits, routing


def test_logits_at_every_position(case):
    _, expected, logits, _ = case
    assert expected["logits"].std() > 0.5  # so that the tolerance means something
    torch.testing.assert_close(logits, expected["logits"], atol=1e-4, rtol=0)


def test_experts_and_their_weights(case):
    _, expected, _, routing = case
    ids = torch.stack([ids[0] for ids, _ in routing.values()])
    weights = torch.stack([weights[0] for _, weights in routing.values()])
    ids, order = ids.sort(-1)
    expected_ids, expected_order = expected["experts"].sort(-1)
    assert torch.equal(ids, expected_ids)
    assert len(ids[0].unique()) > 4  # tokens do choose different experts
    torch.testing.assert_close(
        weights.gather(-1, order), expected["weights"].gather(-1, expected_order)
    )


def test_loss_and_every_gradient_norm(case):
    model, expected, logits, _ = case
    ids = token_ids()
    loss = nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:])
    torch.testing.assert_close(loss, expected["loss"], rtol=1e-5, atol=0)
    model.zero_grad()
    loss.backward(retain_graph=True)
    norms = {name: float(gradient.norm()) for name, gradient in published_gradients(model).items()}
    assert norms == pytest.approx(expected["gradient_norms"], rel=1e-5, abs=1e-7)


def test_every_tensor_came_through_bit_for_bit(case):
    model, expected, _, _ = case
    spec = model.config_fields.build_spec("")
    published = spec.state_dict_adapter(spec.model, None).to_hf(model.state_dict())
    assert published.keys() == expected["shapes"].keys()
    for name, shape in expected["shapes"].items():
        assert torch.equal(published[name], weight(name, tuple(shape))), name
    ours = spec.state_dict_adapter(spec.model, None).from_hf(published)
    for name, tensor in model.state_dict().items():
        assert torch.equal(ours[name], tensor), name


def published_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Our gradients as published tensors, through the same hooks and adapter as the weights."""
    values = {name: parameter.data for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.data = parameter.grad.double()
    gradients = model.state_dict()
    for name, parameter in model.named_parameters():
        parameter.data = values[name]
    trained = {name for name in gradients if not name.endswith("expert_bias_E")}
    spec = model.config_fields.build_spec("")
    return spec.state_dict_adapter(spec.model, None).to_hf({k: gradients[k] for k in trained})
