"""A ladder over millions of images: one callable from a dict of columns to a dict of columns.

Ray Data, Spark and Hugging Face's datasets take it as it is; none of them is imported here.

    data.map_batches(BatchPredictor, fn_constructor_kwargs={"ladder": "ladder", "budget": "40%"}, concurrency=8)  # Ray
    data.map(BatchPredictor("ladder", average_macs="30%"), batched=True, batch_size=64)  # datasets

It travels to other processes without its session, which each of them opens when its first batch comes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from cnmm._errors import UserError
from cnmm.data.dataset import Images
from cnmm.runtime.inputs import read_sent, to_batch, to_pictures
from cnmm.runtime.latency import RuntimeName
from cnmm.runtime.session import Session, check_asked

MADE = ("label", "confidence", "exit", "label_map", "error")
"""Columns that are added."""


class BatchPredictor:
    """Labels the images of a batch.

    The column with images holds arrays [H, W, C] of uint8, Pillow images, the content of image files, or their paths.
    It is left out of the answer, which has all other columns and, for each image, `label`, `confidence`, `exit` and
    `error`, which is empty unless the image could not be read: one bad file among millions stops nothing. A ladder for
    segmentation gives `label_map` instead of `label`.

    `budget`, `point`, `confidence` and `average_macs` are those of `Session.predict`; `threads` is 1, since whoever
    runs batches starts one process for each core.
    """

    def __init__(
        self,
        ladder: str | Path,
        *,
        column: str = "image",
        budget: str | float | None = None,
        point: str | None = None,
        confidence: float | None = None,
        average_macs: str | float | None = None,
        runtime: RuntimeName = "onnx",
        threads: int = 1,
    ) -> None:
        self._asked: dict[str, Any] = {
            "budget": budget,
            "point": point,
            "confidence": confidence,
            "average_macs": average_macs,
        }
        check_asked(**self._asked)
        self._ladder, self._column = Path(ladder).resolve(), column
        self._settings: dict[str, Any] = {"runtime": runtime, "threads": threads}
        self._session: Session | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_session": None}

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The columns of the answer, as arrays."""
        if self._column not in batch:
            raise UserError(f"column {self._column!r}: the batch has {', '.join(map(repr, batch)) or 'none'}")
        session = self._opened()
        pictures, errors = self._read(session, batch[self._column])
        kept = {name: values for name, values in batch.items() if name not in (self._column, *MADE)}
        return kept | self._answers(session, pictures, errors)

    def _opened(self) -> Session:
        if self._session is None:
            self._session = Session(self._ladder, **self._settings)
        return self._session

    def _read(self, session: Session, values: Any) -> tuple[list[Images | None], list[str]]:
        """Each image at its size, or what is wrong with it."""
        pictures: list[Images | None] = []
        errors = []
        for value in values:
            try:
                pictures.append(_picture(session, value))
                errors.append("")
            except UserError as error:
                pictures.append(None)
                errors.append(str(error))
        return pictures, errors

    def _answers(self, session: Session, pictures: Sequence[Images | None], errors: list[str]) -> dict[str, Any]:
        num = len(pictures)
        labels, maps = np.full(num, "", object), np.full(num, None, object)
        sure, exits = np.full(num, np.nan, np.float32), np.zeros(num, np.int64)
        good = [number for number, picture in enumerate(pictures) if picture is not None]
        segments = session.task == "segmentation"
        if good:
            read: Any = [pictures[number] for number in good]
            found = session.predict(read if segments else np.stack(read), **self._asked)
            sure[good], exits[good] = found.confidence, found.exits
            best = found.probabilities.argmax(1).tolist()
            for place, number in enumerate(good):
                labels[number] = session.classes[best[place]]
                maps[number] = found.labels[place] if segments else None
        answer: dict[str, Any] = {"label_map": maps} if segments else {"label": labels}
        return answer | {"confidence": sure, "exit": exits, "error": np.array(errors, object)}


def _picture(session: Session, value: Any) -> Images:
    """One image, fitted as for training; for segmentation at its own size."""
    segments = session.task == "segmentation"
    size, channels = session.input_size, session.channels
    if isinstance(value, Mapping):  # what datasets and Spark hold: the content of a file, or its path
        value = value.get("bytes") or value.get("path") or value.get("data")
    if isinstance(value, bytes | bytearray | memoryview):
        return read_sent(bytes(value), None if segments else size, channels)
    if isinstance(value, list):
        value = _array(value)
    if isinstance(value, np.ndarray):
        if value.dtype == np.uint8 and value.shape == (*size, channels):
            return value
        value = _image(value)
    return to_pictures([value], channels)[0] if segments else to_batch([value], size, channels)[0]


def _array(value: list[Any]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    try:
        found = np.array(value)
    except ValueError:
        raise UserError("an image whose rows have different lengths") from None
    if found.dtype.kind not in "iu" or (found.size and (found.min() < 0 or found.max() > 255)):
        raise UserError("an image of lists: must be whole numbers from 0 to 255")
    return found.astype(np.uint8)


def _image(array: np.ndarray[Any, Any]) -> Image.Image:
    if array.dtype != np.uint8 or array.ndim not in (2, 3) or not array.size:
        raise UserError(f"an image of {array.dtype} {list(array.shape)}: must be uint8 [H, W, C]")
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[..., 0]
    if array.ndim == 3 and array.shape[2] != 3:
        raise UserError(f"an image of {array.shape[2]} channels: must be 1 or 3")
    return Image.fromarray(array)
