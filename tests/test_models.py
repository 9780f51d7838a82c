"""The trained runs in the repository stay usable without their images."""

from pathlib import Path

import numpy as np
import pytest

import cnmm
from cnmm.run import Run

MODELS = Path(__file__).parent.parent / "models"
FOLDERS = [pytest.param(folder, id=folder.name) for folder in sorted(MODELS.iterdir())]


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_budget_is_served_by_a_measured_point(folder):
    frontier = cnmm.Frontier.load(folder / "frontier.json")
    assert frontier.choose("100%").quality > 0.82
    assert frontier.choose("40%").macs <= 0.4 * frontier.full_macs
    assert frontier.choose("acc:0.8").macs < 0.6 * frontier.full_macs
    half = frontier.full_macs / 2
    assert frontier.cascade.quality_at(half) > frontier.choose(half).quality
    with pytest.raises(ValueError, match="cheapest is e1c0"):
        frontier.choose("1M")


@pytest.mark.parametrize("folder", FOLDERS)
def test_it_becomes_a_ladder_without_images(tmp_path, folder):
    run = Run(folder)
    assert run.images.spec == "cifar10:cifar-10-batches-py"
    run.export_ladder(tmp_path / "ladder", 2)
    images = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), np.uint8)
    with cnmm.Session(tmp_path / "ladder", threads=1) as session:
        assert session.classes[0] == "airplane"
        answer = session.predict(images, average_macs="40%")
    assert np.allclose(answer.probabilities.sum(1), 1, atol=1e-5)
