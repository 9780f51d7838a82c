import json
import math

import pytest
import torch

import cnmm
from cnmm import run_folder
from cnmm.evaluation.damage import measure_orders
from cnmm.evaluation.learning import INITIALISATION, NORMS, initial_model, learning_report
from cnmm.training.optim import GradientNorms
from tests.helpers import ask, complaint, refused
from tests.training.helpers import new_model


def turned(model, share):
    """The model where every matrix of the blocks has learned so much."""
    with torch.no_grad():
        for this in model.maps.values():
            pieces = [this.mix.weight[slice(*this.mix.span(k))] for k in range(len(this.sources))]
            for old in [*pieces, *([this.shared.pointwise] if this.shared else [])]:
                new = torch.randn_like(old)
                new -= (new * old).sum() / old.square().sum() * old
                new *= old.norm() / new.norm()
                old.copy_(3 * (math.sqrt(1 - share) * old + math.sqrt(share) * new))  # its norm says nothing
    return model


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_share_is_what_was_learned(share):
    model = turned(new_model(seed=4), share)
    report = learning_report(model, 4)
    assert report.method == INITIALISATION
    assert [matrix.share for matrix in report.matrices] == pytest.approx([share] * len(report.matrices), abs=1e-5)
    names = [matrix.name for matrix in report.matrices]
    assert {name for name in names if "->" in name} == {f"{i}->{j}" for i, j in model.lattice.edges if j < 7}
    assert {name for name in names if "->" not in name} == {f"shared {node}" for node in range(1, 6)}
    assert {block: least for block, (_, least) in report.blocks().items()} == pytest.approx(
        dict.fromkeys((1, 2, 3), share), abs=1e-5
    )
    assert all(matrix.share > 0.5 for matrix in learning_report(model, 5).matrices)  # another seed


def test_gates_and_orders_are_compared_with_the_untrained():
    model = new_model()
    report = learning_report(model, 0)
    assert report.gates_mean == report.gates_max == 0
    assert all(order.common == order.kept for order in report.orders)
    assert [order.exit for order in report.orders] == [2, 3]  # the first has too few cuts
    with torch.no_grad():
        model.gate_logits.copy_(torch.linspace(3, -3, len(model.gate_logits)))
    model.orders = measure_orders(model, torch.randn(8, 1, 28, 28))
    report = learning_report(model, 0)
    moved = (model.gate_logits.sigmoid() - 0.5).abs()
    assert report.gates_max == pytest.approx(moved.max().item(), abs=1e-6)
    assert report.gates_mean == pytest.approx(moved.mean().item(), abs=1e-6)
    assert {order.rule for order in report.orders} == {"flow", "damage"}
    assert any(order.common < order.kept for order in report.orders if order.rule == "flow")


def test_a_run_says_its_seed_and_a_lost_beginning_is_told_from_norms(tmp_path):
    train = {"seed": 4, "lr": 0.2, "weight_decay": 5e-4, "momentum": 0.9, "optimizer": "sgd"}
    left = math.exp(-1000 * 0.1 * 5e-4 * 10)
    model = new_model(seed=4)
    with torch.no_grad():
        for parameter in model.maps.parameters():
            parameter.mul_(left)
    cnmm.save(model, tmp_path / "run", train=train)
    run_folder.append_log(tmp_path / "run", {"step": 1000, "gradients": {"1": 0.5}})
    report = learning_report(tmp_path / "run")
    assert max(matrix.share for matrix in report.matrices) == pytest.approx(0, abs=1e-5)
    assert report.gradients == {"1": 0.5}
    cnmm.save(model, tmp_path / "run", train=train, init=str(tmp_path / "gone"))
    report = learning_report(tmp_path / "run")
    assert report.method == NORMS
    assert max(mean for mean, _ in report.blocks().values()) < 0.15  # norms of small matrices vary
    cnmm.save(model, tmp_path / "run", train={**train, "optimizer": "muon"}, init=str(tmp_path / "gone"))
    assert "its initialisation is gone" in refused(learning_report, tmp_path / "run")
    cnmm.save(new_model(seed=9), tmp_path / "gone")
    assert learning_report(tmp_path / "run").method == INITIALISATION


def test_making_the_initialisation_again_leaves_randomness_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert torch.equal(initial_model(new_model(), 3).stem, initial_model(new_model(), 3).stem)
    torch.manual_seed(3)
    initial_model(new_model().eval(), 8)
    torch.manual_seed(3)
    assert torch.equal(before, torch.get_rng_state())


def test_a_trained_run_is_shown(trained_run, capsys):
    answer = ask(capsys, "info", trained_run, "--learning")["learning"]
    assert [row["block"] for row in answer["blocks"]] == [1, 2, 3]
    assert all(0 < row["least"] <= row["mean"] <= 1 for row in answer["blocks"])
    assert answer["gradients"].keys() >= {"stem", "1", "2", "3", "output"}
    from cnmm.cli.main import main

    assert main(["info", str(trained_run), "--learning"]) == 0
    page = capsys.readouterr().out
    assert "learned share" in page
    assert "of the untrained order" in page
    assert "only a run has learned something" in complaint(capsys, "info", "cnmm_tiny", "--learning")


def test_norms_of_gradients_are_root_mean_squares_by_block(trained_run):
    model = new_model()
    norms = GradientNorms(model)
    for value in (1.0, 3.0):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, value)
        model.gate_logits.grad = None
        norms.add()
    found, num = (
        norms.means(2),
        sum(parameter.numel() for node in ("1", "2") for parameter in model.maps[node].parameters()),
    )
    assert found.keys() == {"stem", "1", "2", "3", "output"}
    assert found["1"] == pytest.approx(math.sqrt(5 * num))
    assert found["stem"] == pytest.approx(math.sqrt(5 * model.stem.numel()))
    assert sum(value**2 for value in found.values()) == pytest.approx(
        5 * (sum(parameter.numel() for parameter in model.parameters()) - model.gate_logits.numel())
    )
    line = json.loads((trained_run / "log.jsonl").read_text().splitlines()[0])
    assert line["gradients"]["1"] > 0
    assert "gates" in line["gradients"]
