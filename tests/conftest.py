"""What is made once per test process: a small trained run with its frontier and its ladder, and ladders by hand.

They are shared. A test that writes into one of them copies it first, with the fixtures that say `own`.
"""

from __future__ import annotations

import logging
import shutil

import numpy as np
import pytest
from hypothesis import settings
from PIL import Image

from tests.helpers import write_fashion
from tests.runtime.ladders import make_ladder
from tests.scenes import write_masks

settings.register_profile("patient", deadline=None)  # how long an example takes says nothing on a busy machine
settings.load_profile("patient")


@pytest.fixture
def quiet_environment(monkeypatch, tmp_path):
    """Wide help pages without colours, no tracebacks, and a working folder of its own."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("CNMM_DEBUG", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def said():
    """What the library says meanwhile, line by line."""
    lines, logger = [], logging.getLogger("cnmm")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.fixture(scope="session")
def fashion_folder(tmp_path_factory):
    """600 training and 100 test images of the embedded sample."""
    return write_fashion(tmp_path_factory.mktemp("images") / "fashion", 600, 100)


@pytest.fixture(scope="session")
def trained_run(fashion_folder, tmp_path_factory):
    """A run folder, trained for two short epochs and measured at nine points, with test figures."""
    import cnmm

    folder = tmp_path_factory.mktemp("trained") / "run"
    options = {"model": "cnmm_tiny", "channels": 8, "epochs": 2, "batch_size": 50, "val": 100, "precision": "float32"}
    run = cnmm.train(f"fashion:{fashion_folder}", folder, **options)
    run.measure(points=9, test=True)
    return folder


@pytest.fixture
def own_run(trained_run, tmp_path):
    """A copy of the trained run that may be written to."""
    return shutil.copytree(trained_run, tmp_path / "run")


@pytest.fixture(scope="session")
def trained_ladder(trained_run, tmp_path_factory):
    """Three points of the trained run and its cascade."""
    import cnmm

    folder = tmp_path_factory.mktemp("trained") / "ladder"
    cnmm.Run(trained_run).export_ladder(folder, 3)
    return folder


@pytest.fixture(scope="session")
def scene_run(tmp_path_factory):
    """A run folder that labels the pixels of made-up scenes, trained for moments and measured at all points."""
    import cnmm

    folder = tmp_path_factory.mktemp("scenes")
    data = write_masks(folder / "masks", num=14, num_test=3)
    shape = {"model": "cnmm_seg_tiny", "blocks": 2, "scales": 2, "channels": 8}
    crops = {"scene_crop": (32, 32), "final_crop": (48, 64), "final_epochs": 1}
    options = {"recipe": "street", "epochs": 12, "batch_size": 4, "val": 4, "lr": 0.01, "average": 0.8}
    run = cnmm.train(f"masks:{data}", folder / "run", precision="float32", **shape, **crops, **options)
    run.measure()
    return folder / "run"


@pytest.fixture(scope="session")
def hand_made_ladder(tmp_path_factory):
    """Three tiny networks and a cascade whose every figure is known."""
    folder = tmp_path_factory.mktemp("ladders") / "a"
    make_ladder(folder)
    return folder


@pytest.fixture(scope="session")
def photo(tmp_path_factory):
    """A colour picture of another size than any network takes."""
    path = tmp_path_factory.mktemp("pictures") / "photo.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8)).save(path)
    return path
