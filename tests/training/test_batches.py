import numpy as np
import pytest
import torch
from torch.nn import functional as F

from cnmm.training.augment import augment
from cnmm.training.batches import Images, use_bfloat16
from cnmm.training.loop import train
from cnmm.training.seeds import seeded
from tests.training.helpers import new_model, small_config, small_data


def test_augmentation_is_a_crop_and_a_flip():
    images = torch.arange(1, 1 + 64 * 6 * 5 * 2, dtype=torch.int64).remainder(250).add(1).to(torch.uint8)
    images = images.view(64, 6, 5, 2)
    config = small_config(crop=2, flip=True)
    result = augment(images, config, seeded(0, "test"))
    assert result.shape == images.shape
    found = set()
    for before, after in zip(images, result, strict=True):
        padded = F.pad(before, (0, 0, 2, 2, 2, 2))
        options = {}
        for down in range(5):
            for right in range(5):
                window = padded[down : down + 6, right : right + 5]
                options[down, right, False] = window
                options[down, right, True] = F.pad(before, (0, 0, 2, 2, 2, 2))[down : down + 6, right : right + 5].flip(
                    1
                )
        match = [key for key, value in options.items() if torch.equal(value, after)]
        assert match
        found.add(match[0])
    assert {flip for *_, flip in found} == {False, True}
    assert len({key[:2] for key in found}) > 10
    assert torch.equal(augment(images, small_config(crop=0, flip=False), seeded(0)), images)
    assert torch.equal(result, augment(images, config, seeded(0, "test")))


def test_images_are_normalised_by_the_training_set():
    data = small_data()
    images = Images(data, small_config())
    x, labels = next(images.batches(data.train, np.arange(4)))
    expected = (torch.from_numpy(data.train.images[:4]).permute(0, 3, 1, 2).float() / 255 - 0.29) / 0.35
    assert torch.allclose(x, expected, atol=1e-5)
    assert labels.tolist() == data.train.labels[:4].tolist()
    assert not use_bfloat16("float32")
    assert use_bfloat16("bfloat16")


def test_a_set_that_is_too_small_is_refused(tmp_path):
    with pytest.raises(ValueError, match="batch_size=200: there are only 80 training images"):
        train(new_model(), small_data(), small_config(batch_size=200), tmp_path)


@pytest.mark.parametrize("has", [True, False])
def test_auto_takes_bfloat16_where_the_gpu_has_it(monkeypatch, has):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: has or including_emulation)
    assert use_bfloat16("auto", torch.device("cuda")) == has
    assert use_bfloat16("bfloat16", "cuda")
    assert not use_bfloat16("float32", "cuda")
