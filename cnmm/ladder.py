"""Ladder folders: what a deployment carries, as `ladder.json` and the ONNX files it names. Torch-free and numpy-free.

Reader and writer of the format stand side by side here: `export` fills a folder, `runtime` runs it. A folder may come
from anywhere. So a manifest may only name files that lie beside it, and a file's bytes are read once and compared with
the manifest's checksum before a runtime sees them.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cnmm import _fields
from cnmm._errors import UserError
from cnmm._files import check_beside, inside, read_json, read_regular, write_atomically, write_json
from cnmm._onnx import MOST_ONNX, check_self_contained
from cnmm.cascade import Cascade
from cnmm.config import MOST_MAPS, Preprocessing
from cnmm.frontier import LADDER_FILE, Frontier
from cnmm.lattice import Edge, Lattice, lattice_of
from cnmm.pretrained import resolve

IMAGE, PROBABILITIES, LOGITS = "image", "probabilities", "logits"
"""The tensor that enters a network, uint8 [N, H, W, C], and the one that leaves it, float32: probabilities
[N, classes], or of segmentation the scores of every pixel, [N, classes, H, W]."""
ANSWERS = (PROBABILITIES, LOGITS)


def answer_of(task: str) -> str:
    """The name of what leaves a network."""
    return LOGITS if task == "segmentation" else PROBABILITIES


@dataclass(frozen=True, kw_only=True)
class NetworkFile:
    """One ONNX file: a whole network, or a stage, that part of a cascade that ends at an exit."""

    path: Path
    sha256: str
    inputs: tuple[str, ...] = (IMAGE,)
    outputs: tuple[str, ...] = (PROBABILITIES,)
    """The answer, unless the head gives it, then the tensors that other files read."""
    head: NetworkFile | None = None
    """Of a stage: the file that makes its answer, which runs only if its exit is asked; None: the stage itself does."""

    @classmethod
    def write(
        cls, path: Path, data: bytes, *, inputs: tuple[str, ...] = (IMAGE,), outputs: tuple[str, ...] = (PROBABILITIES,)
    ) -> NetworkFile:
        """Writes the file."""
        write_atomically(path, data)
        return cls(path=path, sha256=hashlib.sha256(data).hexdigest(), inputs=inputs, outputs=outputs)

    def read(self) -> bytes:
        """The file's bytes, if they are those that the manifest names, and name no other files."""
        with inside(self.path, fix="export the ladder again"):
            try:
                check_beside(self.path)
                data = read_regular(self.path, MOST_ONNX)
            except OSError as error:
                raise UserError(f"cannot be read ({error.strerror})") from None
            if hashlib.sha256(data).hexdigest() != self.sha256:
                raise UserError(f"its sha256 differs from the one in {LADDER_FILE}")
            check_self_contained(data)
        return data

    def to_dict(self) -> dict[str, Any]:
        own = {"file": self.path.name, "sha256": self.sha256, "inputs": self.inputs, "outputs": self.outputs}
        return {**own, "head": self.head.to_dict()} if self.head else own


@dataclass(frozen=True, kw_only=True)
class LadderLattice:
    """The lattice of the mixture and what survives of it at each point: for pictures only, no network needs it.

    A set of edges is written as hexadecimal digits, the first edge of the lattice as the lowest bit of the first.
    """

    full: Lattice
    points: Mapping[str, frozenset[Edge]]
    """The surviving edges of each point, by its name."""
    cascade: tuple[frozenset[Edge], ...] = ()
    """The edges that an image has used that leaves at each exit of the cascade."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON: blocks, scales and the task say which maps and edges there are."""
        return {
            "blocks": self.full.blocks,
            "scales": self.full.scales,
            "points": {name: self._digits(edges) for name, edges in self.points.items()},
            "cascade": [self._digits(edges) for edges in self.cascade],
        }

    def _digits(self, edges: frozenset[Edge]) -> str:
        mask = sum(1 << index for index, edge in enumerate(self.full.edges) if edge in edges)
        return f"{mask:0{_num_digits(self.full)}x}"[::-1]


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """A ladder folder, as its manifest describes it."""

    folder: Path
    task: str
    frontier: Frontier
    """The points of the ladder and its cascade."""
    networks: Mapping[str, NetworkFile]
    """The file of each point, by its name."""
    stages: tuple[NetworkFile, ...]
    """The files of the cascade, one for each of its exits; none without a cascade."""
    preprocessing: Preprocessing
    precision: str
    """Of the weights in the files: float32 or int8."""
    any_size: bool = False
    """Do the networks take images of any height and width? Otherwise only of that of `preprocessing`."""
    lattice: LadderLattice | None = None
    """What is left of the mixture at each point; None in ladders of earlier versions."""

    @property
    def cascade(self) -> Cascade | None:
        return self.frontier.cascade

    def files(self) -> tuple[NetworkFile, ...]:
        """All of its ONNX files."""
        return (*self.networks.values(), *stage_files(self.stages))

    @property
    def title(self) -> str:
        """The model's name and eight digits that tell its weights from any others."""
        digest = hashlib.sha256("".join(file.sha256 for file in self.files()).encode())
        return f"{self.frontier.model} {digest.hexdigest()[:8]}"

    def save(self) -> None:
        """Writes the manifest; `read_ladder` reads it."""
        cascade = self.cascade
        points = [{**dataclasses.asdict(p), **self.networks[p.name].to_dict()} for p in self.frontier.points]
        staged = cascade and {**cascade.to_dict(), "stages": [stage.to_dict() for stage in self.stages]}
        manifest = {
            "kind": "ladder",
            "model": self.frontier.model,
            "task": self.task,
            "classes": self.preprocessing.classes,
            "input": self.preprocessing.to_dict(),
            "full_macs": self.frontier.full_macs,
            "precision": self.precision,
            "any_size": self.any_size,
            "points": points,
            "cascade": staged,
            "lattice": self.lattice and self.lattice.to_dict(),
        }
        write_json(self.folder / LADDER_FILE, manifest)


