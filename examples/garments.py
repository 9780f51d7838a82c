"""Made-up scenes to label: garments of the embedded Fashion-MNIST sample, lying on coloured ground.

    python examples/garments.py scenes          # writes scenes/train, scenes/test and scenes/classes.txt

The folder has the layout of people's own masks, so that `cnmm train --data masks:scenes` reads it. Nothing is drawn by
chance: the same folder again has the same bytes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from PIL import Image

from cnmm.data import fashion_sample

GROUPS = {"top": (0, 2, 4, 6), "trousers": (1,), "dress": (3,), "shoe": (5, 7, 9), "bag": (8,)}
"""Classes of a scene's pixels beside the ground, and the classes of Fashion-MNIST in each."""
CLASSES = ("ground", *GROUPS)
SIZE = (64, 96)
NUM_TRAIN, NUM_TEST = 300, 60
GARMENTS = (3, 6)
"""In a scene, from and up to below."""
SCALES = (0.9, 1.5)
INK = 10
"""The darkest grey level that belongs to a garment: around it, the sample's images are black."""


def write_scenes(folder: Path, num_train: int = NUM_TRAIN, num_test: int = NUM_TEST) -> Path:
    """A folder of images, their masks and the names of the classes."""
    for split, num in (("train", num_train), ("test", num_test)):
        images, labels = fashion_sample(split)
        for part in ("images", "masks"):
            (folder / split / part).mkdir(parents=True, exist_ok=True)
        for number in range(num):
            scene, mask = make_scene(images, labels, np.random.default_rng((number, num, split == "test")))
            Image.fromarray(scene).save(folder / split / "images" / f"{number:03d}.png")
            Image.fromarray(mask).save(folder / split / "masks" / f"{number:03d}.png")
    (folder / "classes.txt").write_text("\n".join(CLASSES) + "\n")
    return folder


def make_scene(
    images: np.ndarray, labels: np.ndarray, rng: np.random.Generator, size: tuple[int, int] = SIZE
) -> tuple[np.ndarray, np.ndarray]:
    """An image [H, W, 3] and its mask [H, W]."""
    scene, mask = ground(rng, size), np.zeros(size, np.uint8)
    group_of = {label: number for number, group in enumerate(GROUPS.values(), start=1) for label in group}
    for _ in range(rng.integers(*GARMENTS)):
        label = rng.choice(rng.permutation(list(GROUPS.values())[rng.integers(len(GROUPS))]))
        garment = Image.fromarray(images[rng.choice(np.flatnonzero(labels == label)), ..., 0])
        side = round(28 * rng.uniform(*SCALES))
        grey = np.asarray(garment.resize((side, side), Image.Resampling.BILINEAR))
        top, left = rng.integers(-side // 4, size[0] - 3 * side // 4), rng.integers(-side // 4, size[1] - 3 * side // 4)
        rows, columns = slice(max(top, 0), top + side), slice(max(left, 0), left + side)
        part = grey[max(-top, 0) :, max(-left, 0) :][: size[0] - rows.start, : size[1] - columns.start]
        there = part >= INK
        colour = rng.uniform(0.35, 1.0, 3)
        scene[rows, columns][there] = part[there, np.newaxis] * colour
        mask[rows, columns][there] = group_of[int(label)]
    return scene.round().astype(np.uint8), mask


def ground(rng: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    """A colour that changes slowly from place to place, and noise."""
    coarse = (rng.uniform(50, 190, 3) + rng.normal(0, 30, (3, 4, 3))).clip(0, 255).astype(np.uint8)
    smooth = Image.fromarray(coarse).resize(size[::-1], Image.Resampling.BICUBIC)
    return (np.asarray(smooth) + rng.normal(0, 12, (*size, 3))).clip(0, 255)


if __name__ == "__main__":
    print(write_scenes(Path(sys.argv[1] if len(sys.argv) > 1 else "scenes")))
