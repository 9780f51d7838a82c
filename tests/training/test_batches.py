import numpy as np
import pytest
import torch
from torch.nn import functional as F

from cnmm.training.augment import alternating, augment
from cnmm.training.batches import Images, use_bfloat16
from cnmm.training.loop import train
from cnmm.training.seeds import seeded
from cnmm.training.stem import start_stem
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


def test_reflecting_crops_are_windows_of_the_reflected_image():
    images = torch.randint(256, (6, 8, 7, 2), dtype=torch.uint8)
    padded = F.pad(images.permute(0, 3, 1, 2).float(), (2, 2, 2, 2), mode="reflect").permute(0, 2, 3, 1)
    result = augment(images, small_config(crop=2, padding="reflect", flip=False), seeded(0))
    places = torch.randint(5, (6, 2), generator=seeded(0)).tolist()
    for each, after, (down, right) in zip(padded, result, places, strict=True):
        assert torch.equal(each[down : down + 8, right : right + 7], after.float())
    tiny = torch.randint(256, (3, 1, 2, 1), dtype=torch.uint8)  # padding that is larger than the image
    assert augment(tiny, small_config(crop=5, padding="reflect"), seeded(0)).shape == tiny.shape


def test_alternating_flips_show_every_image_both_ways():
    chosen = np.arange(1000)
    first, second, third = (alternating(chosen, 3, epoch) for epoch in (0, 1, 2))
    assert torch.equal(first, ~second)
    assert torch.equal(first, third)
    assert 0.45 < first.double().mean() < 0.55
    assert torch.equal(alternating(chosen[[5, 900]], 3, 0), first[[5, 900]])  # whatever else is in the batch
    assert not torch.equal(alternating(chosen, 4, 0), first)


def test_every_image_is_flipped_in_every_second_epoch():
    data, config = small_data(), small_config(flips="alternating", crop=0, batch_size=25, precision="float32")
    kept, images = np.arange(100), Images(data, config)
    (whole,) = images.batches(data.train, kept)
    both = [{image.numpy().tobytes(): k for k, image in enumerate(x)} for x in (whole[0], whole[0].flip(3))]
    flipped = []
    for epoch in range(3):
        found = {}
        for batch in images.training_batches(data.train, kept, epoch):
            for image in batch.images:
                (side,) = [side for side in (0, 1) if image.numpy().tobytes() in both[side]]
                found[both[side][image.numpy().tobytes()]] = side
        flipped.append([found[k] for k in range(100)])
    assert flipped[0] == flipped[2]
    assert [1 - side for side in flipped[0]] == flipped[1]
    later = list(images.training_batches(data.train, kept, 1))[2:]  # a resumed epoch
    again = list(images.training_batches(data.train, kept, 1, first=2))
    assert all(torch.equal(a.images, b.images) for a, b in zip(later, again, strict=True))


@pytest.mark.parametrize(("channels", "rows"), [(8, 2), (64, 16), (128, 32)])
def test_the_stem_starts_from_the_leading_eigenvectors_of_patches(channels, rows):
    """Those of the nine that there are, then their negatives, and then it stays random."""
    model, data = new_model(channels=channels), small_data()
    before = model.stem.detach().clone()
    norm = before.flatten(1).norm(dim=1).mean()
    ((x, _),) = Images(data, small_config()).batches(data.train, np.arange(100))
    start_stem(model, [x[:50], x[50:]])
    stem = model.stem.detach().flatten(1)
    assert len(stem) == rows
    patches = F.unfold(x, 3).transpose(1, 2).reshape(-1, 9).double()
    vectors = torch.linalg.eigh(patches.T @ patches).eigenvectors.flip(1).T.float()
    cosines = (stem[:9] @ vectors[: len(stem)].T / norm).abs()
    torch.testing.assert_close(cosines[:rows], torch.eye(min(rows, 9)), rtol=0, atol=1e-3)
    torch.testing.assert_close(stem[9:18], -stem[: len(stem[9:18])])
    assert torch.equal(stem[18:], before.flatten(1)[18:])


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
