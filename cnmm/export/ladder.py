"""Slim networks as ONNX files, and ladders of them: what a device runs without torch.

A file is compared with the network in torch at two batch sizes before it is put in place. A ladder is written aside and
renamed when it is complete.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from cnmm._errors import UserError
from cnmm._files import write_atomically, write_json, written_aside
from cnmm.cascade import Cascade, stage_macs
from cnmm.config import MixtureConfig
from cnmm.export.graph import IMAGE
from cnmm.export.onnx_writer import PROBABILITIES, Preprocessing, onnx_model, onnx_stages
from cnmm.frontier import LADDER_FILE, Frontier, FrontierPoint

if TYPE_CHECKING:
    from cnmm.export.slim import SlimNetwork
    from cnmm.mixture import Mixture

ExportPrecision = Literal["float32", "int8"]
Images = npt.NDArray[np.uint8]
LabelledImages = tuple[Images, npt.NDArray[np.int64]]
TOLERANCE = 1e-4
"""Largest difference of a probability between the file and the network in torch."""
INSTALL_EXPORT = 'pip install "cnmm[train]"'


def plain_preprocessing(config: MixtureConfig) -> Preprocessing:
    """For a model whose data nobody described: classes by number, values from 0 to 1."""
    channels = config.in_chans
    classes = tuple(str(number) for number in range(config.num_classes))
    return Preprocessing(classes=classes, mean=(0.0,) * channels, std=(1.0,) * channels, size=config.input_size)


def export_onnx(
    network: SlimNetwork,
    path: str | Path,
    about: Preprocessing | None = None,
    *,
    precision: ExportPrecision = "float32",
    calibration: Images | None = None,
    **metadata: object,
) -> None:
    """One file: uint8 images [N, H, W, C] in, probabilities out; metadata says the rest.

    `calibration`: images [N, H, W, C] from which int8 learns the range of every tensor.
    """
    check_new_file(path)
    data = onnx_bytes(network, about, precision=precision, calibration=calibration, **metadata)
    write_atomically(Path(path), data)


def check_new_file(path: str | Path) -> None:
    """Refuses to write over something, or where there is no folder."""
    path = Path(path)
    if path.exists():
        raise UserError(f"{path} exists; remove it, or choose another file")
    if not path.parent.is_dir():
        raise UserError(f"{path}: there is no folder {path.parent}; make it first")


def onnx_bytes(
    network: SlimNetwork,
    about: Preprocessing | None = None,
    *,
    precision: ExportPrecision = "float32",
    calibration: Images | None = None,
    **metadata: object,
) -> bytes:
    """A slim network as a checked ONNX file."""
    about = about or plain_preprocessing(network.config)
    with _needs_onnx():
        model = onnx_model(
            network.graph, _tensors(network), about, precision=precision, macs=network.cost.macs, **metadata
        )
    data: bytes = model.SerializeToString()
    _check([data], network, about)
    if precision == "int8":
        if calibration is None or not len(calibration):
            raise UserError("precision int8 needs images to calibrate on; say where they are with --data")
        data = quantised(data, calibration)
    return data


def stage_bytes(network: SlimNetwork, about: Preprocessing | None = None, **metadata: object) -> list[bytes]:
    """The stages of a cascade as checked ONNX files, one for each exit."""
    about = about or plain_preprocessing(network.config)
    with _needs_onnx():
        models = onnx_stages(network.graph, _tensors(network), about, **metadata)
    stages = [model.SerializeToString() for model in models]
    _check(stages, network, about)
    return stages


def export_ladder(
    model: Mixture,
    frontier: Frontier,
    folder: str | Path,
    points: int = 8,
    *,
    about: Preprocessing | None = None,
    precision: ExportPrecision = "float32",
    calibration: Images | None = None,
    validation: Callable[[], Iterable[LabelledImages]] | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """A ladder folder: envelope points of a frontier, its cascade, and the manifest `ladder.json`.

    Points have the statistics that the frontier measured them with. `validation`: batches of uint8 images and labels
    on which int8 networks are measured anew.
    """
    from cnmm.evaluation.statistics import with_statistics
    from cnmm.export.slim import slim, slim_cascade

    about = about or plain_preprocessing(model.config)
    chosen, cascade = frontier.ladder(points), frontier.cascade
    total = len(chosen) + (1 if cascade else 0)
    entries = []
    with written_aside(folder) as aside:
        for number, point in enumerate(chosen):
            settled = with_statistics(model, frontier.buffers.get(point.point, {}))
            data = onnx_bytes(slim(settled, point), about, precision=precision, calibration=calibration)
            if precision == "int8" and validation is not None:
                point = _measured_again(point, data, validation())
            entries.append({**asdict(point), **_file(aside, f"{point.point}.onnx", data)})
            on_progress(number + 1, total)
        manifest = {
            "kind": "ladder",
            "model": model.config.name,
            "task": model.config.task,
            "classes": about.classes,
            "input": about.to_dict(),
            "full_macs": frontier.full_macs,
            "precision": precision,
            "points": entries,
            "cascade": None,
        }
        if cascade:
            settled = with_statistics(model, frontier.buffers.get(cascade.point, {}))
            manifest["cascade"] = _cascade_entry(aside, slim_cascade(settled, cascade.point), cascade, about)
            on_progress(total, total)
        write_json(aside / LADDER_FILE, manifest)


def _measured_again(point: FrontierPoint, data: bytes, batches: Iterable[LabelledImages]) -> FrontierPoint:
    """The point with the accuracy of its int8 network."""
    from cnmm.evaluation.evaluate import wilson

    accuracy, num = accuracy_of(data, batches), point.n
    low, high = wilson(accuracy, num)
    return replace(point, accuracy=accuracy, low=low, high=high, raw_accuracy=None, test_accuracy=None, test_n=None)


def _cascade_entry(folder: Path, network: SlimNetwork, cascade: Cascade, about: Preprocessing) -> dict[str, Any]:
    spent = stage_macs(network.config, network.point)
    stages = []
    for exit, data in zip(network.graph.exits, stage_bytes(network, about), strict=True):
        inputs, outputs = _names(data)
        entry = {"exit": exit, "macs": spent[exit], "inputs": inputs, "outputs": outputs}
        stages.append({**_file(folder, f"stage{exit}.onnx", data), **entry})
    measured = {"thresholds": [asdict(row) for row in cascade.thresholds], "n": cascade.n, "split": cascade.split}
    return {"point": cascade.point, "stages": stages, **measured}


def _file(folder: Path, name: str, data: bytes) -> dict[str, str]:
    write_atomically(folder / name, data)
    return {"file": name, "sha256": hashlib.sha256(data).hexdigest()}


def quantised(data: bytes, images: Images) -> bytes:
    """The same network with int8 weights and activations, whose ranges are learned on images."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left = iter(np.array_split(images, max(1, len(images) // 32)))

        def get_next(self) -> dict[str, Images] | None:
            batch = next(self.left, None)
            return None if batch is None else {IMAGE: batch}

    with tempfile.TemporaryDirectory() as folder:
        plain, prepared, done = (str(Path(folder) / name) for name in ("plain.onnx", "prepared.onnx", "int8.onnx"))
        Path(plain).write_bytes(data)
        quant_pre_process(plain, prepared, skip_symbolic_shape=True)
        quantize_static(
            prepared,
            done,
            Reader(),
            quant_format=QuantFormat.QDQ,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            per_channel=True,
            op_types_to_quantize=["Conv", "Concat", "AveragePool", "MaxPool", "GlobalAveragePool", "Add"],
        )
        return Path(done).read_bytes()


