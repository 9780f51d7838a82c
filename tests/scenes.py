"""Made-up scenes: boxes and discs in their own colours on a background, with noise; and folders of them."""

from __future__ import annotations

import numpy as np
from PIL import Image

from cnmm.palette import VOID

CLASSES = ("ground", "box", "disc")
COLOURS = ((60, 120, 60), (200, 60, 60), (60, 60, 220))


def scene(seed, size=(48, 64), void=True):
    """An image and its mask; a strip at the border is void."""
    rng = np.random.default_rng(seed)
    height, width = size
    mask = np.zeros(size, np.uint8)
    top, left = rng.integers(0, height // 2), rng.integers(0, width // 2)
    mask[top : top + height // 3, left : left + width // 3] = 1
    rows, columns = np.mgrid[:height, :width]
    middle = rng.integers(height // 3, height), rng.integers(width // 3, width)
    mask[(rows - middle[0]) ** 2 + (columns - middle[1]) ** 2 < (height // 5) ** 2] = 2
    image = np.array(COLOURS, np.float32)[mask] + rng.normal(0, 25, (height, width, 3))
    if void:
        mask[:, :2] = VOID
    return image.clip(0, 255).astype(np.uint8), mask


def write_pair(images, masks, name, seed, *, size=(48, 64), suffix=".png", mask_name=None, to_mask=lambda mask: mask):
    """One scene as two files; `to_mask` makes the mask's pixels."""
    image, mask = scene(seed, size)
    for folder in (images, masks):
        folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(images / f"{name}{suffix}")
    Image.fromarray(to_mask(mask)).save(masks / f"{mask_name or name}.png")


def write_masks(folder, num=12, num_test=4, **options):
    """A folder that `masks:DIR` opens."""
    for split, count in (("train", num), ("test", num_test)):
        for k in range(count):
            place = folder / split
            write_pair(place / "images", place / "masks", f"{k:03d}", 100 * (split == "test") + k, **options)
    (folder / "classes.txt").write_text("\n".join(CLASSES))
    return folder
