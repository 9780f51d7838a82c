"""Recipes: functions that return a complete training config. Torch-free.

`cifar10` and `cifar100` are the paper's but for the images held out (`val=0` trains on all, as the paper does);
`quick` is ours for a short training on CPUs.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable
from typing import Any

from cnmm._errors import UserError
from cnmm.training.config import TrainConfig

_RECIPES: dict[str, Callable[[], TrainConfig]] = {}


def recipe(name: str, **overrides: Any) -> TrainConfig:
    """A recipe by name, with some fields changed."""
    if name not in _RECIPES:
        raise UserError(f"unknown recipe {name!r}: must be one of {', '.join(_RECIPES)}")
    config = _RECIPES[name]()
    allowed = [field.name for field in dataclasses.fields(config) if field.name != "recipe"]
    for field in overrides:
        if field not in allowed:
            near = difflib.get_close_matches(field, allowed, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UserError(f"unknown training option {field!r}: must be one of {', '.join(allowed)}{hint}")
    return dataclasses.replace(config, **overrides)


def list_recipes() -> list[str]:
    return list(_RECIPES)


def describe_recipe(name: str) -> str:
    """What a recipe does, in a sentence or two."""
    return " ".join((_RECIPES[name].__doc__ or "").split())


def _register(function: Callable[[], TrainConfig]) -> Callable[[], TrainConfig]:
    _RECIPES[function.__name__] = function
    return function


@_register
def quick() -> TrainConfig:
    """Ours, not the paper's: learning by expectations, then ladder tuning, for minutes on a CPU."""
    return TrainConfig(
        recipe="quick",
        epochs=14,
        batch_size=128,
        lr=0.2,
        warmup=0.1,
        nesterov=True,
        weight_decay=5e-4,
        decay_all=False,
        gates="expectation",
        group=None,
        ladder_start=0.65,
        clip=1.0,
        precision="auto",
    )


@_register
def cifar10() -> TrainConfig:
    """The paper's, section 4.1: SGD with momentum, cosine, 300 epochs, relaxed samples at temperature 2.

    The statistics are the running averages of the sampled passes; nothing is re-estimated. That 5,000 images are held
    out, to choose points and thresholds on them, is ours: `--val 0` is the paper's.
    """
    return TrainConfig(recipe="cifar10", epochs=300, batch_size=64, lr=0.1, statistics="raw", val=5000)


@_register
def cifar100() -> TrainConfig:
    """The paper's optimisation for CIFAR-100: the same as for CIFAR-10."""
    return dataclasses.replace(cifar10(), recipe="cifar100")
