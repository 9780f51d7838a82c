"""A teacher: any classifier of the same classes teaches all exits and all points of the ladder.

It is asked once, about every training image and its mirror; its answers are stored in the run folder as logits in half
precision, and a training that goes on reads them there. What a run folder takes and gives is known. Of an ONNX file it
is told from the graph where it can be:

- One input with four dimensions. The one that equals the number of channels says whether channels come first or last;
  where the graph does not say, uint8 images have them last and float images first.
- uint8 images are given as they are, as our own exported files want them; float images are normalised by the mean and
  standard deviation of the data set.
- Its first output, [N, classes], holds probabilities where all rows are non-negative and sum to one, otherwise logits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cnmm import _fields, distributed
from cnmm._errors import UserError
from cnmm._files import inside, parse_json, read_regular, read_tensors, to_bytes, write_atomically
from cnmm._onnx import MOST_ONNX, check_self_contained
from cnmm.data import DataSet
from cnmm.data.dataset import Images as Pixels
from cnmm.run_folder import is_run, load
from cnmm.training.batches import Images

ANSWERS_FILE = "teacher.safetensors"
_TYPES = {"tensor(uint8)": np.uint8, "tensor(float)": np.float32, "tensor(float16)": np.float16}
_LEAST = 1e-8
"""Smaller probabilities are not told apart."""

Ask = Callable[[Pixels], Tensor]
"""uint8 images [N, H, W, C] in, logits [N, classes] out."""

logger = logging.getLogger("cnmm")


def teacher_answers(images: Images, data: DataSet, kept: np.ndarray, folder: Path) -> Tensor | None:
    """Logits [images, 2, classes] of each training image as it is and (if it is ever) mirrored; None without a teacher.

    Process 0 asks and writes, all read. Images that are not kept have no answers.
    """
    name, path = images.config.teacher, folder / ANSWERS_FILE
    if name is None:
        return None
    shape = (len(data.train.labels), 2 if images.config.flip else 1, len(data.classes))
    if distributed.rank() == 0 and not path.exists():
        logger.info("asking the teacher about %s images", f"{len(kept) * shape[1]:,}")
        answers = torch.full(shape, float("nan"), dtype=torch.float16)
        ask = open_teacher(name, data, images.device)
        for chosen, pixels in images.read(data.train, kept):
            both = pixels.numpy(), np.ascontiguousarray(pixels.numpy()[:, :, ::-1])
            answers[torch.from_numpy(chosen)] = torch.stack([ask(each) for each in both[: shape[1]]], 1).half()
        write_atomically(path, to_bytes({"answers": answers}))
    distributed.wait()
    stored: Tensor | None = read_tensors(path, "pt").get("answers")
    if stored is None or stored.shape != shape:
        raise UserError(f"{path}: these are not answers about the images of {data.spec}; remove the file")
    return stored


def open_teacher(name: str, data: DataSet, device: torch.device | str = "cpu") -> Ask:
    """What answers about images of a data set; a UserError says how a teacher does not fit them."""
    if data.palette:
        raise UserError(f"teacher {name!r}: it labels images, {data.spec} labels pixels; remove --teacher")
    if is_run(name):
        return _open_run(name, data, torch.device(device))
    if Path(name).suffix == ".onnx" and Path(name).is_file():
        return _open_file(Path(name), data)
    raise UserError(f"teacher {name!r}: must be a run folder, or an ONNX file that ends in .onnx")


def _open_run(name: str, data: DataSet, device: torch.device) -> Ask:
    model = load(name).to(device)
    about, config = model.preprocessing, model.config
    if about is None or config.task != "classification":
        raise UserError(f"teacher {name!r}: must be a trained run that labels images")
    _check_images(name, (about.channels, *about.size), data)
    _check_classes(name, list(about.classes), config.num_classes, data)
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) * 255 for values in (about.mean, about.std))

    @torch.no_grad()
    def ask(pixels: Pixels) -> Tensor:
        x = (torch.from_numpy(pixels).permute(0, 3, 1, 2).float() - mean) / std
        return torch.as_tensor(model(x.to(device))).float().cpu()

    return ask


def _open_file(path: Path, data: DataSet) -> Ask:
    session = _session(path)
    inputs = session.get_inputs()
    if len(inputs) != 1 or len(inputs[0].shape) != 4 or inputs[0].type not in _TYPES:
        found = ", ".join(f"{each.name}: {each.type} {each.shape}" for each in inputs)
        raise UserError(
            f"{path}: must have one input of uint8 or float images, [N, C, H, W] or [N, H, W, C]; has {found}"
        )
    kind, (batch, *shape) = _TYPES[inputs[0].type], inputs[0].shape
    told = [size == data.in_chans for size in (shape[0], shape[2])]
    first = told[0] if any(told) else kind is not np.uint8
    channels, height, width = shape if first else (shape[2], *shape[:2])
    _check_images(str(path), (channels, height, width), data)
    mean, std = (np.array(values, np.float32) * 255 for values in (data.mean, data.std))

    def run(pixels: Pixels) -> npt.NDArray[Any]:
        x = pixels if kind is np.uint8 else ((pixels - mean) / std).astype(kind)
        x = np.ascontiguousarray(x.transpose(0, 3, 1, 2)) if first else x
        num = batch if isinstance(batch, int) else len(x)
        answers = []
        for start in range(0, len(x), num):  # a file may want batches of one size
            part = x[start : start + num]
            padded = np.concatenate([part, np.zeros_like(x[:1]).repeat(num - len(part), 0)])
            answers.append(np.asarray(session.run(None, {inputs[0].name: padded})[0], np.float32)[: len(part)])
        return np.concatenate(answers)

    answers = run(data.train.read(np.arange(min(2, len(data.train.labels)))))
    if answers.ndim != 2:
        raise UserError(f"{path}: its first output must be [N, classes]; it has {answers.ndim} dimensions")
    about = session.get_modelmeta()
    names = _named_classes(path, about.custom_metadata_map) if about.producer_name == "cnmm" else None
    _check_classes(str(path), names, answers.shape[1], data)
    probable = bool((answers >= 0).all() and np.allclose(answers.sum(1), 1, atol=1e-3))

    def ask(pixels: Pixels) -> Tensor:
        answers = torch.from_numpy(run(pixels))
        return answers.clamp_min(_LEAST).log() if probable else answers

    return ask


def _named_classes(path: Path, metadata: Mapping[str, str]) -> list[str]:
    """As our own files name them."""
    with inside(path):
        classes = parse_json(metadata.get("classes", "null"))
        found: list[str] = _fields.checked(classes, "metadata classes", _fields.list_of(_fields.TEXT, least=1))
        return found


def _session(path: Path) -> Any:
    import onnxruntime

    with inside(path):
        data = read_regular(path, MOST_ONNX)
        check_self_contained(data)

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has many kinds of its own
        raise UserError(f"{path}: cannot be opened as ONNX: {' '.join(str(error).split())[:200]}") from None


def _check_images(name: str, shape: tuple[Any, Any, Any], data: DataSet) -> None:
    """Channels, height and width that a teacher takes, where they are numbers."""
    wanted = (data.in_chans, *data.size)
    if any(isinstance(size, int) and size != have for size, have in zip(shape, wanted, strict=True)):
        takes, has = (" x ".join(map(str, sizes)) for sizes in (shape, wanted))
        raise UserError(
            f"teacher {name!r}: it takes images of {takes} (channels, height, width), {data.spec} has {has}"
        )


def _check_classes(name: str, classes: list[str] | None, num: int, data: DataSet) -> None:
    """As many classes, and the same where their names are known."""
    if num != len(data.classes):
        raise UserError(f"teacher {name!r}: it knows {num} classes, {data.spec} has {len(data.classes)}")
    for number, (theirs, ours) in enumerate(zip(classes or (), data.classes, strict=False)):
        if theirs != ours:
            raise UserError(f"teacher {name!r}: its class {number} is {theirs!r}, that of {data.spec} is {ours!r}")
