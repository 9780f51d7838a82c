import pytest
import torch

import cnmm
from cnmm.training.loop import train
from cnmm.training.objective import training_loss
from cnmm.training.optim import Average, Optimizer, learning_rate, small_parameters, take_step
from cnmm.training.recipes import recipe
from tests.training.helpers import SGD, new_model, same, small_config, small_data, weights


def test_learning_rate_rises_and_falls_to_zero():
    for schedule, between in (("cosine", 0.5 + 0.5**1.5), ("linear", 0.75)):
        config = small_config(lr=1.0, warmup=0.2, schedule=schedule)
        rates = [learning_rate(config, part) for part in (0.0, 0.1, 0.2, 0.4, 0.6, 1.0)]
        assert rates == pytest.approx([0, 0.5, 1, between, 0.5, 0])
        assert learning_rate(config, 0.4, 0.03) == pytest.approx(0.03 * between)
        assert learning_rate(small_config(lr=1.0, warmup=0.0, schedule=schedule), 0.5) == pytest.approx(0.5)


@pytest.mark.parametrize("options", [{}, {"mixing": "sum"}])
@pytest.mark.parametrize("name", cnmm.list_models())
def test_weight_decay_spares_gates_normalisation_slopes_and_biases(name, options):
    with torch.device("meta"):
        model = cnmm.create_model(name, **options)
    everything = Optimizer(model, recipe("cifar10"))
    assert [group["weight_decay"] for group in everything.rest.param_groups] == [1e-4]
    decayed, plain = Optimizer(model, recipe("quick", **SGD)).rest.param_groups
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


@pytest.mark.parametrize("options", [{"clip": 0.5, "nesterov": True}, {"decay_all": True, "clip": 0.0}])
def test_sgd_is_torchs_own_bit_by_bit(options):
    """The paper's recipes are steps of torch.optim.SGD on all parameters, at the rate of the schedule."""
    config = small_config(optimizer="sgd", ladder_start=1.0, **options)
    ours, theirs = new_model().train(), new_model().train()
    optimizer = Optimizer(ours, config)
    spared = [] if config.decay_all else list(small_parameters(theirs))
    rest = [parameter for parameter in theirs.parameters() if not any(parameter is small for small in spared)]
    groups = [{"params": rest, "weight_decay": config.weight_decay}, {"params": spared, "weight_decay": 0.0}]
    plain = torch.optim.SGD(
        groups if spared else groups[:1], lr=1.0, momentum=config.momentum, nesterov=config.nesterov, fused=True
    )
    x, labels = torch.randn(8, 1, 28, 28), torch.arange(8)
    for step in range(4):
        part = step / 4
        loss = training_loss(ours, x, labels, config, at=(0, step))
        take_step(ours, optimizer, loss, config, part=part)
        plain.zero_grad()
        training_loss(theirs, x, labels, config, at=(0, step)).backward()
        if config.clip:
            torch.nn.utils.clip_grad_norm_(theirs.parameters(), config.clip)
        for group in plain.param_groups:
            group["lr"] = learning_rate(config, part)
        plain.step()
    assert same(weights(ours), weights(theirs))


def test_averages_follow_the_parameters():
    model = new_model()
    average = Average(model, 0.5)
    start = model.stem.detach().clone()
    with torch.no_grad():
        model.stem.add_(1)
    average.update(model, 100)
    average.copy_to(model)
    assert torch.allclose(model.stem, start + 0.5, atol=1e-6)
    assert Average(model, 0.0).tensors == {}


def test_an_average_of_a_short_training_forgets_where_it_began():
    model = new_model()
    average = Average(model, 0.998)
    with torch.no_grad():
        model.stem.add_(1)
    for step in range(50):
        average.update(model, step)
    trained = model.stem.detach().clone()
    average.copy_to(model)
    assert torch.allclose(model.stem, trained, atol=1e-5)