def _tensors(network: SlimNetwork) -> Mapping[str, npt.NDArray[Any]]:
    state = network.state_dict().items()
    return {name.removeprefix("layers."): tensor.detach().cpu().numpy() for name, tensor in state}


def _check(files: Sequence[bytes], network: SlimNetwork, about: Preprocessing) -> None:
    """Runs the files one after the other, and compares every exit with torch, for one image and for three."""
    import torch

    rng = np.random.default_rng(0)
    mean, std = (torch.tensor(values).float().view(1, -1, 1, 1) * 255 for values in (about.mean, about.std))
    sessions = [open_onnx(data) for data in files]
    for num in (1, 3):
        images = rng.integers(0, 256, (num, *about.size, network.config.in_chans), dtype=np.uint8)
        x = (torch.from_numpy(images).permute(0, 3, 1, 2).float() - mean) / std
        with torch.no_grad():
            expected = [score.softmax(1).numpy() for score in network.forward_exits(x).values()]
        made: dict[str, npt.NDArray[Any]] = {IMAGE: images}
        for session, wanted in zip(sessions, expected[-len(sessions) :], strict=True):
            names = [output.name for output in session.get_outputs()]
            feed = {source.name: made[source.name] for source in session.get_inputs()}
            made.update(zip(names, session.run(names, feed), strict=True))
            worst = float(np.abs(made[PROBABILITIES] - wanted).max())
            if not worst <= TOLERANCE:
                raise UserError(
                    f"the exported network differs from the one in torch by {worst:.1e} in a probability "
                    f"(allowed is {TOLERANCE:.0e}); nothing was written; please report this with your versions"
                )


def open_onnx(data: bytes, threads: int = 1) -> Any:
    """An onnxruntime session of a file's bytes."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def accuracy_of(data: bytes, batches: Iterable[LabelledImages], threads: int = 1) -> float:
    """Accuracy of a file on images [N, H, W, C] with labels, by onnxruntime."""
    session = open_onnx(data, threads)
    right = total = 0
    for images, labels in batches:
        (found,) = session.run([PROBABILITIES], {IMAGE: images})
        right += int((found.argmax(1) == labels).sum())
        total += len(labels)
    return right / total


def _names(data: bytes) -> tuple[list[str], list[str]]:
    session = open_onnx(data)
    return [i.name for i in session.get_inputs()], [o.name for o in session.get_outputs()]


@contextmanager
def _needs_onnx() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "onnx":
            raise
        raise UserError(f"exporting needs onnx, which is not installed; install it with: {INSTALL_EXPORT}") from None
