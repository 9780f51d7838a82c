"""Ways to train, for the same minutes, at every budget: the paper's sampled gates, expectations, and `quick`.

    python -m benchmarks.recipes runs/ --data cifar10:DIR                      # 15 minutes each, two seeds: 90 minutes
    python -m benchmarks.recipes runs/ --data cifar10:DIR --minutes 5 --seeds 0

All three have the model, batch size, learning rates, weight decay, clipping and precision of `quick`; they differ in
the gates (relaxed samples per image, or expectations) and in ladder tuning. The time of a step is measured first, and
tells how many epochs of each fit into the minutes. Runs go to runs/NAME_SEED; those that are there already are only
read, and one that was interrupted goes on. Accuracy is that of the best point by either cutting rule within the budget,
on the held-out images, statistics re-estimated. Run it on a quiet machine. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

import cnmm
from cnmm._machine import keep_freed_memory
from cnmm.data import open_data
from cnmm.frontier import FRONTIER_FILE, find_frontier
from cnmm.training.batches import use_bfloat16
from cnmm.training.ladder_tuning import Ladder, tunes_ladder
from cnmm.training.objective import training_loss
from cnmm.training.optim import Optimizer, take_step
from cnmm.training.recipes import recipe

WAYS: dict[str, dict[str, object]] = {
    "sampled": {"gates": "relaxed", "group": 1, "ladder_start": 1.0},
    "expectations": {"ladder_start": 1.0},
    "quick": {},
}
SHARES = (100, 70, 50, 35, 20)


def step_s(way: str, model_name: str, part: float, steps: int = 12) -> float:
    """Median time of a training step, at some part of the training."""
    config = recipe("quick", **WAYS[way])
    model = cnmm.create_model(model_name).train()
    optimizer = Optimizer(model, config)
    x = torch.randn(config.batch_size, model.config.in_chans, *model.config.input_size)
    x = x.bfloat16() if use_bfloat16(config.precision) else x
    labels = torch.randint(model.config.num_classes, (config.batch_size,))
    ladder = Ladder(model) if tunes_ladder(model, config, part) else None
    times = []
    for step in range(steps):
        start = time.perf_counter()
        loss = training_loss(model, x, labels, config, at=(0, step), ladder=ladder)
        take_step(model, optimizer, loss, config, part=part)
        times.append(time.perf_counter() - start)
    return statistics.mean(times[2:])  # points of the ladder differ in cost: their mean, not their median


def epochs_within(way: str, model_name: str, minutes: float, steps_per_epoch: int) -> int:
    start = float(str(WAYS[way].get("ladder_start", recipe("quick").ladder_start)))
    plain = step_s(way, model_name, 0.0)
    tuned = step_s(way, model_name, 1.0) if start < 1 else plain
    each = start * plain + (1 - start) * tuned
    epochs = max(1, int(60 * minutes / (each * steps_per_epoch)))
    print(
        f"{way}: {1000 * plain:.0f} ms a step, {1000 * tuned:.0f} with ladder tuning: {epochs} epochs", file=sys.stderr
    )
    return epochs


def is_finished(run: Path) -> bool:
    return (run / "README.md").is_file()  # the card comes last


def train(run: Path, way: str, seed: int, epochs: int, arguments: argparse.Namespace) -> None:
    """Trains a run and measures its frontier, as far as that is not done."""
    command = [sys.executable, "-m", "cnmm"]
    flags = [f"--{field.replace('_', '-')}={value}" for field, value in WAYS[way].items()]
    if not is_finished(run):
        options = ["--data", arguments.data, "--model", arguments.model, "--out", str(run), *flags]
        options += ["--epochs", str(epochs), "--seed", str(seed), *(["--resume"] if run.exists() else [])]
        subprocess.run([*command, "train", *options], check=True, stdout=sys.stderr)
    if not (run / FRONTIER_FILE).exists():
        subprocess.run([*command, "frontier", str(run)], check=True, stdout=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--data", required=True, help="cifar10:DIR")
    parser.add_argument("--model", default="cnmm_b4s3", choices=cnmm.list_models())
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    arguments = parser.parse_args()
    keep_freed_memory()
    folders = {(way, seed): arguments.runs / f"{way}_{seed}" for way in WAYS for seed in arguments.seeds}
    steps = (len(open_data(arguments.data).train) - recipe("quick").val) // recipe("quick").batch_size
    for way in WAYS:
        waiting = [seed for seed in arguments.seeds if not is_finished(folders[way, seed])]
        epochs = epochs_within(way, arguments.model, arguments.minutes, steps) if waiting else 0
        for seed in arguments.seeds:
            train(folders[way, seed], way, seed, epochs, arguments)

    table: dict[str, dict[int, list[float]]] = {way: {} for way in WAYS}
    for (way, _), folder in folders.items():
        frontier = find_frontier(folder)
        for share in SHARES:
            table[way].setdefault(share, []).append(100 * frontier.choose(f"{share}%").quality)
    print("| training | epochs | " + " | ".join(f"{share} %" for share in SHARES) + " |")
    print("|---|---|" + "---|" * len(SHARES))
    for way, row in table.items():
        epochs = json.loads((folders[way, arguments.seeds[0]] / "config.json").read_text())["train"]["epochs"]
        cells = [
            f"{statistics.mean(row[share]):.1f} ({' / '.join(f'{a:.1f}' for a in row[share])})" for share in SHARES
        ]
        print(f"| {way} | {epochs} | {' | '.join(cells)} |")
    print(json.dumps({way: {share: statistics.mean(row[share]) for share in SHARES} for way, row in table.items()}))


if __name__ == "__main__":
    main()
