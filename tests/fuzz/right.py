"""What a right answer is: oracles that read the damaged files by themselves."""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cnmm.budget import parse_budget
from cnmm.cli import main as cli
from cnmm.data import DataSet
from cnmm.data.images import decode_image
from cnmm.frontier import Frontier
from cnmm.orders import load_orders
from cnmm.run import Run
from cnmm.run_folder import cut_log, load_config, load_plan, load_preprocessing
from cnmm.run_held_out import load_held_out
from cnmm.runtime import latency
from cnmm.runtime.session import Session
from cnmm.training.checkpoint import restore
from cnmm.training.teacher import open_teacher


def speak(verb: Any) -> None:
    """What the command line does with a verb that it has parsed."""
    verb.show(verb.answer())


def config(folder: Path) -> None:
    """What was read is what the file says."""
    found = json.loads(json.dumps(load_config(folder).to_dict()))
    said = json.loads((folder / "config.json").read_bytes())["model"]
    assert {name: found[name] for name in said} == said


def training(folder: Path) -> None:
    found = json.loads(json.dumps(Run(folder).config.to_dict()))
    said = json.loads((folder / "config.json").read_bytes()).get("train", {})
    assert {name: found[name] for name in said if name in found} == {n: v for n, v in said.items() if n in found}


def preprocessing(folder: Path) -> None:
    about, model = load_preprocessing(folder), load_config(folder)
    if about is not None:
        assert (len(about.classes), len(about.mean), len(about.std)) == (model.num_classes, *[model.in_chans] * 2)
        assert all(map(math.isfinite, (*about.mean, *about.std)))
        assert all(name.isprintable() for name in about.classes)


def flow(folder: Path) -> None:
    """A unit of flow leaves the output of a chain, whatever its gates are."""
    chain = load_plan(folder).chain
    into_output = [value for (_, j), value in chain.flow().items() if j == chain.dag.output]
    assert math.isclose(sum(into_output), 1, rel_tol=1e-6)


def choice(frontier: Frontier, text: str) -> None:
    """The best point within a budget of macs, by exhaustion."""
    wanted = parse_budget(text)
    point = frontier.choose(wanted)
    limit = wanted.value if wanted.kind == "macs" else wanted.value * frontier.full_macs / 100
    assert point.macs <= limit
    assert point.quality == max(each.quality for each in frontier.points if each.macs <= limit)


def budget(frontier: Frontier, text: Any) -> None:
    wanted = parse_budget(text)
    assert math.isfinite(wanted.value)
    assert 0 <= wanted.value <= 1 if wanted.kind == "quality" else wanted.value > 0
    if wanted.kind == "quality":
        assert frontier.choose(wanted).quality >= wanted.value
        return
    choice(frontier, text)
    assert frontier.cascade is not None
    assert len(frontier.cascade.confidence(wanted, frontier.full_macs)) == 2


def orders(folder: Path, model: Any) -> None:
    found = load_orders(folder, model)
    assert found is None or set(found) == set(model.exit_numbers)


def held_out(folder: Path) -> None:
    found = load_held_out(folder)
    if found is not None:
        assert len(found.validation.names) == len(found.validation.digests)
        assert all(type(index) is int and index >= 0 for index in found.validation.indices)


def log(folder: Path, step: int) -> None:
    """Lines up to a step are kept as they were, later ones go."""
    path = folder / "log.jsonl"
    before = path.read_bytes() if path.is_file() and path.stat().st_size < 10**6 else None
    cut_log(folder, step)
    if before is not None:
        kept = [line + b"\n" for line in before.split(b"\n")[:-1] if 0 <= json.loads(line)["step"] <= step]
        assert path.read_bytes() == b"".join(kept)


class NoState:
    """An optimizer that has nothing to remember."""

    def tensors(self) -> dict[str, torch.Tensor]:
        return {}


def state(folder: Path, step: int) -> None:
    assert restore(folder, torch.nn.Linear(1, 1), NoState(), {}) == step  # type: ignore[arg-type]


def times(folder: Path) -> None:
    assert all(math.isfinite(value) and value >= 0 for value in latency.p95(folder).values())


def session(folder: Path, runtime: Any = "onnx", *, external: bool = False) -> None:
    """One probability for each class, and none of a network whose tensors are elsewhere."""
    with Session(folder, runtime=runtime, threads=1, points=["e1c0"], cascade=False) as session:
        answer = session.predict(np.zeros((*session.input_size, session.channels), np.uint8), point="e1c0")
        assert answer.probabilities.shape == (1, len(session.classes))
        assert np.isfinite(answer.probabilities).all()
        answer.top(1)
    assert not external, "reads a tensor from another file"


def teacher(path: Path, data: DataSet) -> None:
    answers = open_teacher(str(path), data)(data.train.read(np.arange(4)))
    assert tuple(answers.shape) == (4, len(data.classes))


def image(path: Path) -> None:
    pixels = decode_image(path, (8, 6))
    assert (pixels.shape, pixels.dtype) == ((8, 6, 3), np.uint8)


def option(make: Callable[..., Any], name: str, value: Any) -> None:
    """What a config holds is what it was given, and can be written to a file and read again."""
    made = make(**{name: value}).to_dict()
    assert json.loads(json.dumps(made, allow_nan=False))[name] == value


def command(args: Sequence[str]) -> None:
    """Status 0 with an answer, or 2 with one line."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.main(list(args))
    words, answer = err.getvalue(), out.getvalue()
    assert status in (0, 2), f"status {status}"
    assert all(char == "\n" or char.isprintable() for char in words + answer), f"{args} writes escapes"
    if status == 2:
        assert words.count("\n") == 1, f"{args} says {words[:200]!r}"
        assert words.startswith("cnmm: ")
        assert not answer
