"""Where images are: data sets by the name of their folder, and small embedded ones for the scale `smoke`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cnmm._errors import UserError
from cnmm.data import DataSet, fashion_sample
from cnmm.data.dataset import ArraySplit, channel_statistics
from cnmm.data.fashion import FASHION_CLASSES
from cnmm.data.identity import fingerprint_of_arrays
from cnmm.data.registry import Request, register_data
from examples.garments import write_scenes

NUM_TRAIN, NUM_TEST = 500, 200
NUM_SCENES = 20, 8
SAMPLE = "claims_sample"


@register_data(SAMPLE, without_folder=True)
def _sample(folder: Path | None, request: Request) -> DataSet:
    """A few hundred images of the embedded sample: a training on them takes seconds."""
    train, test = (
        ArraySplit(*(part[:num] for part in fashion_sample(split)))
        for split, num in (("train", NUM_TRAIN), ("test", NUM_TEST))
    )
    mean, std = channel_statistics(train)
    return DataSet(
        name=SAMPLE,
        spec=request.spec,
        classes=FASHION_CLASSES,
        train=train,
        test=test,
        mean=mean,
        std=std,
        size=(28, 28),
        in_chans=1,
        fingerprint=fingerprint_of_arrays(train),
    )


class NotAtHand(UserError):
    """Images that nobody has told where they are."""


def find_data(spec: str, folders: Sequence[Path], runs: Path) -> str:
    """KIND:FOLDER with the place where the folder is, in one of these folders or one of them itself.

    Made-up scenes are written into the folder of the runs.
    """
    kind, _, name = spec.partition(":")
    if not name:
        return spec
    if kind == "masks":
        place = runs / name
        if not (place / "classes.txt").is_file():
            write_scenes(place, *NUM_SCENES)
        return f"{kind}:{place}"
    for folder in folders:
        for place in (folder / name, folder):
            if place.name == name and place.is_dir():
                return f"{kind}:{place}"
    raise NotAtHand(f"{spec} is not at hand; say where {name} is with --data-dir")
