import math

import pytest
import torch

import cnmm
from cnmm.training import ladder_tuning
from cnmm.training.ladder_tuning import ladder_loss, ladder_point
from cnmm.training.loop import train
from cnmm.training.objective import training_loss
from tests.training.helpers import new_model, same, small_config, small_data


def test_ladder_tuning_begins_when_told_and_leaves_statistics_alone():
    model, config = new_model(), small_config(ladder_start=0.5, ladder_weight=2.0)
    x, labels = torch.randn(6, 1, 28, 28), torch.arange(6)
    before = training_loss(model, x, labels, config, part=0.4, at=(0, 1)).item()
    after = training_loss(model, x, labels, config, part=0.6, at=(0, 1)).item()
    teacher = model.forward_exits(x)[3].detach()
    extra = ladder_loss(model, x, labels, teacher, config, (0, 1)).item()
    assert extra > 0
    assert after == pytest.approx(before + 2 * extra, abs=1e-5)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    ladder_loss(model, x, labels, teacher, config, (0, 2))
    assert same(buffers, dict(model.named_buffers()))


def test_ladder_tuning_draws_budgets_evenly_on_a_logarithmic_scale():
    model, config = new_model(), small_config()
    places = [(epoch, step) for epoch in range(8) for step in range(50)]
    points = [ladder_point(model, config, at) for at in places]
    assert points == [ladder_point(model, config, at) for at in places]
    costs = cnmm.CostTable.of(model.config)
    full = [costs.exit(exit).macs for exit in (1, 2, 3)]
    for exit in (2, 3):
        part = math.log(full[exit - 1] / full[exit - 2]) / math.log(full[2] / full[0])
        assert sum(point.exit == exit for point in points) / len(points) == pytest.approx(part, abs=0.08)
    last = {point.name for point in points if point.exit == 3}
    assert {name[:3] for name in last} == {"e3c", "e3m"}
    assert len(last) > 5
    for rule in ("flow", "flow_per_mac"):  # no point is passed over for a cheaper one, but for budgets below an exit
        macs = [costs.point(point).macs for point in cnmm.cutting_order(model, 3, rule=rule)]
        worth = {value for value in macs if value > full[1]} | {max(value for value in macs if value <= full[1])}
        drawn = {costs.point(point).macs for point in points if point.exit == 3 and point.name[2] == rule_letter(rule)}
        assert drawn <= worth
        assert len(drawn) > len(worth) / 2
    x, labels = torch.randn(4, 1, 28, 28), torch.arange(4)
    teacher = model.forward_exits(x)[3].detach()
    losses = {round(ladder_loss(model, x, labels, teacher, config, (0, step)).item(), 6) for step in range(12)}
    assert len(losses) > 3


def rule_letter(rule):
    return {"flow": "c", "flow_per_mac": "m"}[rule]


def test_ladder_tuning_of_a_single_exit_reaches_its_cheapest_network():
    model = cnmm.create_model("cnmm_tiny", exits="last")
    points = [ladder_point(model, small_config(), (0, step)) for step in range(200)]
    assert {point.exit for point in points} == {3}
    costs = cnmm.CostTable.of(model.config)
    found = {costs.point(point).macs for point in points}
    least = min(costs.point(point).macs for point in cnmm.cutting_order(model))
    assert max(found) > 0.8 * costs.exit().macs
    assert min(found) < 1.5 * least


def test_cutting_orders_are_computed_once_while_the_gates_stand_still(monkeypatch):
    """And anew as soon as they move: what is drawn is a function of the gates, the seed and the step alone."""
    computed = []

    def counted(plan, exit, *, rule):
        computed.append((exit, rule))
        return cnmm.cutting_order(plan, exit, rule=rule)

    monkeypatch.setattr(ladder_tuning, "cutting_order", counted)
    ladder_tuning.rungs.cache_clear()
    model, config, steps = new_model(), small_config(), range(100)
    before = [ladder_point(model, config, (0, step)) for step in steps]
    assert len(computed) == 2 * 2  # two rules; the first exit's budget is the least, and no point is cut to it
    with torch.no_grad():
        model.gate_logits.copy_(torch.linspace(2, -2, len(model.gate_logits)))
    after = [ladder_point(model, config, (0, step)) for step in steps]
    assert len(computed) == 2 * 2 * 2
    orders = [cnmm.cutting_order(model, exit, rule=rule) for exit in (2, 3) for rule in ladder_tuning.LADDER_RULES]
    assert set(after) <= {point for order in orders for point in order}
    assert [point.edges for point in after] != [point.edges for point in before]


def test_gates_stand_still_while_the_ladder_is_tuned(tmp_path):
    for start, moves in ((0.0, False), (1.0, True)):
        model, folder = new_model(), tmp_path / str(start)
        before = model.gate_logits.detach().clone()
        folder.mkdir()
        after = train(model, small_data(), small_config(ladder_start=start, gates="expectation", epochs=1), folder)
        assert torch.equal(before, after.gate_logits) != moves
