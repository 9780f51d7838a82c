"""Segmentation from the mixture to a file: other sizes than the model's own, odd ones, and any size in one file."""

import math

import numpy as np
import onnx
import pytest
import torch

import cnmm
from cnmm.cost import CostTable
from cnmm.export.graph import point_graph
from cnmm.export.network import onnx_bytes, stage_bytes
from cnmm.export.slim import slim, slim_cascade
from tests.export.test_ladder import by_onnxruntime, by_openvino, chained, prepared
from tests.helpers import preprocessing, random_points, trained

SIZES = ((64, 96), (71, 85))
"""One that halves well, and one that is odd, again and again."""


def pictures(size, num=1):
    return np.random.default_rng(7).integers(0, 256, (num, *size, 3), np.uint8)


def far(found, expected):
    return np.abs(found - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["cnmm_seg_tiny", "cnmm_seg_b5s5"])
def test_slim_equals_the_mixture_at_other_sizes_than_its_own(name, size):
    model = trained(name)
    x = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))
    for point in random_points(model, 3, seed=11):
        with torch.no_grad():
            found, expected = slim(model, point)(x), model(x, point)
        assert found.shape == (2, model.config.num_classes, *size)
        assert far(found.numpy(), expected.numpy()) < 1e-5


@pytest.mark.parametrize("size", SIZES)
def test_files_of_one_size_equal_slim(size):
    model = trained("cnmm_seg_tiny", input_size=size)
    about, images = preprocessing(model.config), pictures(size)
    for point in random_points(model, 3, seed=3):
        network = slim(model, point)
        data = onnx_bytes(network, about)
        with torch.no_grad():
            expected = network(prepared(images, about)).numpy()
        for run in (by_onnxruntime, by_openvino):
            assert far(run(data, images), expected) < 1e-4


@pytest.mark.parametrize("overrides", [{}, {"stem_stride": 1}, {"stem_stride": 2}])
def test_one_file_serves_any_size(overrides):
    model = trained("cnmm_seg_tiny", **overrides)
    about = preprocessing(model.config)
    for point in random_points(model, 2, seed=4):
        network = slim(model, point)
        data = onnx_bytes(network, about, any_size=True)
        onnx.checker.check_model(onnx.load_from_string(data), full_check=True)
        for size, num in zip((*SIZES, (17, 16)), (1, 2, 1), strict=True):
            images = pictures(size, num)
            with torch.no_grad():
                expected = network(prepared(images, about)).numpy()
            for run in (by_onnxruntime, by_openvino):
                assert far(run(data, images), expected) < 1e-4


@pytest.mark.parametrize("any_size", [False, True])
def test_stages_chained_are_the_exits(any_size):
    for size in SIZES:
        model = trained("cnmm_seg_tiny", input_size=(64, 64) if any_size else size, blocks=3)
        about, images = preprocessing(model.config), pictures(size)
        for point in random_points(model, 2, seed=5):
            with torch.no_grad():
                expected = model.forward_exits(prepared(images, about), point)
            found = chained(stage_bytes(slim_cascade(model, point), about, any_size=any_size), images)
            for scores, answers in zip(expected.values(), found, strict=True):
                assert far(answers, scores.numpy()) < 1e-4


def test_slopes_above_one_are_written_too():
    """A PReLU with such a slope cannot be written as the sum of a linear part and a ReLU."""
    model = trained("cnmm_seg_tiny")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("slope"):
                parameter.copy_(torch.linspace(-0.5, 1.5, parameter.numel()).view_as(parameter))
    about, images = preprocessing(model.config), pictures((64, 64))
    network = slim(model)
    data = onnx_bytes(network, about)
    with torch.no_grad():
        expected = network(prepared(images, about)).numpy()
    assert "PRelu" in {node.op_type for node in onnx.load_from_string(data).graph.node}
    for run in (by_onnxruntime, by_openvino):
        assert far(run(data, images), expected) < 1e-4


def test_macs_of_the_papers_model_per_exit():
    """At 512x1024, counted a second time from the convolutions of each exit's slim network."""
    plan = cnmm.model_plan("cnmm_seg_b5s5")
    table = CostTable.of(plan.config)
    counted = []
    for exit in plan.config.exit_numbers:
        made = point_graph(plan.config, cnmm.named_point(plan, f"e{exit}c0"))
        convolutions = [step for step in made.steps if step.op == "conv"]
        counted.append(sum(math.prod(step.shape) * math.prod(made.shapes[step.name][1:]) for step in convolutions))
    assert counted == [table.exit(exit).macs for exit in plan.config.exit_numbers]
    assert counted == [565_739_520, 893_976_576, 1_354_334_208, 1_946_812_416, 2_671_411_200]


@pytest.mark.parametrize("any_size", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_int8_runs_at_any_size_and_is_close(size, any_size):
    model = trained("cnmm_seg_tiny", input_size=size)
    about, images = preprocessing(model.config), pictures(size, 3)
    network = slim(model)
    plain, small = (
        onnx_bytes(network, about, any_size=any_size, **more)
        for more in ({}, {"precision": "int8", "calibration": images})
    )
    expected = by_onnxruntime(plain, images[:1])
    for run in (by_onnxruntime, by_openvino):
        found = run(small, images[:1])
        assert not np.array_equal(found, expected)
        assert np.square(found - expected).mean() < 0.02 * expected.var()
