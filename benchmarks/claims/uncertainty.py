"""Do samples of the mixture disagree where it errs? Signals of doubt, compared by how well they tell errors.

Signals: the largest probability of the last exit, as it is and with a temperature fitted on held-out images; how much
five samples of the mixture disagree; how much the exits of one pass disagree, which costs nothing. AUROC: the
probability that an image that deserves doubt gets more of it than one that does not; 0.5 is chance.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.claims.store import JSON
from benchmarks.claims.trained import Trained
from benchmarks.claims.trainings import Scale
from cnmm.data import open_data
from cnmm.mixture import Mixture
from cnmm.training.seeds import seeded

SAMPLES = 5
BINS = 15
TEMPERATURES = np.geomspace(0.25, 4, 49)


@torch.no_grad()
def measure_uncertainty(trained: Trained, scale: Scale) -> JSON:
    """AUROC of errors and of images of other classes, and the expected calibration error."""
    run, other = trained.run, trained.other
    held, test = (
        _answers(run, run.images.batches(part, chosen[: scale.images]))
        for part, chosen in (run.images.split("validation"), run.images.split("test"))
    )
    temperature = fitted_temperature(held["logits"], held["labels"])
    strange = _answers(run, _strange(run, scale.images, other))
    probabilities = test["logits"].softmax(1)
    right = probabilities.argmax(1) == test["labels"]
    doubts, odd = signals(test, temperature), signals(strange, temperature)
    rows = []
    for name in doubts:
        unknown = auroc(
            np.concatenate([odd[name], doubts[name]]), np.repeat([True, False], [len(odd[name]), len(doubts[name])])
        )
        rows.append({"signal": name, "errors": auroc(doubts[name], ~right.numpy()), "unknown": unknown})
    calibration = {
        "largest probability": calibration_error(probabilities, test["labels"]),
        "with a temperature": calibration_error((test["logits"] / temperature).softmax(1), test["labels"]),
        "mean of samples": calibration_error(test["samples"].mean(0), test["labels"]),
        "mean of exits": calibration_error(test["exits"].mean(0), test["labels"]),
    }
    accuracy = {
        name: float((answers.argmax(1) == test["labels"]).float().mean())
        for name, answers in (
            ("last exit", probabilities),
            ("mean of samples", test["samples"].mean(0)),
            ("mean of exits", test["exits"].mean(0)),
        )
    }
    about = {"n": len(right), "split": "test", "unknown_n": len(strange["labels"]), "unknown": trained.other_title}
    return {**about, "temperature": float(temperature), "rows": rows, "calibration": calibration, "accuracy": accuracy}


def _answers(run: Any, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Logits of the last exit, probabilities of all exits [E, N, K] and of samples [S, N, K], and labels."""
    model: Mixture = run.model.eval()
    generator = seeded(run.config.seed, "monte-carlo")
    parts: dict[str, list[Tensor]] = {"logits": [], "exits": [], "samples": [], "labels": []}
    for images, labels in batches:
        scores = list(model.forward_exits(images).values())
        options: dict[str, Any] = {"gates": "relaxed", "group": 1, "temperature": run.config.temperature}
        drawn = [model(images, generator=generator, **options).softmax(1) for _ in range(SAMPLES)]
        parts["logits"].append(scores[-1])
        parts["exits"].append(torch.stack([score.softmax(1) for score in scores]))
        parts["samples"].append(torch.stack(drawn))
        parts["labels"].append(labels)
    return {
        name: torch.cat(found, 1 if name in ("exits", "samples") else 0).float()
        if name != "labels"
        else torch.cat(found)
        for name, found in parts.items()
    }


def _strange(run: Any, num: int, other: str | None) -> Iterable[tuple[Tensor, Tensor]]:
    """Images of other classes; without another data set, the test images upside down and negated."""
    if other is None:
        part, chosen = run.images.split("test")
        return [(-images.flip(2), labels) for images, labels in run.images.batches(part, chosen[:num])]
    data = open_data(other)
    assert data.test is not None
    return list(run.images.batches(data.test, np.arange(len(data.test))[:num]))


def signals(found: dict[str, Tensor], temperature: float) -> dict[str, np.ndarray]:
    """Doubt by name, [N]: more is more doubtful."""
    logits, exits, samples = found["logits"], found["exits"], found["samples"]
    return {
        "largest probability": (1 - logits.softmax(1).amax(1)).numpy(),
        "with a temperature": (1 - (logits / temperature).softmax(1).amax(1)).numpy(),
        f"{SAMPLES} samples: disagreement": disagreement(samples).numpy(),
        f"{SAMPLES} samples: largest mean probability": (1 - samples.mean(0).amax(1)).numpy(),
        "exits: disagreement": disagreement(exits).numpy(),
        "exits: largest mean probability": (1 - exits.mean(0).amax(1)).numpy(),
    }


def disagreement(answers: Tensor) -> Tensor:
    """Of probabilities [S, N, K]: entropy of the mean less the mean entropy, in nats; zero where all say the same."""

    def entropy(p: Tensor) -> Tensor:
        return -(p * p.clamp_min(1e-12).log()).sum(-1)

    return entropy(answers.mean(0)) - entropy(answers).mean(0)


def fitted_temperature(logits: Tensor, labels: Tensor) -> float:
    """The temperature under which held-out labels are likeliest."""
    losses = [torch.nn.functional.cross_entropy(logits / t, labels).item() for t in TEMPERATURES.tolist()]
    return float(TEMPERATURES[int(np.argmin(losses))])


def auroc(doubt: np.ndarray, deserved: np.ndarray) -> float:
    """The probability that of two images the one that deserves doubt gets more; ties count half."""
    values, place = np.unique(doubt, return_inverse=True)
    counts = np.bincount(place, minlength=len(values))
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    positive = int(deserved.sum())
    negative = len(doubt) - positive
    if not positive or not negative:
        return 0.5
    return float((ranks[deserved].sum() - positive * (positive + 1) / 2) / (positive * negative))


def calibration_error(probabilities: Tensor, labels: Tensor) -> float:
    """By how much the largest probability differs from the share of right answers, over bins of equal width."""
    sure, best = probabilities.max(1)
    right, bins = (best == labels).double(), (sure * BINS).long().clamp_max(BINS - 1)
    error = 0.0
    for number in range(BINS):
        inside = bins == number
        if inside.any():
            error += float(inside.double().mean() * (sure[inside].double().mean() - right[inside].mean()).abs())
    return error
