import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cnmm import CostTable, create_model, cutting_order, list_models, model_plan, named_point
from cnmm.chain import Chain, count_networks
from cnmm.plan import Plan

RULES = ["flow", "flow_per_mac"]


def random_plan(name, seed, **options):
    config = model_plan(name, **options).config
    dag = model_plan(name, **options).chain.dag
    logits = torch.randn(len(dag.edges), generator=torch.Generator().manual_seed(seed)) * 2
    return Plan(config, tuple(logits.tolist()))


def literal_order(plan, exit, rule):
    """The rule as design and paper state it, with everything computed anew in every step."""
    dag = plan.chain.dag
    costs = CostTable.of(plan.config)
    edges = dag.exit_edges(exit)
    order = [edges]
    while True:
        candidates = [(i, j) for i, j in edges if sum(b == j for _, b in edges) > 1]
        if not candidates:
            return order
        flow = plan.chain.flow(exit, edges)

        def worth(edge, edges=edges, flow=flow):
            saved = costs.total(edges).macs - costs.total(dag.exit_edges(exit, edges - {edge})).macs
            return flow[edge] / (saved if rule == "flow_per_mac" else 1)

        least = min(worth(edge) for edge in candidates)
        ties = [edge for edge in candidates if worth(edge) <= least * (1 + 1e-9)]
        cut = max(ties, key=lambda edge: (edge[1], edge[0]))
        edges = dag.exit_edges(exit, edges - {cut})
        order.append(edges)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["cnmm_tiny", "cnmm_seg_tiny", "cnmm_b4s3_c32"])
def test_the_order_is_the_rule(name, rule):
    for plan in (model_plan(name), model_plan(name, gate_init="uniform"), random_plan(name, 0)):
        for exit in plan.config.exit_numbers:
            points = cutting_order(plan, exit, rule=rule)
            assert [point.edges for point in points] == literal_order(plan, exit, rule)


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.sampled_from(RULES), st.sampled_from(list_models()), st.data())
def test_macs_fall_nothing_dead_survives_and_one_network_is_left(seed, rule, name, data):
    plan = random_plan(name, seed)
    exit = data.draw(st.sampled_from(plan.config.exit_numbers))
    order = cutting_order(plan, exit, rule=rule)
    dag = plan.chain.dag
    macs = [CostTable.of(plan.config).point(point).macs for point in order]
    assert macs == sorted(macs, reverse=True)
    assert len(set(macs)) == len(macs)  # every cut saves something
    for point in order:
        assert point.edges  # connected
        assert dag.exit_edges(exit, point.edges) == point.edges  # every edge is on a path: no dead map
        assert (0, 1) in point.edges  # the stem is never cut
    assert order[0].edges == dag.exit_edges(exit)
    assert count_networks(dag, exit, order[-1].edges) == 1


def test_by_least_flow_one_network_is_left_after_the_known_number_of_cuts():
    assert len(cutting_order(model_plan("cnmm_b6s3"))) - 1 == 75
    dag = model_plan("cnmm_b6s3").chain.dag
    assert sum(len(inputs) - 1 for inputs in dag.inputs if inputs) == 75


@pytest.mark.parametrize("rule", RULES)
def test_all_orders_of_b12s3_take_seconds(rule):
    """One or two on a quiet machine, minutes if every cut began anew."""
    plan = random_plan("cnmm_b12s3", 0)
    start = time.process_time()
    for exit in plan.config.exit_numbers:
        cutting_order(plan, exit, rule=rule)
    assert time.process_time() - start < 10


def test_a_cut_base_hands_over_to_the_next_oldest():
    plan = Plan(model_plan("cnmm_tiny").config, (2.0,) * 16)  # newer inputs carry most of the flow
    order = cutting_order(plan, 3)
    dag = plan.chain.dag
    cut_base = [p for p in order if any((dag.inputs[j][0], j) not in p.edges for _, j in p.edges)]
    assert cut_base  # it happens
    for point in cut_base:
        for j in {j for _, j in point.edges}:
            weights = [w for (_, target), w in plan.chain.weights(3, point.edges).items() if target == j]
            assert sum(weights) == pytest.approx(1)


def test_names_lead_back_to_their_points():
    plan = random_plan("cnmm_b6s3", 1)
    for name in ("e6c37", "e1c0", "e5m20"):
        assert named_point(plan, name).name == name
    assert named_point(plan, "e6c37") == cutting_order(plan, 6)[37]
    assert named_point(plan, "e5m20") == cutting_order(plan, 5, rule="flow_per_mac")[20]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("banana", "point 'banana': must look like e5c37"),
        ("e7c0", "there is no exit 7; must be one of 1, 2, 3, 4, 5, 6"),
        ("e6c76", "exit 6 has 0 to 75 cuts; try e6c75"),
        ("e0c0", "there is no exit 0"),
    ],
)
def test_points_that_do_not_exist_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        named_point(model_plan("cnmm_b6s3"), name)


def test_bad_rules_and_exits_are_refused():
    with pytest.raises(ValueError, match="rule='luck': must be one of flow, flow_per_mac"):
        cutting_order(model_plan("cnmm_tiny"), rule="luck")
    with pytest.raises(ValueError, match="one final classifier only; use exit=3"):
        cutting_order(model_plan("cnmm_tiny", exits="last"), 2)


def test_the_deterministic_variant_has_exits_but_no_cuts():
    plan = model_plan("cnmm_tiny", mixing="sum")
    assert [len(cutting_order(plan, exit)) for exit in (1, 2, 3)] == [1, 1, 1]
    with pytest.raises(ValueError, match="exit 2 has 0 to 0 cuts"):
        named_point(plan, "e2c1")


def test_the_order_follows_a_model_as_it_trains():
    model = create_model("cnmm_tiny")
    before = cutting_order(model, 3)
    with torch.no_grad():
        model.gate_logits.copy_(torch.randn_like(model.gate_logits))
    after = cutting_order(model, 3)
    assert [p.edges for p in before] != [p.edges for p in after]
    assert isinstance(Chain(model.lattice, model.gate_logits).detach().logits, list)