def stage_files(stages: Iterable[NetworkFile]) -> tuple[NetworkFile, ...]:
    """All files of stages, in the order in which they can run."""
    return tuple(file for stage in stages for file in (stage, stage.head) if file)


def is_ladder(path: str | Path) -> bool:
    """Does this look like a ladder folder?"""
    return (resolve(path, ladder=True) / LADDER_FILE).is_file()


def read_ladder(folder: str | Path) -> Ladder:
    """Reads and checks the manifest of a ladder folder; the ONNX files are read later."""
    folder = resolve(folder, ladder=True)
    path = folder / LADDER_FILE
    with inside(path):
        check_beside(path)
    try:
        data = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"{folder}: not a ladder folder ({LADDER_FILE} missing); make one with: cnmm export RUN --ladder 8 -o DIR"
        ) from None
    with inside(path):
        return _read_manifest(folder, data)


def _read_manifest(folder: Path, data: Any) -> Ladder:
    frontier = Frontier.from_dict(data)
    _fields.get(data, "kind", _fields.one_of("ladder"))
    task = _fields.get(data, "task", _fields.one_of("classification", "segmentation"))
    answer = answer_of(task)
    entries: list[Mapping[str, Any]] = data["points"]
    files = [_read_file(folder, entry, f"points[{number}].") for number, entry in enumerate(entries)]
    return Ladder(
        folder=folder,
        task=task,
        frontier=frontier,
        networks={entry["name"]: file for entry, file in zip(entries, files, strict=True)},
        stages=_read_stages(folder, data["cascade"], len(frontier.cascade.exits), answer) if frontier.cascade else (),
        preprocessing=_read_preprocessing(data, task),
        precision=_fields.get(data, "precision", _fields.one_of("float32", "int8")),
        any_size=bool(_fields.get(data, "any_size", _fields.or_null(_fields.TRUTH))),
        lattice=_read_lattice(data, task, frontier),
    )


