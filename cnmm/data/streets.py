"""Where sets of scenes keep their files: CamVid (Brostow et al., 2009), Cityscapes (Cordts et al., 2016), people's own.

- CamVid: `train/`, `val/` and `test/` with masks in `trainannot/` (or `train_labels/`) and so on, or the original's two
  folders of 701 images and 701 masks, divided as is usual. Masks are numbers (0 to 10, and 11 for void) or the
  original's 32 colours, which make 11 classes and void.
- Cityscapes: `leftImg8bit/` and `gtFine/`, from whose labelIds the 19 train ids are made. Its validation images are
  what everybody reports on, since the labels of its test images are not public: they are the test images here.
- Own: `train/images` and `train/masks`, and `val` or `test` of the same form; or `images` and `masks` alone. Beside
  them `classes.txt`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from cnmm._errors import UserError
from cnmm.data.folder import image_files
from cnmm.data.masks import CLASSES_FILE, ClassNames, MaskRule, read_classes
from cnmm.data.scenes import Pair
from cnmm.palette import CAMVID, CITYSCAPES, VOID, Colour

Splits = dict[str, list[Pair]]

CAMVID_SIZE, CITYSCAPES_SIZE = (360, 480), (512, 1024)
"""Height and width of images as they are trained on and tested."""

_CAMVID_GROUPS: dict[str, tuple[Colour, ...]] = {
    "sky": ((128, 128, 128),),
    "building": ((128, 0, 0), (192, 0, 128), (0, 128, 64), (64, 0, 64), (64, 192, 0)),
    "pole": ((192, 192, 128), (0, 0, 64)),
    "road": ((128, 64, 128), (128, 0, 192), (192, 0, 64)),
    "sidewalk": ((0, 0, 192), (64, 192, 128), (128, 128, 192)),
    "tree": ((128, 128, 0), (192, 192, 0)),
    "sign": ((192, 128, 128), (128, 128, 64), (0, 64, 64)),
    "fence": ((64, 64, 128),),
    "car": ((64, 0, 128), (64, 128, 192), (192, 128, 192), (192, 64, 128), (128, 64, 64)),
    "pedestrian": ((64, 64, 0), (192, 128, 64), (64, 0, 192), (64, 128, 64)),
    "bicyclist": ((0, 128, 192), (192, 0, 192)),
}
"""The 11 classes, each with the colours of the original classes in it; black is void."""

CAMVID_CLASSES = ClassNames(
    names=tuple(_CAMVID_GROUPS),
    palette=CAMVID,
    rule=MaskRule(
        values={**{k: k for k in range(11)}, 11: VOID, VOID: VOID},
        colours={
            (0, 0, 0): VOID,
            **{colour: k for k, group in enumerate(_CAMVID_GROUPS.values()) for colour in group},
        },
    ),
)

_TRAIN_IDS = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)
"""The labelId of each train id."""
CITYSCAPES_CLASSES = ClassNames(
    names=(
        *("road", "sidewalk", "building", "wall", "fence", "pole", "traffic light", "traffic sign", "vegetation"),
        *("terrain", "sky", "person", "rider", "car", "truck", "bus", "train", "motorcycle", "bicycle"),
    ),
    palette=CITYSCAPES,
    rule=MaskRule(
        values={**dict.fromkeys((*range(34), VOID), VOID), **{value: k for k, value in enumerate(_TRAIN_IDS)}},
        colours={},
    ),
)

CAMVID_LAYOUT = (
    "the layout is train/, val/ and test/ with masks in trainannot/, valannot/ and testannot/, or the original's "
    "701_StillsRaw_full/ and LabeledApproved_full/"
)
CITYSCAPES_LAYOUT = "the layout is leftImg8bit/train/CITY/*_leftImg8bit.png and gtFine/train/CITY/*_gtFine_labelIds.png"
OWN_LAYOUT = (
    f"the layout is train/images, train/masks, and val/ or test/ of the same form, or images/ and masks/ alone; "
    f"and {CLASSES_FILE}"
)


def camvid_files(folder: Path) -> Splits:
    """All images of CamVid with their masks, by split."""
    folder = folder / "camvid" if (folder / "camvid").is_dir() else folder
    images, masks = folder / "701_StillsRaw_full", folder / "LabeledApproved_full"
    if images.is_dir() and masks.is_dir():
        splits: Splits = {"train": [], "val": [], "test": []}
        for pair in _pairs(images, masks, lambda path: f"{path.stem}_L", CAMVID_LAYOUT):
            splits[_camvid_split(pair.image)].append(pair)
        return {name: pairs for name, pairs in splits.items() if pairs}
    splits = {}
    for name in ("train", "val", "test"):
        found = [folder / f"{name}{suffix}" for suffix in ("annot", "_labels") if (folder / f"{name}{suffix}").is_dir()]
        if not (folder / name).is_dir() or not found:
            raise UserError(f"{folder} has no folder {name}/ with masks in {name}annot/; {CAMVID_LAYOUT}")
        splits[name] = _pairs(folder / name, found[0], lambda path: path.stem, CAMVID_LAYOUT, others=("_L",))
    return splits


def _camvid_split(path: Path) -> str:
    """By sequence and frame, as SegNet's authors divided them: 367, 101 and 233 images."""
    sequence, _, frame = path.stem.partition("_")
    number = "".join(filter(str.isdigit, frame))
    if sequence not in ("0001TP", "0006R0", "0016E5", "Seq05VD") or not number:
        raise UserError(f"{path}: not an image of CamVid; their names are like 0016E5_00390.png")
    if sequence == "0016E5":
        return "val" if int(number) % 2 else "train"
    return "test" if sequence == "Seq05VD" or (sequence == "0001TP" and int(number) >= 8550) else "train"


