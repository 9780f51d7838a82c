"""The walk over the lattice: what a slim network's tensors are made of, before there are any."""

import subprocess
import sys
from collections import Counter

import pytest

import cnmm
from cnmm.cost import CostTable
from cnmm.export.graph import cascade_graph, point_graph
from cnmm.export.ingredients import EdgeNorm, MixedEdges, Scores, SharedNorm, SharedPart
from cnmm.lattice import build_lattice, reached_exits

RULES = ("flow", "flow_per_mac", "mean_flow")


def points(name, **overrides):
    plan = cnmm.model_plan(name, **overrides)
    for exit in plan.config.exit_numbers:
        for rule in RULES:
            for point in cnmm.cutting_order(plan, exit, rule=rule)[::4]:
                yield plan.config, point


CASES = [
    ("cnmm_tiny", {}),
    ("cnmm_seg_tiny", {}),
    ("cnmm_b4s3", {}),
    ("cnmm_tiny", {"stem_stride": 4, "scales": 1, "blocks": 5}),
    ("cnmm_seg_tiny", {"stem_stride": 1, "blocks": 3}),
]


@pytest.mark.parametrize(("name", "overrides"), CASES)
def test_everything_that_survives_is_used_once(name, overrides):
    """Every edge's first BN, every edge's convolution, and every shared part that an edge reads."""
    for config, point in points(name, **overrides):
        lattice = build_lattice(config)
        table = CostTable.of(config)
        live = lattice.exit_edges(point.exit, point.edges)
        shared = {edge[0] for edge in live if table.reads_shared(edge)} - {0}
        for graph in (point_graph(config, point), cascade_graph(config, point)):
            kernels = Counter(step.kernel for step in graph.steps if step.kernel)
            norms = Counter(norm for step in graph.steps for norm in step.norms)
            begun = {norm.edge: num for norm, num in norms.items() if isinstance(norm, EdgeNorm)}
            assert begun == dict.fromkeys(live, 1)
            begun = {norm.node: num for norm, num in norms.items() if isinstance(norm, SharedNorm)}
            assert begun == dict.fromkeys(shared, 1)
            parts = {(part.node, part.name): num for part, num in kernels.items() if isinstance(part, SharedPart)}
            assert parts == {(node, part): 1 for node in shared for part in ("depthwise", "pointwise")}
            mixed = [edge for kernel in kernels if isinstance(kernel, MixedEdges) for edge in kernel.edges]
            scores = [kernel for kernel in kernels if isinstance(kernel, Scores)]
            assert sorted(mixed + list(scores[-1].edges if scores else ())) == sorted(live)


@pytest.mark.parametrize(("name", "overrides"), CASES)
def test_a_cascade_has_the_exits_that_its_edges_reach(name, overrides):
    for config, point in points(name, **overrides):
        lattice = build_lattice(config)
        exits = cascade_graph(config, point).exits
        assert exits == reached_exits(config, lattice, point.exit, point.edges)
        assert exits == tuple(k for k in range(1, point.exit + 1) if lattice.exit_edges(k, point.edges))


def test_the_walk_needs_no_torch():
    code = """
import sys
sys.modules["torch"] = None  # as if it were not installed
import cnmm
from cnmm.export.graph import cascade_graph
plan = cnmm.model_plan("cnmm_b6s3")
print(len(cascade_graph(plan.config, cnmm.cutting_order(plan)[0]).stages()))
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "6\n"
