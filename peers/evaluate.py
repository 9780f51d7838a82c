"""How good the exits of a peer are, alone and together: an image may leave at the first exit that is confident."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cnmm.cascade import Threshold, passed
from cnmm.evaluation.calibrate import calibrate
from cnmm.evaluation.quality import Choices, Meter, Quality, Task
from peers.network import ExitCost, Peer


@dataclass(frozen=True)
class Answers:
    """What the exits of a peer said about labelled images."""

    meters: list[Meter]
    """One for each exit."""
    choices: Choices
    """What early exit would make of them."""

    @property
    def qualities(self) -> list[Quality]:
        """Of every exit."""
        return [meter.quality() for meter in self.meters]


@torch.no_grad()
def ask(network: Peer, batches: Iterable[tuple[Tensor, Tensor]], task: Task, num_classes: int) -> Answers:
    """All exits about all images, in float32, with the running statistics."""
    found = Answers([], task.choices(num_classes, task.check_metric()))
    was_training = network.training
    network.eval()
    for images, target in batches:
        scores = list(network.exits(images.contiguous(memory_format=torch.channels_last)))
        found.meters.extend(task.meter(num_classes) for _ in scores[len(found.meters) :])
        for meter, score in zip(found.meters, scores, strict=True):
            meter.add(score, target)
        found.choices.add(scores, target)
    network.train(was_training)
    return found


def exit_rows(costs: list[ExitCost], splits: dict[str, Answers]) -> list[dict[str, Any]]:
    """Every exit with its macs and what it answers on the images of every split."""
    rows: list[dict[str, Any]] = [
        {"exit": number, "macs": cost.macs, "stage_macs": cost.stage} for number, cost in enumerate(costs, 1)
    ]
    for split, answers in splits.items():
        for row, quality in zip(rows, answers.qualities, strict=True):
            row[split] = {**quality.all, "low": quality.low, "high": quality.high, "n": quality.n}
            if quality.per_class:
                row[split]["per_class"] = quality.per_class
    return rows


def early_exit_rows(costs: list[ExitCost], held_out: Choices, test: Choices | None) -> list[dict[str, Any]]:
    """What average budgets buy, cheapest first: thresholds from the held-out images, and what they do to test images.

    The calibration is the mixtures' own. An image pays for every classifier it passes.
    """
    stages = [cost.stage for cost in costs]
    rows = []
    for row in calibrate(held_out.confidence, held_out.worth, stages, held_out.quality):
        found = {"confidence": row.confidence, "validation": {"macs": row.average_macs, "quality": row.quality}}
        asking = (0,) * (len(stages) - 1)
        rows.append(found | ({"test": spent(row, stages, asking, test)} if test else {}))
    return rows


def spent(row: Threshold, stages: Sequence[int], asking: Sequence[int], choices: Choices) -> dict[str, float]:
    """Average macs and quality if images leave at these confidences; `stages` and `asking` as in a cascade."""
    sure = choices.confidence[:, :-1] >= np.array(row.confidence)
    leaves = np.concatenate([sure, np.ones((len(sure), 1), bool)], 1).argmax(1)
    macs = np.array(passed(stages, asking, row.confidence))
    return {"macs": float(macs[leaves].mean()), "quality": choices.quality(leaves)}