def cityscapes_files(folder: Path) -> Splits:
    """The finely labelled images of Cityscapes, by split."""

    def name(path: Path) -> str:
        return f"{path.stem.removesuffix('_leftImg8bit')}_gtFine_labelIds"

    splits = {}
    for split, ours in (("train", "train"), ("val", "test")):
        images, masks = folder / "leftImg8bit" / split, folder / "gtFine" / split
        for needed in (images, masks):
            if not needed.is_dir():
                raise UserError(f"{needed} is not a folder; {CITYSCAPES_LAYOUT}")
        splits[ours] = _pairs(images, masks, name, CITYSCAPES_LAYOUT)
    return splits


def own_files(folder: Path) -> tuple[ClassNames, Splits]:
    """Classes and scenes of a folder of people's own."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; {OWN_LAYOUT}")
    places = {name: folder / name for name in ("train", "val", "test") if (folder / name / "images").is_dir()}
    if not places and (folder / "images").is_dir():
        places = {"train": folder}
    if "train" not in places:
        raise UserError(f"{folder} has neither train/images nor images; {OWN_LAYOUT}")
    classes = read_classes(folder)
    return classes, {
        name: _pairs(place / "images", place / "masks", lambda path: path.stem, OWN_LAYOUT)
        for name, place in places.items()
    }


def _pairs(
    images: Path, masks: Path, name: Callable[[Path], str], layout: str, *, others: Sequence[str] = ()
) -> list[Pair]:
    """Every image with the mask at the same place below its folder; `name` makes the mask's name, without suffix."""
    if not masks.is_dir():
        raise UserError(f"{masks} is not a folder; {layout}")
    known = {path.relative_to(masks).with_suffix(""): path for path in image_files(masks)}
    pairs = []
    for path in image_files(images):
        wanted = path.relative_to(images).with_name(name(path))
        ends = [wanted, *(wanted.with_name(wanted.name + other) for other in others)]
        mask = next((known[end] for end in ends if end in known), None)
        if mask is None:
            raise UserError(f"{path} has no mask: {masks / wanted}.png is missing")
        pairs.append(Pair(path, mask))
    if not pairs:
        raise UserError(f"{images} has no images; {layout}")
    return pairs
