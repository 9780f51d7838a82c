"""Trained models by name, `MODEL.DATA`, for example `cnmm_b6s3.cifar10`: where they are. Torch-free.

Small ones are in the package itself; the others are in the folder `models` of the repository. `DATA` alone is enough
where there is one model for it: `fashion`.
"""

from __future__ import annotations

from pathlib import Path

from cnmm._errors import UserError
from cnmm._files import as_path

_PACKAGE = Path(__file__).resolve().parent
PLACES = _PACKAGE / "pretrained", _PACKAGE.parent / "models"
"""The package's own, and those of a clone of the repository."""
LADDER = "ladder"
"""Folder inside a trained model's with networks that run without torch, if it has one."""


def list_pretrained() -> dict[str, Path]:
    """The run folders of all trained models at hand, by name."""
    folders = [folder for place in PLACES if place.is_dir() for folder in sorted(place.iterdir())]
    return {folder.name: folder for folder in folders if "." in folder.name[1:] and folder.is_dir()}


def pretrained(name: str) -> Path:
    """The run folder of a trained model: `cnmm_b6s3.cifar10`, or by data or model only where there is one such."""
    found = _matches(name) or [folder for known, folder in list_pretrained().items() if known.split(".")[0] == name]
    if len(found) == 1:
        return found[0]
    known = ", ".join(list_pretrained()) or "none"
    if found:
        raise UserError(f"trained model {name!r}: there is more than one, {', '.join(each.name for each in found)}")
    raise UserError(f"unknown trained model {name!r}: at hand are {known}; more come with a clone of the repository")


def resolve(source: str | Path, *, ladder: bool = False) -> Path:
    """A path as it is; the name of a trained model that is at hand, where no such path exists, as its folder.

    With `ladder`, the model's networks that run without torch, if it has them.
    """
    path = as_path(source)
    if path.exists() or len(path.parts) != 1:
        return path
    found = _matches(str(source))
    if len(found) != 1:
        return path
    inner = found[0] / LADDER
    return inner if ladder and inner.is_dir() else found[0]


def _matches(name: str) -> list[Path]:
    models = list_pretrained()
    if name in models:
        return [models[name]]
    return [folder for known, folder in models.items() if known.partition(".")[2] == name]
