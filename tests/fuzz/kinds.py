"""The kinds of cases. Each function makes the files of a case, and yields its kind and what to call."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from PIL import Image
from safetensors.numpy import save_file

import cnmm
from cnmm.cli.budgets import Choose
from cnmm.cli.flags import model_flags
from cnmm.cli.models import Info
from cnmm.cli.running import Predict
from cnmm.data import DataSet
from cnmm.data.dataset import ArraySplit
from cnmm.frontier import Frontier
from cnmm.ladder import read_ladder
from cnmm.lattice import build_lattice
from cnmm.runtime import latency
from cnmm.training.recipes import recipe
from tests.fuzz import right
from tests.fuzz.damage import EXTERNAL, NASTY, damaged_network, flipped, lines_of, put, text_of
from tests.runtime.ladders import CLASSES, SIZE, make_ladder, network

Cases = Iterator[tuple[str, Callable[[], None]]]
PLAN = cnmm.model_plan("cnmm_tiny", channels=4, num_classes=3)
GATES = {"gate_logits": np.linspace(-1, 1, len(build_lattice(PLAN.config).edges), dtype=np.float32)}
ABOUT = {"name": "images", "spec": "folder:images", "classes": ["a", "b", "c"], "mean": [0.5], "std": [0.25]}
CONFIG = {"format_version": 1, "model": PLAN.config.to_dict(), "train": recipe("quick").to_dict(), "data": ABOUT}


def mended(path: Path, document: Any) -> None:
    """An undamaged file again."""
    put(random.Random(1), path, json.dumps(document).encode())


def configs(rng: random.Random, folder: Path) -> Cases:
    run = folder / "run"
    run.mkdir()
    save_file(GATES, run / "model.safetensors")
    ways: list[Callable[[], None]] = [
        lambda: right.config(run),
        lambda: right.preprocessing(run),
        lambda: right.flow(run),
        lambda: right.training(run),
        lambda: right.speak(Info(model=str(run), overrides=model_flags()())),  # type: ignore[call-arg]
    ]
    for number in range(700):
        put(rng, run / "config.json", text_of(rng, CONFIG))
        yield "config", ways[number % len(ways)]
    mended(run / "config.json", CONFIG)


def frontiers(rng: random.Random, folder: Path) -> Cases:
    path, document = folder / "run" / "frontier.json", make_ladder(folder / "measured")
    for number in range(500):
        put(rng, path, text_of(rng, document))
        budget = rng.choice(("2k", "40%", "60%", "1", "100%", "9G"))
        if number % 2:
            yield "frontier", lambda b=budget: right.choice(Frontier.load(path), b)
        else:
            yield "frontier", lambda b=budget: right.speak(Choose(folder=path.parent, budget=b))


def cutting_orders(rng: random.Random, folder: Path) -> Cases:
    path = folder / "run" / "orders.json"
    orders = [{"exit": exit, "cuts": _cuts(exit)} for exit in PLAN.config.exit_numbers]
    for _ in range(250):
        put(rng, path, text_of(rng, {"format_version": 1, "rule": "damage", "orders": orders}))
        yield "orders", lambda: right.orders(path.parent, PLAN.config)
    mended(path, None)
    path.unlink()


def _cuts(exit: int) -> list[list[int]]:
    """The edges of a cutting order, one after the other: of all that vanish with one, that with the latest target."""
    steps = itertools.pairwise(cnmm.cutting_order(PLAN, exit))
    return [list(max(before.edges - after.edges, key=lambda edge: edge[1])) for before, after in steps]


def logs(rng: random.Random, folder: Path) -> Cases:
    more = {"epoch": 1, "loss": 1.5, "quality": {"1": 0.5}, "gradients": {"1": 0.1}}
    lines = [{"step": step, **more} for step in range(5, 30, 5)]
    for _ in range(300):
        put(rng, folder / "run" / "log.jsonl", lines_of(rng, lines))
        yield "log", lambda: right.log(folder / "run", 15)


def states(rng: random.Random, folder: Path) -> Cases:
    place = folder / "run" / "checkpoints" / "step-00000007"
    place.mkdir(parents=True)
    tensors = {"model.weight": np.zeros((1, 1), np.float32), "model.bias": np.zeros(1, np.float32)}
    save_file(tensors, place / "state.safetensors")
    for _ in range(250):
        put(rng, place / "state.json", text_of(rng, {"format_version": 1, "step": 7}))
        yield "state", lambda: right.state(folder / "run", 7)


def weights(rng: random.Random, folder: Path) -> Cases:
    path = folder / "run" / "model.safetensors"
    good = path.read_bytes()
    for _ in range(200):
        put(rng, path, flipped(rng, good, 3))
        yield "weights", lambda: right.flow(folder / "run")


def manifests(rng: random.Random, folder: Path) -> Cases:
    ladder = folder / "ladder"
    manifest = make_ladder(ladder)
    for number in range(550):
        put(rng, ladder / "ladder.json", text_of(rng, manifest), outside=folder.parent / "secret.json")
        budget = rng.choice(("2k", "40%", "1", "100%"))
        if number % 5 == 0:
            yield "ladder", lambda: right.session(ladder)
        elif number % 2:
            yield "ladder", lambda b=budget: right.choice(read_ladder(ladder).frontier, b)
        else:
            yield "ladder", lambda b=budget: right.speak(Choose(folder=ladder, budget=b))
    mended(ladder / "ladder.json", manifest)


def held_out(rng: random.Random, folder: Path) -> Cases:
    """What a run remembers of the images that it held out, by number or by name."""
    path = folder / "run" / "held_out.json"
    numbered = {"format_version": 1, "fingerprint": "a", "num": 9, "validation": {"indices": [1, 3]}}
    named = {**numbered, "validation": {"names": ["a.png", "b.png"], "digests": ["1", "2"]}, "test": {"indices": [0]}}
    for number in range(200):
        put(rng, path, text_of(rng, named if number % 2 else numbered))
        yield "held out", lambda: right.held_out(path.parent)


def latencies(rng: random.Random, folder: Path) -> Cases:
    ladder = folder / "ladder"
    timings = [{"point": name, "macs": 1, "median_ms": 0.1, "p95_ms": 0.2, "n": 5} for name in ("e1c0", "e2c3", "e3c0")]
    entry = {"machine": latency.machine(), "runtime": "onnx", "runtime_version": latency.runtime_version("onnx")}
    entry |= {"precision": "float32", "threads": 1, "batch": 1, "points": timings, "stages": timings[:1]}
    for number in range(350):
        put(rng, ladder / "latency.json", text_of(rng, {"format_version": 1, "measurements": [entry, entry]}))
        if number % 2:
            yield "latency", lambda: right.times(ladder)
        else:
            yield "latency", lambda: right.speak(Choose(folder=ladder, budget="25ms"))
    mended(ladder / "latency.json", {"format_version": 1, "measurements": []})


def networks(rng: random.Random, folder: Path) -> Cases:
    """Their checksums are right: what a runtime makes of them is seen."""
    ladder = folder / "networks"
    manifest, good = make_ladder(ladder), network(1)
    for number in range(360):
        data = damaged_network(rng, good)
        put(rng, ladder / "e1c0.onnx", data, outside=folder.parent / "secret.onnx")
        manifest["points"][0] |= {"name": "e1c0", "sha256": hashlib.sha256(data).hexdigest()}
        (ladder / "ladder.json").write_text(json.dumps(manifest))
        runtime = "openvino" if number % 10 == 0 and latency.runtime_version("openvino") else "onnx"
        external = EXTERNAL.encode() in data
        yield "network", lambda r=runtime, e=external: right.session(ladder, r, external=e)


def teachers(rng: random.Random, folder: Path) -> Cases:
    """Networks whose metadata speak of other classes, or of none."""
    path, split = folder / "teacher.onnx", ArraySplit(np.zeros((4, SIZE, SIZE, 3), np.uint8), np.arange(4))
    about: dict[str, Any] = {"mean": (0.5,) * 3, "std": (0.25,) * 3, "size": (SIZE, SIZE), "in_chans": 3}
    data = DataSet(name="images", spec="folder:images", classes=CLASSES, train=split, test=None, **about)
    for _ in range(60):
        model = onnx.load_from_string(network(1))
        model.producer_name = "cnmm"
        name, text = rng.choice(("classes", "classes", "class", "")), text_of(rng, list(CLASSES))
        onnx.helper.set_model_props(model, {name: text.decode("utf-8", "ignore")})
        put(rng, path, model.SerializeToString())
        yield "teacher", lambda: right.teacher(path, data)


def budgets(rng: random.Random, folder: Path) -> Cases:
    frontier = read_ladder(folder / "asked").frontier
    parts = [*"0123456789.,_ %-+eE:kKmMgGxX\n\t\0", "ms", "acc:", "miou:", "mca:", "nan", "inf", "\x1b[31m", "\u0663"]
    numbers = ["1", "2000", "0.6", ".5", "40", "1,000", "1_000", "1,2", "0", "00", "9" * 400, "1.", "1e5", "-3"]
    for number in range(500):
        text: Any = "".join(rng.choice(parts) for _ in range(rng.randrange(1, 7)))
        if number % 3 == 1:
            text = (
                rng.choice(("", "", "acc:", " "))
                + rng.choice(numbers)
                + rng.choice(("", "k", "M", "G", "%", "ms", " k"))
            )
        elif number % 3 == 2:
            text = rng.choice(NASTY)
        yield "budget", lambda t=text: right.budget(frontier, t)


VERBS: dict[str, tuple[str, str]] = {
    "info": ("cnmm_tiny", "blocks scales channels num-classes in-chans input-size stem-stride exits mixing"),
    "models": ("", "json"),
    "choose": ("none --budget 40%", "budget"),
    "bench": ("none", "batch threads seconds runtime precision"),
    "predict": ("none none.png", "top threads confidence deadline-ms budget average-macs point runtime"),
    "evaluate": ("none", "monte-carlo workers split metric device point budget"),
    "frontier": ("none", "images points rule metric plot statistics"),
    "slim": ("none -o out", "budget point"),
    "export": ("none -o out.onnx", "ladder precision point"),
    "report": ("none", "data out"),
    "train": ("--data folder:none --out out", "epochs lr warmup group crop seed val flip recipe gates batch-size"),
}
"""The words that a verb needs, of folders that do not exist, and some of its flags."""
WORDS = ["0", "1", "-1", "2", "1.5", "1e9", "100000000", "9" * 20, "9" * 5000, "nan", "inf", "-inf", "0x10", "", " "]
WORDS += ["x", "\x1b[31m", "a\nb", "\u202e", "\udcff", "\u0663", "true", "None", "%s", "{0}", "--", "-", "x" * 3000]


def commands(rng: random.Random, folder: Path) -> Cases:
    names = [name for name in VERBS for _ in range(1 if name == "train" else 3)]  # it has most flags, and takes longest
    for number in range(190):
        verb = rng.choice(names)
        needed, flags = VERBS[verb]
        flag, word = "--" + rng.choice(flags.split()), rng.choice(WORDS)
        if number % 12 == 0:  # misspelt
            flag = rng.choice((flag[:-1], flag + "x", "-" + flag, "-z", "--\x1b"))
        args = [verb, *needed.split(), flag, word]
        if number % 15 == 0:
            args = rng.choice(([], [word], [verb, word], [verb + "s"], [flag, *args]))
        yield "command", lambda a=tuple(args): right.command(a)


def options(rng: random.Random, folder: Path) -> Cases:
    """The fields that flags of trainings and models stand for."""

    def plan(**values: Any) -> Any:
        return cnmm.model_plan("cnmm_tiny", **values).config

    training, model = list(recipe("quick").to_dict()), sorted(PLAN.config.to_dict().keys() - {"name"})
    for number in range(500):
        make = functools.partial(recipe, "quick") if number % 2 else plan
        name, value = rng.choice(training if number % 2 else model), rng.choice(NASTY)
        yield "option", lambda m=make, n=name, v=value: right.option(m, n, v)


FORMATS = (
    "png:RGB png:RGBA png:P png:1 png:I;16 jpg:RGB jpg:CMYK jpg:L gif:P bmp:RGB tiff:CMYK tiff:I;16 webp:RGB ppm:RGB"
)
FORMATS += " tga:RGB ico:RGB"


def images(rng: random.Random, folder: Path) -> Cases:
    place = folder / "images"
    place.mkdir()
    good = {name: _picture(place, name) for name in FORMATS.split()}
    others = (b"", b"x", good["png:RGB"], good["gif:P"], b"%!PS-Adobe-3.0 EPSF-3.0\n", b"\x89PNG\r\n\x1a\n")
    for number in range(420):
        name, data = rng.choice(list(good.items()))
        path, kind = place / f"case.{name.partition(':')[0]}", rng.randrange(6)
        if kind == 0:
            data = data[: rng.randrange(len(data))]
        elif kind == 1:
            data = rng.choice(others)
        elif kind == 2 and name.startswith("png"):  # a bomb: sides of millions of pixels; or of none
            data = data[:16] + rng.choice((b"\x7f\xff\xff\xff", b"\0\0\xff\xff", b"\0\0\0\0")) * 2 + data[24:]
        else:
            data = flipped(rng, data, 6)
        put(rng, path, data)
        if number % 8:
            yield "image", lambda p=path: right.image(p)
        else:
            verb = Predict(source=folder / "asked", images=(path,), threads=1, point="e1c0")
            yield "image", lambda v=verb: right.speak(v)


def _picture(place: Path, name: str) -> bytes:
    suffix, _, mode = name.partition(":")
    image = Image.new(mode, (9, 7), 1 if mode in ("1", "P", "L", "I;16") else None)
    more: dict[str, Any] = {"save_all": True, "append_images": [image] * 3} if suffix == "gif" else {}
    image.save(place / f"good.{suffix}", **more)
    return (place / f"good.{suffix}").read_bytes()


ALL = (configs, frontiers, cutting_orders, held_out, logs, states, weights, manifests, latencies, networks, teachers)
ALL += (budgets, commands, options, images)
