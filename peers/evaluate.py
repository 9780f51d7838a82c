"""How good the exits of a peer are, alone and together: an image may leave at the first exit that is confident."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cnmm.cascade import Threshold
from cnmm.evaluation.calibrate import calibrate
from cnmm.evaluation.task import Classification, Meter
from peers.network import ExitCost, Peer


@dataclass(frozen=True)
class Answers:
    """What the exits of a peer said about labelled images: [images, exits]."""

    confidence: np.ndarray
    """Probability of the best class."""
    right: np.ndarray
    meters: list[Meter]
    """One for each exit."""


@torch.no_grad()
def ask(network: Peer, batches: Iterable[tuple[Tensor, Tensor]]) -> Answers:
    """All exits about all images, in float32, with the running statistics."""
    confidence, right = [], []
    meters: list[Meter] = []
    was_training = network.training
    network.eval()
    for images, labels in batches:
        scores = list(network.exits(images.contiguous(memory_format=torch.channels_last)))
        meters = meters or [Classification().meter(scores[0].shape[1]) for _ in scores]
        for meter, score in zip(meters, scores, strict=True):
            meter.add(score, labels)
        best = torch.stack([score.float().softmax(1) for score in scores], 1).max(2)
        confidence.append(best.values)
        right.append(best.indices == labels[:, None])
    network.train(was_training)
    return Answers(torch.cat(confidence).numpy(), torch.cat(right).numpy(), meters)


def exit_rows(costs: list[ExitCost], splits: dict[str, Answers]) -> list[dict[str, Any]]:
    """Every exit with its macs and what it answers on the images of every split."""
    rows = []
    for number, cost in enumerate(costs):
        row: dict[str, Any] = {"exit": number + 1, "macs": cost.macs, "stage_macs": cost.stage}
        for split, answers in splits.items():
            found = answers.meters[number].quality()
            row[split] = {found.metric: found.value, "low": found.low, "high": found.high, "n": found.n}
        rows.append(row)
    return rows


def early_exit_rows(costs: list[ExitCost], held_out: Answers, test: Answers | None) -> list[dict[str, Any]]:
    """What average budgets buy, cheapest first: thresholds from the held-out images, and what they do to test images.

    The calibration is the mixtures' own. An image pays for every classifier it passes.
    """
    stages = [cost.stage for cost in costs]
    rows = []
    for row in calibrate(held_out.confidence, held_out.right, stages):
        found = {"confidence": row.confidence, "validation": {"macs": row.average_macs, "accuracy": row.quality}}
        rows.append(found | ({"test": _spent(row, stages, test)} if test else {}))
    return rows


def _spent(row: Threshold, stages: list[int], answers: Answers) -> dict[str, float]:
    """Average macs and accuracy if images leave at these confidences."""
    sure = answers.confidence[:, :-1] >= np.array(row.confidence)
    leaves = np.concatenate([sure, np.ones((len(sure), 1), bool)], 1).argmax(1)
    accuracy = answers.right[np.arange(len(leaves)), leaves].mean()
    return {"macs": float(np.cumsum(stages)[leaves].mean()), "accuracy": float(accuracy)}
