"""Cutting by measured damage: shared work changes nothing, the first cut is the best, orders are chains of points."""

import itertools
import math

import pytest
import torch
from torch.nn import functional as F

import cnmm
from cnmm.cost import CostTable
from cnmm.evaluation.damage import damage_order, measure_orders
from cnmm.lattice import OperatingPoint
from cnmm.orders import load_orders
from cnmm.prune import Survivors
from tests.helpers import refused, trained


@pytest.fixture(scope="module", params=[{}, {"blocks": 4, "scales": 3, "stem_stride": 2}], ids=["tiny", "deeper"])
def model(request):
    return trained("cnmm_tiny", channels=8, **request.param)


@pytest.fixture(scope="module")
def images():
    return torch.randn(16, 1, 28, 28, generator=torch.Generator().manual_seed(1))


def damage(model, images, edges, exit):
    """Plainly: two whole passes that normalise by the batch."""
    model.train()
    points = (OperatingPoint(exit=exit, edges=each, name="") for each in (model.lattice.exit_edges(exit), edges))
    with torch.no_grad():
        full, cut = (model(images, point, update_statistics=False).log_softmax(1) for point in points)
    model.eval()
    return float(F.kl_div(cut, full, reduction="batchmean", log_target=True))


def greedy(model, images, exit):
    """The same order without any shared work: what is known of a candidate is renewed when it would be the next cut."""
    costs, left = CostTable.of(model.config), Survivors(model.lattice.exit_edges(exit))
    increase, cuts = {}, []
    while candidates := left.candidates():
        now, fresh = damage(model, images, left.edges, exit), set()
        while True:
            ranked = sorted(candidates, key=lambda edge: (-edge[1], -edge[0]))
            best = min(ranked, key=lambda edge: increase.get(edge, -math.inf) / left.macs_saved(edge, costs))
            if best in fresh:
                break
            increase[best] = damage(model, images, left.edges - left.vanishing(best), exit) - now
            fresh.add(best)
        left.cut(best)
        cuts.append(best)
    return cuts


@pytest.mark.parametrize("exit", [1, 2, 3])
def test_an_order_is_that_of_separate_passes(model, images, exit):
    assert list(measure_orders(model, images)[exit]) == greedy(model, images, exit)


def test_the_first_cut_does_the_least_damage_per_mac(model, images):
    costs, left = CostTable.of(model.config), Survivors(model.lattice.exit_edges())
    exit = model.config.blocks

    def each(edge):
        return damage(model, images, left.edges - left.vanishing(edge), exit) / left.macs_saved(edge, costs)

    best = min(left.candidates(), key=each)
    assert damage_order(model, images)[1].edges == left.edges - left.vanishing(best)


@pytest.mark.parametrize("exit", [1, 2, 3])
def test_an_order_is_a_chain_from_the_full_exit_to_one_network(model, images, exit):
    order = damage_order(model, images, exit)
    assert order[0].edges == model.lattice.exit_edges(exit)
    for cuts, point in enumerate(order):
        assert (point.name, point.rule, point.cuts, point.exit) == (f"e{exit}d{cuts}", "damage", cuts, exit)
    for more, less in itertools.pairwise(order):
        assert less.edges < more.edges
        assert model.live_edges(less) == less.edges
    assert cnmm.Chain(model.lattice, model.gate_logits).count(exit, order[-1].edges) == 1


def test_the_model_is_left_alone(model, images):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    measure_orders(model, images)
    assert not model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_model_with_orders_has_points_by_damage(images):
    model = trained("cnmm_tiny", channels=8)
    assert refused(cnmm.named_point, model, "e3d2").startswith(
        "point 'e3d2': rule='damage': its cutting orders were not measured; `cnmm frontier RUN`"
    )
    model.orders = measure_orders(model, images)
    assert cnmm.named_point(model, "e3d2") == damage_order(model, images)[2]
    assert cnmm.cutting_order(model, 2, rule="damage") == damage_order(model, images, 2)
    assert "try e3d" in refused(cnmm.named_point, model, "e3d999")


def test_the_deterministic_variant_has_nothing_to_cut(images):
    model = trained("cnmm_tiny", mixing="sum")
    assert "nothing can be cut" in refused(damage_order, model, images)
    assert [point.name for point in cnmm.cutting_order(model, rule="damage")] == ["e3d0"]


def test_a_run_keeps_its_orders_and_finds_its_points_by_name(own_run, tmp_path):
    """Frontier, slim network, ONNX file, ladder and session of points that only the stored orders know."""
    stored = load_orders(own_run, cnmm.Run(own_run).model.config)
    assert stored  # `measure` has made them
    frontier = cnmm.Run(own_run).measure(rule="damage", images=50)
    assert {point.rule for point in frontier.points} == {"damage"}
    run = cnmm.Run(own_run)
    assert run.model.orders == stored
    cut = max((point for point in frontier.points if point.on_envelope), key=lambda point: point.cuts)
    assert cut.name == f"e{cut.exit}d{cut.cuts}"
    assert run.slim(point=cut.name).mixture_cost.macs == cut.macs == run.evaluate(point=cut.name).macs
    assert run.export(tmp_path / "a.onnx", point=cut.name).point == cut.name
    run.export_ladder(tmp_path / "ladder", 3)
    images, _ = run.images.held_out(4)
    session = run.session(3)
    for point in frontier.ladder(3):
        with torch.no_grad():
            network = cnmm.named_point(run.model, point.name)
            x = run.images.prepared.prepare(torch.from_numpy(images).permute(0, 3, 1, 2))
            expected = run.settled(network)(x, network).softmax(1)
        found = session.predict(images, budget=point.macs)
        torch.testing.assert_close(torch.from_numpy(found.probabilities), expected, rtol=0, atol=1e-4)


def test_all_rules_are_measured_unless_told(own_run):
    (own_run / "orders.json").unlink()
    run = cnmm.Run(own_run)
    with pytest.raises(cnmm.UserError, match="its cutting orders were not measured"):
        run.find(point="e3d1")
    flow = run.measure(rule="both", images=50)
    assert {point.rule for point in flow.points} <= {"flow", "flow_per_mac"}
    assert run.model.orders is None
    assert {point.rule for point in run.measure(images=50).points} == {"flow", "flow_per_mac", "damage"}
    assert run.find(point="e3d1").rule == "damage"
