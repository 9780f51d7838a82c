"""Pictures of what a ladder for segmentation says of image files: label maps, overlays, and strips of several budgets.

A folder of pictures appears when all of them are there, or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cnmm._errors import UserError
from cnmm._files import write_atomically, written_aside
from cnmm.ladder import Ladder, read_ladder
from cnmm.pictures import Panel, caption, index_png, overlay, strip, to_png
from cnmm.runtime.answers import Prediction
from cnmm.runtime.inputs import to_pictures
from cnmm.runtime.latency import RuntimeName
from cnmm.runtime.session import Session, asked_point


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One image file at several budgets."""

    file: Path
    strip: Path
    """The picture of all of them."""
    answers: tuple[Prediction, ...]
    """At each budget."""


def draw_labels(
    ladder: str | Path, files: Sequence[Path], answer: Prediction, out: str | Path
) -> list[tuple[Path, Path]]:
    """Writes for every file NAME.png, whose pixel values are classes, and NAME_overlay.png, with a legend.

    `answer`: of the ladder for these files. Returns the paths of both pictures for each.
    """
    about = _pixel_ladder(ladder).preprocessing
    names = _names(files)
    with written_aside(out) as aside:
        for name, file, labels in zip(names, files, answer.labels, strict=True):
            (image,) = to_pictures(file, about.channels)
            write_atomically(aside / f"{name}.png", index_png(labels, about.palette))
            drawn = overlay(image, labels, about.classes, about.palette)
            write_atomically(aside / f"{name}_overlay.png", to_png(drawn))
    return [(Path(out) / f"{name}.png", Path(out) / f"{name}_overlay.png") for name in names]


def compare_budgets(
    ladder: str | Path,
    files: Sequence[Path],
    budgets: Sequence[str],
    out: str | Path,
    *,
    runtime: RuntimeName = "onnx",
    threads: int | None = None,
    latency: str | Path | None = None,
) -> list[Comparison]:
    """Writes for every file NAME_strip.png: the image, its labels at every budget with macs and time, and differences.

    `latency`: the folder whose measured latency budgets in ms go by, the ladder's own unless told.
    """
    opened, names = _pixel_ladder(ladder), _names(files)
    about = opened.preprocessing
    points = [asked_point(opened, runtime, threads, latency or ladder, budget) for budget in budgets]
    if not points:
        raise UserError("no budgets to compare; give some, for example 25%,50%,100%")
    compared = []
    loaded = list(dict.fromkeys(points))
    with (
        written_aside(out) as aside,
        Session(ladder, runtime=runtime, threads=threads, points=loaded, cascade=False) as session,
    ):
        for name, file in zip(names, files, strict=True):
            (image,) = to_pictures(file, about.channels)
            answers = tuple(session.predict(image, point=point) for point in points)
            panels = [
                Panel(answer.labels[0], f"{budget}: {caption(answer.point, answer.macs, answer.time_ms)}")
                for budget, answer in zip(budgets, answers, strict=True)
            ]
            write_atomically(aside / f"{name}_strip.png", to_png(strip(image, panels, about.classes, about.palette)))
            compared.append(Comparison(file=file, strip=Path(out) / f"{name}_strip.png", answers=answers))
    return compared


def _pixel_ladder(folder: str | Path) -> Ladder:
    ladder = read_ladder(folder)
    if ladder.task != "segmentation":
        raise UserError(f"{folder}: classifies whole images; pictures of labels need a ladder for segmentation")
    return ladder


def _names(files: Sequence[Path]) -> list[str]:
    """What pictures of files are called: as the files, without their suffix."""
    names = [file.stem for file in files]
    for number, name in enumerate(names):
        if name in names[:number]:
            first = files[names.index(name)]
            raise UserError(f"{first} and {files[number]}: their pictures would have one name; give them one by one")
    return names
