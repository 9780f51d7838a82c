"""How peers are trained: each by a recipe of its own, or by ours as far as it fits. Values are `TrainConfig`s.

What these mean for a network that is no mixture: `exit_distill` is the share of distillation from the last exit in the
losses of the others after `ladder_start`, `optimizer="muon"` takes all convolutions that a normalisation follows, but
depthwise ones. Losses of exits
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
    *("average", "statistics", "crop", "padding", "flip", "flips"),
    *("scene_crop", "final_crop", "final_epochs", "zoom", "colour", "class_weights"),
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
    return TrainConfig(**(own | {"statistics": "raw"} | fields))


def street(**fields: Any) -> TrainConfig:
    """Our recipe for scenes, as far as it fits."""
    config = cnmm_recipe("street")
    config = with_epochs(config, fields.get("epochs", config.epochs))
    return dataclasses.replace(config, **fields)


def espnet(**fields: Any) -> TrainConfig:
    """ESPNetv2's own optimisation, SGD 0.009 with decay 4e-5 and a cosine, on the crops and zooms of ours."""
    own: dict[str, Any] = {
        "optimizer": "sgd",
        "lr": 0.009,
        "warmup": 0.0,
        "schedule": "cosine",
        "shift_lr": 1.0,
        "weight_decay": 4e-5,
        "decay_all": True,
        "average": 0.0,
        "statistics": "raw",
    }
    return street(**(own | fields))


def with_epochs(config: TrainConfig, epochs: int) -> TrainConfig:
    """As long as told; where crops grow, they do so for the last quarter."""
    return dataclasses.replace(config, epochs=epochs, final_epochs=epochs // 4 if config.final_crop else 0)


def peer_recipe(name: str, recipe: str = "own", **fields: Any) -> TrainConfig:
    """The training of a named peer."""
    if recipe not in RECIPES:
        raise UserError(f"recipe {recipe!r}: must be one of {', '.join(RECIPES)}")
    kind = name.partition("_")[0]
    own, theirs = {"msdnet": (steady, ours), "espnetv2": (espnet, street)}.get(kind, (plain, ours))
    config = (own if recipe == "own" else theirs)(**fields)
    return dataclasses.replace(config, recipe=recipe)


def recorded(config: TrainConfig) -> dict[str, Any]:
    """What config.json and results.json say of it."""
    return {"recipe": config.recipe, **{field: getattr(config, field) for field in USED}}
