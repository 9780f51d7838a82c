import pytest
import torch

import cnmm
from cnmm.blocks import Mix, Shared
from cnmm.training.muon import NEWTON_SCHULZ, Muon, Stack, edge_matrices, orthogonalised
from cnmm.training.optim import Optimizer, outer_parameters, shift_parameters
from cnmm.training.recipes import recipe
from tests.training.helpers import new_model, same

MUON = {"optimizer": "muon", "lr": 0.004, "shift_lr": 2.0, "freeze_out": True, "clip": 0.0, "precision": "float32"}


def muon(**options):
    return recipe("quick", **{**MUON, **options})


def backward(model, seed=1):
    x = torch.randn(8, 1, 28, 28, generator=torch.Generator().manual_seed(seed))
    torch.autograd.backward(sum(score.square().mean() for score in model.forward_exits(x).values()))


def matrices(model):
    """Each matrix and its gradient, found edge by edge."""
    for node in range(1, model.lattice.output):
        this = model.map_module(node)
        for k in range(len(this.sources)):
            rows = slice(*this.mix.span(k))
            yield this.mix.weight.detach()[rows], this.mix.weight.grad[rows]
        if this.shared is not None:
            yield this.shared.pointwise.detach().flatten(1), this.shared.pointwise.grad.flatten(1)


def literally(matrix, momentum, angle, norm):
    """One step of one matrix, [K, C]: three Newton-Schulz steps on Nesterov's direction."""
    a, b, c = NEWTON_SCHULZ
    x = momentum / momentum.norm()
    for _ in range(3):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    moved = matrix - angle * norm * x / x.norm()
    return moved * norm / moved.norm()


def test_each_matrix_takes_the_step_that_it_would_take_alone():
    model = new_model().double()
    optimizer = Optimizer(model, muon(matrix_lr=0.1, warmup=0.0, schedule="linear"))
    backward(model)
    norms = [matrix.norm() for matrix, _ in matrices(model)]
    sums = [torch.zeros_like(gradient) for _, gradient in matrices(model)]
    assert len(norms) == sum(len(stack.heights) for stack in edge_matrices(model))
    for step, part in enumerate((0.0, 0.5)):
        optimizer.zero_grad()
        backward(model, step)
        wanted = []
        for number, (matrix, gradient) in enumerate(matrices(model)):
            sums[number] = 0.9 * sums[number] + gradient
            wanted.append(literally(matrix, gradient + 0.9 * sums[number], 0.1 * (1 - part), norms[number]))
        optimizer.step(part)
        found = [matrix for matrix, _ in matrices(model)]
        assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_every_matrix_turns_by_the_same_angle_and_keeps_its_norm(precision):
    model = new_model()
    optimizer = Optimizer(model, muon(matrix_lr=0.1, warmup=0.0, schedule="linear", precision=precision))
    backward(model)
    before = [matrix.clone() for matrix, _ in matrices(model)]
    optimizer.step(0.5)
    for old, (new, _) in zip(before, matrices(model), strict=True):
        assert new.norm() == pytest.approx(old.norm().item(), rel=1e-5)
        # a step of length 0.05 |W|, then back to the sphere: along the sphere it is that long at most
        assert 0.03 < (new - old).norm() / old.norm() < 0.0501


@pytest.mark.parametrize("shape", [(8, 20), (20, 8)])
def test_orthogonalised_has_the_singular_vectors_and_flat_singular_values(shape):
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    for narrow in (True, False):
        found = orthogonalised(x, narrow=narrow, steps=5)
        cosine = (found * (u @ v)).sum((1, 2)) / (found.norm(dim=(1, 2)) * (u @ v).norm(dim=(1, 2)))
        assert cosine.min() > 0.97
        values = torch.linalg.svdvals(found)
        assert values.min() > 0.6
        assert values.max() < 1.3


def test_a_matrix_without_gradient_stays():
    weight = torch.nn.Parameter(torch.randn(6, 5))
    old = weight.detach().clone()
    Muon([Stack(weight, (2, 4))], momentum=0.9, narrow=True).step(0.1)
    torch.testing.assert_close(weight.detach(), old)


@pytest.mark.parametrize("name", cnmm.list_models())
def test_types_decide_what_moves_by_what(name):
    with torch.device("meta"):
        model = cnmm.create_model(name)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    optimizer = Optimizer(model, muon())
    turned = {names[id(parameter)] for parameter in optimizer.muon.parameters}
    mixes = {name for name, module in model.named_modules() if isinstance(module, Mix)}
    assert turned == {f"{name}.weight" for name in mixes} | {
        f"{name}.pointwise" for name, module in model.named_modules() if isinstance(module, Shared)
    }
    frozen = {names[id(parameter)] for parameter in outer_parameters(model)}
    assert frozen == {name for name in names.values() if name.startswith("maps.") and ".out_affine." in name}
    shifts = {names[id(parameter)] for parameter in shift_parameters(model)}
    assert shifts == {name for name in names.values() if name.endswith((".affine.bias", "first.bias", "second.bias"))}
    moved = [names[id(parameter)] for parameter in optimizer.others]
    assert sorted([*moved, *turned, *frozen]) == sorted(names.values())
    for group in optimizer.rest.param_groups:
        assert {names[id(parameter)] in shifts for parameter in group["params"]} == {group["factor"] == 2.0}
    assert {name for name in optimizer.tensors() if name.startswith("steps.")} == {f"steps.{name}" for name in moved}


def test_the_first_step_of_adam_is_the_rate_and_frozen_scales_stay():
    model = new_model()
    optimizer = Optimizer(model, muon(lr=0.01, weight_decay=0.0, warmup=0.0, schedule="linear"))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    backward(model)
    model.gate_logits.grad = None
    optimizer.step(0.5)
    moved = {name: (parameter.detach() - before[name]).abs() for name, parameter in model.named_parameters()}
    torch.testing.assert_close(moved["stem"], torch.full_like(moved["stem"], 0.005), rtol=1e-3, atol=1e-6)
    assert moved["maps.2.mix.affine.bias"].max() == pytest.approx(0.01, rel=1e-3)  # shifts: twice as fast
    assert moved["gate_logits"].max() == 0
    assert not any(moved[name].any() for name in moved if name.startswith("maps.") and ".out_affine." in name)


def test_long_gradients_of_the_rest_are_shortened_and_no_others():
    model = new_model()
    optimizer = Optimizer(model, muon(clip=1e-3))
    backward(model)
    turned = [parameter.grad.clone() for parameter in optimizer.muon.parameters]
    optimizer.clip()
    assert torch.stack([p.grad.norm() for p in optimizer.others]).norm() == pytest.approx(1e-3, rel=0.01)
    assert all(torch.equal(p.grad, old) for p, old in zip(optimizer.muon.parameters, turned, strict=True))


def test_state_is_tensors_that_another_optimizer_goes_on_from():
    ends = []
    for stop in (False, True):
        model = new_model()
        optimizer = Optimizer(model, muon(precision="bfloat16"))
        for step in range(4):
            if stop and step == 2:
                saved = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
                weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
                model = new_model(seed=7)
                optimizer = Optimizer(model, muon(precision="bfloat16"))
                model.load_state_dict(weights)
                assert saved.keys() == optimizer.tensors().keys()
                for name, tensor in optimizer.tensors().items():
                    tensor.copy_(saved[name])
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step(0.1 + 0.2 * step)
        ends.append(model.state_dict())
    assert same(*ends)
