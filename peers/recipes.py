"""How peers are trained: each by a recipe of its own, or by ours as far as it fits. Values are `TrainConfig`s.

What these mean for a network that is no mixture: `exit_distill` is the share of distillation from the last exit in the
losses of the others after `ladder_start`, `optimizer="muon"` takes all convolutions but depthwise ones. Losses of exits
are summed. Fields that only a mixture has are not used and not recorded.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from cnmm._errors import UserError
from cnmm.training.config import TrainConfig
from cnmm.training.recipes import recipe as cnmm_recipe

RECIPES = ("own", "ours")
USED = (
    *("epochs", "batch_size", "lr", "warmup", "schedule", "optimizer", "matrix_lr", "shift_lr", "momentum", "nesterov"),
    *("weight_decay", "decay_all", "label_smoothing", "ladder_start", "exit_distill"),
    *("teacher", "teacher_weight", "teacher_temperature", "val", "seed", "precision"),
    *("crop", "padding", "flip", "flips"),
)
"""The fields that a peer's training has."""


def ours(**fields: Any) -> TrainConfig:
    """The fields of `quick` that are not about mixtures: Muon, linear fall, label smoothing, reflected borders, ..."""
    return cnmm_recipe("quick", **fields)


def plain(**fields: Any) -> TrainConfig:
    """A plain or slimmable network's: large batches and rates, Nesterov's momentum, a line up and a line down."""
    own: dict[str, Any] = {
        "optimizer": "sgd",
        "epochs": 16,
        "batch_size": 256,
        "lr": 0.25,
        "warmup": 0.2,
        "shift_lr": 1.0,
        "nesterov": True,
        "ladder_start": 1.0,
        "exit_distill": 0.0,
    }
    return ours(**(own | fields))


def steady(**fields: Any) -> TrainConfig:
    """MSDNet's own: SGD 0.1, decay 1e-4 on everything, batch 64, cosine, black borders."""
    own: dict[str, Any] = {"recipe": "own", "epochs": 300, "batch_size": 64, "lr": 0.1, "precision": "auto"}
    return TrainConfig(**(own | fields))


def peer_recipe(name: str, recipe: str = "own", **fields: Any) -> TrainConfig:
    """The training of a named peer."""
    if recipe not in RECIPES:
        raise UserError(f"recipe {recipe!r}: must be one of {', '.join(RECIPES)}")
    own = steady if name.startswith("msdnet") else plain
    config = own(**fields) if recipe == "own" else ours(**fields)
    return dataclasses.replace(config, recipe=recipe)


def recorded(config: TrainConfig) -> dict[str, Any]:
    """What config.json and results.json say of it."""
    return {"recipe": config.recipe, **{field: getattr(config, field) for field in USED}}
