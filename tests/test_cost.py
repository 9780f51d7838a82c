import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cnmm import CostTable, create_model, cutting_order, list_models, model_plan
from tests.reference import literal_macs


def table(name, **options):
    return CostTable.of(model_plan(name, **options).config)


def test_b6s3_costs_what_was_computed_by_hand():
    costs = table("cnmm_b6s3")
    assert [costs.exit(k).macs for k in range(1, 7)] == [
        5_657_600,
        15_209_472,
        28_955_648,
        46_896_128,
        69_030_912,
        95_360_000,
    ]


def test_the_other_paper_models_cost_what_was_computed_by_hand():
    assert table("cnmm_b12s3").exit().macs == 341_414_912
    segmentation = table("cnmm_seg_b5s5")
    assert segmentation.exit().macs == 2_671_411_200
    assert segmentation.classifier.macs == 251_658_240


@pytest.mark.parametrize("name", list_models())
def test_macs_are_the_references(name):
    config = model_plan(name).config
    costs = CostTable.of(config)
    assert {k: costs.exit(k).macs for k in config.exit_numbers} == literal_macs(config, config.input_size)


@pytest.mark.parametrize("stride", [1, 2, 4])
@pytest.mark.parametrize("name", ["cnmm_tiny", "cnmm_seg_tiny"])
def test_macs_at_odd_sizes_and_any_stem_are_the_references(name, stride):
    config = model_plan(name, stem_stride=stride, in_chans=2, num_classes=7).config
    costs = CostTable.of(config, (37, 45))
    assert {k: costs.exit(k).macs for k in config.exit_numbers} == literal_macs(config, (37, 45))


# Small images keep this quick; the coarsest map has one pixel at least.
SIZES = {"cnmm_seg_b5s5": (64, 96), "cnmm_b5s4": (64, 64), "cnmm_b12s3": (16, 12), "cnmm_b6s3": (16, 16)}


@pytest.mark.parametrize("name", list_models())
@pytest.mark.parametrize("seed", range(3))
def test_macs_of_random_points_are_what_torch_counts(name, seed):
    generator = torch.Generator().manual_seed(seed)
    size = SIZES.get(name, (20, 24))
    model = create_model(name).eval()
    with torch.no_grad():
        model.gate_logits.copy_(torch.randn(model.gate_logits.shape, generator=generator))
    exit = int(torch.randint(1, model.config.blocks + 1, (), generator=generator))
    rule = ("flow", "flow_per_mac")[seed % 2]
    order = cutting_order(model, exit, rule=rule)
    costs = CostTable.of(model.config, size)
    x = torch.randn(1, model.config.in_chans, *size, generator=generator)
    for cuts in torch.randint(len(order), (3,), generator=generator).tolist():
        point = order[cuts]
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(x, point)
        assert counter.get_total_flops() == 2 * costs.point(point).macs, point


@pytest.mark.parametrize("name", list_models())
@pytest.mark.parametrize("exits", ["all", "last"])
def test_params_are_those_of_the_module(name, exits):
    model = create_model(name, exits=exits)
    costs = CostTable.of(model.config)
    total = costs.total(model.lattice.edges, num_classifiers=len(model.config.exit_numbers))
    gates = model.gate_logits.numel()
    assert total.params == sum(parameter.numel() for parameter in model.parameters()) - gates


def test_a_shared_part_counts_while_an_edge_reads_it():
    costs = table("cnmm_b6s3")
    lattice = costs.lattice
    chain = {(0, 1), (1, 2), (2, 3), (3, lattice.output)}
    parts = [*(costs.edges[edge] for edge in chain), costs.shared[0], costs.shared[1], costs.shared[2]]
    expected = sum(part.macs for part in parts) + costs.classifier.macs
    assert costs.total(chain).macs == expected  # map 3 feeds the output from H_3 itself: no shared part


def test_too_small_an_image_is_refused():
    with pytest.raises(ValueError, match="input_size=2x2 is too small"):
        CostTable.of(model_plan("cnmm_b6s3").config, (2, 2))
