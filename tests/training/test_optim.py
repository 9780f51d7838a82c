import pytest
import torch

import cnmm
from cnmm.training.loop import train
from cnmm.training.optim import Average, learning_rate, make_optimizer
from cnmm.training.recipes import recipe
from tests.training.helpers import new_model, small_config, small_data


def test_learning_rate_rises_and_falls_to_zero():
    config = small_config(lr=1.0, warmup=0.2)
    rates = [learning_rate(config, part) for part in (0.0, 0.1, 0.2, 0.6, 1.0)]
    assert rates == pytest.approx([0, 0.5, 1, 0.5, 0])
    assert learning_rate(small_config(lr=1.0, warmup=0.0), 0.5) == pytest.approx(0.5)


@pytest.mark.parametrize("options", [{}, {"mixing": "sum"}])
@pytest.mark.parametrize("name", cnmm.list_models())
def test_weight_decay_spares_gates_normalisation_slopes_and_biases(name, options):
    with torch.device("meta"):
        model = cnmm.create_model(name, **options)
    everything = make_optimizer(model, recipe("cifar10"))
    assert [group["weight_decay"] for group in everything.param_groups] == [1e-4]
    decayed, plain = make_optimizer(model, recipe("quick")).param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (5e-4, 0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    spared = {names[id(parameter)] for parameter in plain["params"]}
    small = ("bias", "slope", "gate_logits", "affine.weight", "first.weight", "second.weight")
    assert spared == {name for name in names.values() if name.endswith(small)}
    assert {names[id(parameter)] for parameter in decayed["params"]} == set(names.values()) - spared
    assert ("gate_logits" in spared) == (not options)


def test_long_gradients_are_shortened(tmp_path):
    """With a tiny limit and neither momentum nor decay, a step moves the parameters by rate x limit at most."""
    model = new_model()
    before = torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])
    config = small_config(epochs=1, clip=1e-3, momentum=0.0, nesterov=False, weight_decay=0.0, warmup=0.0, lr=1.0)
    moved = []

    def measure(_):
        now = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        moved.append((now - before).norm().item())

    train(model, small_data(), config, tmp_path, on_step=measure)
    assert moved[0] == pytest.approx(1e-3, rel=0.01)


def test_averages_follow_the_parameters():
    model = new_model()
    average = Average(model, 0.5)
    start = model.stem.detach().clone()
    with torch.no_grad():
        model.stem.add_(1)
    average.update(model)
    average.copy_to(model)
    assert torch.allclose(model.stem, start + 0.5, atol=1e-6)
    assert Average(model, 0.0).tensors == {}