def _read_lattice(data: Mapping[str, Any], task: str, frontier: Frontier) -> LadderLattice | None:
    entry = _fields.get(data, "lattice", _fields.or_null(_fields.OBJECT))
    if entry is None:
        return None
    blocks = _fields.get(entry, "blocks", _fields.whole(1, MOST_MAPS), "lattice.")
    scales = _fields.get(entry, "scales", _fields.whole(1, MOST_MAPS // blocks), "lattice.")
    lattice = lattice_of(blocks, scales, task)
    digits = _hexadecimal(_num_digits(lattice))
    named = _fields.get(entry, "points", _fields.OBJECT, "lattice.")
    points = {}
    for point in frontier.points:
        mask = _fields.get(named, point.name, digits, "lattice.points.")
        points[point.name] = _read_edges(lattice, point.exit, mask, f"lattice.points.{point.name}")
    exits = frontier.cascade.exits if frontier.cascade else ()
    masks = _fields.get(entry, "cascade", _fields.list_of(digits, len(exits)), "lattice.")
    stages = [
        _read_edges(lattice, exit, mask, f"lattice.cascade[{number}]")
        for number, (exit, mask) in enumerate(zip(exits, masks, strict=True))
    ]
    return LadderLattice(full=lattice, points=points, cascade=tuple(stages))


def _read_edges(lattice: Lattice, exit: int, digits: str, name: str) -> frozenset[Edge]:
    """A set of edges, if they all lie on paths from the image to this exit."""
    bits = f"{int(digits[::-1], 16):b}"[::-1]
    edges = frozenset(edge for edge, bit in zip(lattice.edges, bits, strict=False) if bit == "1")
    if (
        not edges
        or len(edges) < bits.count("1")
        or exit > lattice.num_exits
        or lattice.exit_edges(exit, edges) != edges
    ):
        raise UserError(f"{name}={_fields.shown(digits)}: must be edges on the way to exit {exit} of the lattice")
    return edges


def _num_digits(lattice: Lattice) -> int:
    """Hexadecimal digits of a set of edges."""
    return (len(lattice.edges) + 3) // 4


def _read_preprocessing(data: Mapping[str, Any], task: str) -> Preprocessing:
    size = _fields.get(data, "input", _fields.OBJECT)
    height, width = (_fields.get(size, name, _SIDE, "input.") for name in ("height", "width"))
    channels = _fields.get(size, "channels", _fields.whole(1, 1024), "input.")
    per_channel = _fields.list_of(_fields.NUMBER, channels)
    mean, std = (_fields.get(size, name, per_channel, "input.") for name in ("mean", "std"))
    classes = _fields.get(data, "classes", _fields.list_of(_fields.TEXT, least=1))
    palette: Any = ()
    if task == "segmentation":
        palette = _fields.get(size, "palette", _fields.list_of(_fields.COLOUR, len(classes)), "input.")
    return Preprocessing(classes=classes, mean=mean, std=std, size=(height, width), palette=palette)


def _read_stages(folder: Path, cascade: Mapping[str, Any], num: int, answer: str) -> tuple[NetworkFile, ...]:
    entries = _fields.get(cascade, "stages", _fields.list_of(_fields.OBJECT, num), "cascade.")
    known = {IMAGE}
    stages = []
    for number, entry in enumerate(entries):
        where = f"cascade.stages[{number}]"
        stage = _read_file(folder, entry, f"{where}.")
        _check_reads(stage, known, where)
        given = _fields.get(entry, "head", _fields.or_null(_fields.OBJECT), f"{where}.")
        made = stage.outputs if given else stage.outputs[1:]
        if (not given and stage.outputs[0] != answer) or answer in made or known & set(stage.outputs):
            begins = "must be" if given else f"must begin with {answer!r}, then"
            raise UserError(f"{where}.outputs {begins} new names")
        known |= set(made)
        if given:
            head = _read_file(folder, given, f"{where}.head.")
            _check_reads(head, known, f"{where}.head")
            if head.outputs != (answer,):
                raise UserError(f"{where}.head.outputs must be {answer!r} alone")
            stage = dataclasses.replace(stage, head=head)
        stages.append(stage)
    return tuple(stages)


def _check_reads(file: NetworkFile, known: set[str], where: str) -> None:
    missing = [name for name in file.inputs if name not in known]
    if missing:
        raise UserError(f"{where} reads {missing[0]!r}, which no earlier stage makes")


def _read_file(folder: Path, entry: Mapping[str, Any], where: str) -> NetworkFile:
    names = _fields.list_of(_fields.TEXT, least=1)
    return NetworkFile(
        path=folder / _fields.get(entry, "file", _PLAIN_NAME, where),
        sha256=_fields.get(entry, "sha256", _SHA256, where),
        inputs=tuple(_fields.get(entry, "inputs", names, where)),
        outputs=tuple(_fields.get(entry, "outputs", names, where)),
    )


_SIDE = _fields.whole(1, 2**14)


def _hexadecimal(num: int) -> _fields.Check:
    """So many digits, in lower case."""

    def fulfils(value: Any) -> bool:
        return isinstance(value, str) and len(value) == num and set(value) <= set("0123456789abcdef")

    return fulfils, f"{num} hexadecimal digits"


_SHA256 = _hexadecimal(64)


def _is_plain_name(value: object) -> bool:
    """Not a path of any system: no folders, no drives, nothing hidden."""
    return (
        isinstance(value, str)
        and len(value) <= 255
        and value.isprintable()
        and value.endswith(".onnx")
        and not value.startswith(".")
        and not set(value) & set('/\\:*?"<>|')
    )


_PLAIN_NAME: _fields.Check = (_is_plain_name, "the plain name of an .onnx file in the same folder")
