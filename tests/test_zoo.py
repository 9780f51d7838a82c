import pytest

import cnmm
from cnmm.zoo import describe_model
from tests.helpers import python


def test_the_zoo():
    assert cnmm.list_models() == [
        "cnmm_b12s3",
        "cnmm_b4s3",
        "cnmm_b4s3_c32",
        "cnmm_b5s4",
        "cnmm_b6s3",
        "cnmm_full8",
        "cnmm_grey",
        "cnmm_seg_b5s5",
        "cnmm_seg_tiny",
        "cnmm_tiny",
    ]
    assert cnmm.list_models("seg") == ["cnmm_seg_b5s5", "cnmm_seg_tiny"]
    for name in cnmm.list_models():
        assert cnmm.model_plan(name).config.name == name
        assert len(describe_model(name).splitlines()) == 1


def test_options_override_fields():
    config = cnmm.create_model("cnmm_tiny", num_classes=7, in_chans=3, channels=8, stem_stride=2).config
    assert (config.num_classes, config.in_chans, config.channels, config.stem_stride) == (7, 3, 8, 2)


def test_the_cpu_models_cost_thirteen_million_macs():
    for name in ("cnmm_b4s3", "cnmm_b4s3_c32"):
        assert cnmm.CostTable.of(cnmm.model_plan(name).config).exit().macs == pytest.approx(12.5e6, rel=0.04)


@pytest.mark.parametrize(
    ("name", "near"), [("cnmm_b6s4", "cnmm_b6s3"), ("cnmm-tiny", "cnmm_tiny"), ("CNMM_B12S3", "cnmm_b12s3")]
)
def test_unknown_names_list_the_nearest(name, near):
    with pytest.raises(ValueError, match=f"unknown model '{name}': the nearest names are .*{near}"):
        cnmm.create_model(name)


def test_unknown_names_and_options_list_what_is_allowed():
    with pytest.raises(ValueError, match=r"unknown model 'x{9}': must be one of cnmm_b12s3, .*cnmm_tiny"):
        cnmm.create_model("xxxxxxxxx")
    with pytest.raises(ValueError, match=r"unknown option 'classes'.*did you mean 'num_classes'"):
        cnmm.create_model("cnmm_tiny", classes=3)


def test_without_torch_models_say_how_to_install_it():
    code = """
import sys
sys.modules["torch"] = None  # as if it were not installed
import cnmm
plan = cnmm.model_plan("cnmm_b6s3")
assert plan.chain.count() == 672
assert len(cnmm.cutting_order(plan)) == 76
assert cnmm.CostTable.of(plan.config).exit().macs == 95_360_000
try:
    cnmm.create_model("cnmm_b6s3")
except ValueError as error:
    print(error)
"""
    done = python(code)
    assert done.stdout == 'this needs torch, which is not installed; install it with: pip install "cnmm[train]"\n', done
