"""The model card of a run: README.md in its folder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from cnmm._errors import printable
from cnmm.config import MixtureConfig, Preprocessing
from cnmm.evaluation.quality import Quality
from cnmm.frontier import metric_words
from cnmm.training.config import TrainConfig
from cnmm.training.recipes import describe_recipe, list_recipes
from cnmm.zoo import describe_model, list_models


def card(
    model: MixtureConfig,
    data: Mapping[str, Any],
    preprocessing: Preprocessing,
    config: TrainConfig,
    exits: Mapping[int, Quality],
    split: str,
) -> str:
    """The card as markdown: what it is, how good every exit is, what it expects. `data` is that of config.json."""
    last = exits[max(exits)]
    words = metric_words(last.metric)
    rows = "\n".join(f"| {exit} | {100 * quality.value:.2f} |" for exit, quality in exits.items())
    height, width, channels = preprocessing.image_shape
    classes = ", ".join(map(code, preprocessing.classes))
    mean, std = (", ".join(f"{value:.4f}" for value in values) for values in (preprocessing.mean, preprocessing.std))
    return f"""# {code(model.name)}, trained on {code(data.get("name") or "images without a name")}

A Convolutional Neural Mixture Model. One set of weights holds every exit and every operating point: `cnmm info` shows
them.

- Architecture: {_architecture(model)}
- Training: `cnmm train`, {config.epochs} epochs, seed {config.seed}, recipe {code(config.recipe)}. {_recipe(config)}

{words if words == "mIoU" else words.capitalize()} (%) on {last.n} {split} images, expectation, nothing cut:

| exit | {words} |
|---|---|
{rows}

Classes: {classes}. Images: {channels} x {height} x {width}, mean {mean}, standard deviation
{std}.
"""


def code(name: str) -> str:
    """A name that comes from anywhere as a code span, in which markdown and HTML mean nothing."""
    text = printable(name)
    fence = "`" * (1 + max((len(ticks) for ticks in re.findall("`+", text)), default=0))
    edge = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{edge}{text}{edge}{fence}"


def _architecture(model: MixtureConfig) -> str:
    return describe_model(model.name) if model.name in list_models() else "not one of the zoo."


def _recipe(config: TrainConfig) -> str:
    return describe_recipe(config.recipe) if config.recipe in list_recipes() else ""
