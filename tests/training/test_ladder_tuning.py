import math

import pytest
import torch

import cnmm
from cnmm.evaluation.damage import measure_orders
from cnmm.orders import load_orders
from cnmm.training import ladder_tuning
from cnmm.training.ladder_tuning import Ladder
from cnmm.training.loop import Stopped, train
from cnmm.training.seeds import seeded
from tests.training.helpers import folder, new_model, same, small_config, small_data, weights


def test_ladder_tuning_draws_budgets_evenly_on_a_logarithmic_scale():
    model = new_model()
    ladder = Ladder(model)
    points = [ladder.draw(seeded(0, "ladder", step)) for step in range(400)]
    assert points == [ladder.draw(seeded(0, "ladder", step)) for step in range(400)]
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


def rule_letter(rule):
    return {"flow": "c", "flow_per_mac": "m"}[rule]


def test_ladder_tuning_of_a_single_exit_reaches_its_cheapest_network():
    model = cnmm.create_model("cnmm_tiny", exits="last")
    ladder = Ladder(model)
    points = [ladder.draw(seeded(0, "ladder", step)) for step in range(200)]
    assert {point.exit for point in points} == {3}
    costs = cnmm.CostTable.of(model.config)
    found = {costs.point(point).macs for point in points}
    least = min(costs.point(point).macs for point in cnmm.cutting_order(model))
    assert max(found) > 0.8 * costs.exit().macs
    assert min(found) < 1.5 * least


def test_cutting_orders_are_computed_once(monkeypatch, tmp_path):
    computed = []

    def counted(model, exit, *, rule):
        computed.append((exit, rule))
        return cnmm.cutting_order(model, exit, rule=rule)

    monkeypatch.setattr(ladder_tuning, "cutting_order", counted)
    train(new_model(), small_data(), small_config(ladder_start=0.5), tmp_path)
    assert sorted(computed) == sorted((exit, rule) for exit in (1, 2, 3) for rule in ("flow", "flow_per_mac"))


def test_gates_stand_still_while_the_ladder_is_tuned(tmp_path):
    for start, moves in ((0.0, False), (1.0, True)):
        model = new_model()
        before = model.gate_logits.detach().clone()
        config = small_config(ladder_start=start, gates="expectation", epochs=1)
        after = train(model, small_data(), config, folder(tmp_path / str(start)))
        assert torch.equal(before, after.gate_logits) != moves


def test_the_ladder_of_damage_is_measured_once_and_stored(tmp_path, monkeypatch):
    measured = []

    def counted(model, images, **options):
        measured.append(len(images))
        return measure_orders(model, images, **options)

    monkeypatch.setattr(ladder_tuning, "measure_orders", counted)
    data, config = small_data(), small_config(ladder_start=0.5, ladder_rule="damage")
    trained = train(new_model(), data, config, tmp_path)
    assert measured == [80]  # all that there are
    assert trained.orders == load_orders(tmp_path, trained.config)
    ladder = Ladder(trained, ["damage"])
    points = {ladder.draw(seeded(0, step)) for step in range(100)}
    assert points <= {point for exit in (1, 2, 3) for point in cnmm.cutting_order(trained, exit, rule="damage")}
    assert len(points) > 4


EVERYTHING = {
    "optimizer": "muon",
    "lr": 0.004,
    "shift_lr": 2.0,
    "freeze_out": True,
    "clip": 0.5,
    "schedule": "linear",
    "stem_init": "patches",
    "padding": "reflect",
    "crop": 2,
    "flips": "alternating",
    "label_smoothing": 0.1,
    "ladder_start": 0.4,
    "ladder_rule": "damage",
    "ladder_labels": 0.0,
    "exit_distill": 0.5,
    "average": 0.9,
    "precision": "bfloat16",
}


def stopped(model, data, config, folder, after, *, resume):
    count = []
    with pytest.raises(Stopped):
        train(
            model,
            data,
            config,
            folder,
            resume=resume,
            on_step=count.append,
            should_stop=lambda: len(count) == after,
        )


def test_a_run_with_everything_on_that_is_stopped_twice_ends_with_the_same_weights(tmp_path):
    """Each time it goes on from another initialisation: before and after the ladder is measured (10 steps, from 4)."""
    data, config = small_data(), small_config(**EVERYTHING)
    whole = train(new_model(), data, config, folder(tmp_path / "whole"))
    parts = folder(tmp_path / "parts")
    stopped(new_model(), data, config, parts, 2, resume=False)
    stopped(new_model(seed=5), data, config, parts, 5, resume=True)
    resumed = train(new_model(seed=6), data, config, parts, resume=True)
    assert same(weights(whole), weights(resumed))
    assert whole.orders == resumed.orders
