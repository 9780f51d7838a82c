"""Trains a peer on the images, the held-out images and the augmentation that a mixture would get.

    python -m peers.train plain_118m --data cifar10:DIR --out runs/teacher
    python -m peers.train msdnet_lin5_s2 --data cifar10:DIR --out runs/msdnet --recipe ours --minutes 27 --seed 1
    python -m peers.train espnetv2_s1 --data camvid:DIR --out runs/espnet --recipe ours --epochs 100

The folder gets config.json, log.jsonl, checkpoints/ (after every epoch; --resume goes on from the last, bit by bit),
model.safetensors, results.json with the figures of every exit and, where images are labelled, model.onnx (the last
exit: `cnmm train --teacher` takes it). With --minutes a few steps are timed first, and as many epochs are
trained as fit into so many minutes of one thread.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from cnmm import run_folder
from cnmm._errors import UserError
from cnmm._files import to_bytes, write_atomically, write_json
from cnmm._machine import keep_freed_memory, machine
from cnmm.data import DataSet, open_data
from cnmm.training.config import TrainConfig
from peers.network import onnx_bytes
from peers.recipes import RECIPES, peer_recipe, recorded, with_epochs
from peers.training import Training, complete
from peers.zoo import PEERS, SEGMENTATION

RESULTS_FILE, ONNX_FILE = "results.json", "model.onnx"

Say = Callable[[str], None]


def train_peer(
    name: str,
    data: str,
    out: str | Path,
    *,
    recipe: str = "own",
    minutes: float | None = None,
    resume: bool = False,
    onnx: bool = True,
    say: Say = lambda words: None,
    command: str = "",
    **fields: Any,
) -> dict[str, Any]:
    """Trains a peer into a folder and returns what results.json says. `fields` override those of the recipe.

    `onnx`: also writes the ONNX file, which takes seconds.
    """
    keep_freed_memory()
    folder, opened = Path(out), open_data(data)
    config = complete(peer_recipe(name, recipe, **fields), opened, asked="val" in fields)
    _check_folder(folder, resume=resume)
    if minutes is not None:
        fitting = _stored(folder)["train"]["epochs"] if resume else _epochs(name, opened, config, minutes)
        config = with_epochs(config, fitting)
    training = Training(name, opened, config, folder)
    _start_folder(training, resume=resume)
    for epoch in range(training.start(), config.epochs):
        clocks = time.monotonic(), time.process_time()
        loss = training.epoch(epoch)
        clocks = time.monotonic() - clocks[0], time.process_time() - clocks[1]
        quality = [found.value for found in training.ask(opened.train, training.held_out).qualities]
        line = {"epoch": epoch + 1, "loss": loss, "quality": quality, "seconds": clocks[0], "cpu_seconds": clocks[1]}
        run_folder.append_log(folder, {"step": (epoch + 1) * training.steps, **line})
        training.save(epoch + 1)
        exits = " ".join(f"{100 * value:.2f}" for value in quality)
        say(f"epoch {epoch + 1}/{config.epochs}  loss {loss:.3f}  held out {exits}  {clocks[0]:.0f} s")
    return _finish(training, command, onnx=onnx)


def _epochs(name: str, data: DataSet, config: TrainConfig, minutes: float) -> int:
    """How many fit into these minutes of one thread, at least one."""
    return max(1, int(60 * minutes / Training(name, data, config, Path()).epoch_s()))


def _check_folder(folder: Path, *, resume: bool) -> None:
    """Is there a training to go on with, or room for a new one?"""
    if (folder / run_folder.CONFIG_FILE).exists() != resume:
        words = ("nothing is there; remove --resume to start", "a training is there; use --resume, or another --out")
        raise UserError(f"{folder}: {words[not resume]}")


def _stored(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / run_folder.CONFIG_FILE).read_text("utf-8"))
    return found


def _start_folder(training: Training, *, resume: bool) -> None:
    """Makes a new folder, or checks that an old one holds the same training."""
    folder, about = training.folder, json.loads(json.dumps(_about(training)))
    if not resume:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / run_folder.CONFIG_FILE, about)
    elif any(_stored(folder).get(part) != about[part] for part in about):
        raise UserError(f"{folder}: holds another training; use the same options, or another --out")


def _about(training: Training) -> dict[str, Any]:
    return {"peer": training.name, "data": training.data.spec, "train": recorded(training.config)}


def _finish(training: Training, command: str, *, onnx: bool) -> dict[str, Any]:
    """Writes the weights, the results and, where images are labelled, the ONNX file."""
    folder, network, data = training.folder, training.finish(), training.data
    write_atomically(folder / run_folder.WEIGHTS_FILE, to_bytes(network.state_dict()))
    if onnx and not data.palette:
        write_atomically(folder / ONNX_FILE, onnx_bytes(network, data.size, data.in_chans))
    lines = [json.loads(line) for line in (folder / run_folder.LOG_FILE).read_text("utf-8").splitlines()]
    results = {
        **_about(training),
        "metric": training.task.metrics[0],
        "command": command,
        "machine": machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "minutes": sum(line["seconds"] for line in lines) / 60,
        "cpu_minutes": sum(line["cpu_seconds"] for line in lines) / 60,
        **training.results(),
    }
    write_json(folder / RESULTS_FILE, results)
    return results


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m peers.train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("peer", choices=[*PEERS, *SEGMENTATION])
    parser.add_argument("--data", required=True, metavar="KIND:DIR", help="as for cnmm train")
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER")
    parser.add_argument("--recipe", choices=RECIPES, default="own", help="the peer's own, or ours where it fits")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--epochs", type=int)
    length.add_argument("--minutes", type=float, help="as many epochs as fit into these minutes of one thread")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--teacher", metavar="FILE.onnx|RUN", help="teaches all exits, as for cnmm train")
    parser.add_argument("--resume", action="store_true")
    given = vars(parser.parse_args(arguments))
    words = "python -m peers.train " + shlex.join(sys.argv[1:] if arguments is None else arguments)
    fields = {name: given[name] for name in ("epochs", "seed", "teacher") if given[name] is not None}
    try:
        results = train_peer(
            given["peer"],
            given["data"],
            given["out"],
            recipe=given["recipe"],
            minutes=given["minutes"],
            resume=given["resume"],
            say=lambda words: print(words, file=sys.stderr, flush=True),
            command=words,
            **fields,
        )
    except UserError as error:
        print(f"peers: {error}", file=sys.stderr)
        return 2
    print(json.dumps({"folder": str(given["out"]), "minutes": results["minutes"], "exits": results["exits"]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
