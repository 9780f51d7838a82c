"""The zoo: named models and how to make one. Torch-free until a model is made."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cnmm._errors import UserError
from cnmm.config import MixtureConfig
from cnmm.cost import CostTable
from cnmm.plan import Plan, require_torch
from cnmm.pretrained import pretrained as find_pretrained
from cnmm.run_folder import load

if TYPE_CHECKING:
    from cnmm.mixture import Mixture

_REGISTRY: dict[str, Callable[[], MixtureConfig]] = {}


def register_model(function: Callable[[], MixtureConfig]) -> Callable[[], MixtureConfig]:
    """Registers a function that returns a config; its name is the model's name, its docstring the description."""
    _REGISTRY[function.__name__] = function
    return function


def list_models(pattern: str = "") -> list[str]:
    """Names of the zoo's models, those that contain `pattern`."""
    return sorted(name for name in _REGISTRY if pattern in name)


def describe_model(name: str) -> str:
    """One line on what a model is for."""
    _check_name(name)
    return (_REGISTRY[name].__doc__ or "").strip()


def model_plan(name: str, **overrides: Any) -> Plan:
    """A model by name without building it. `overrides` are fields of `MixtureConfig`."""
    _check_name(name)
    config = _REGISTRY[name]()
    allowed = sorted({field.name for field in dataclasses.fields(config)} - {"name"})
    for field in overrides:
        if field not in allowed:
            near = difflib.get_close_matches(field, allowed, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UserError(f"unknown option {field!r}: must be one of {', '.join(allowed)}{hint}")
    return Plan(dataclasses.replace(config, **overrides))


def create_model(name: str, *, pretrained: bool = False, **overrides: Any) -> Mixture:
    """Builds a model by name: `create_model("cnmm_b6s3", num_classes=100)`.

    `pretrained` loads trained weights: the name is then `MODEL.DATA`, such as `cnmm_b6s3.cifar10`, or `MODEL` where it
    was trained on one data set only.
    """
    if pretrained:
        return _unchanged(load(find_pretrained(name)), overrides)
    plan = model_plan(name, **overrides)
    model: Mixture = require_torch().Mixture(plan.config)
    return model


def _unchanged(model: Mixture, overrides: dict[str, Any]) -> Mixture:
    model_plan(model.config.name, **overrides)
    for field, value in overrides.items():
        fixed = getattr(model.config, field)
        if value != fixed:
            raise UserError(f"{field}={value!r}: the trained model has {fixed!r}; to change it: cnmm train --init")
    return model


def _check_name(name: str) -> None:
    if name in _REGISTRY:
        return
    near = difflib.get_close_matches(re.sub(r"[-. ]", "_", name.lower()), _REGISTRY, 3, 0.5)
    hint = f"the nearest names are {', '.join(near)}" if near else f"must be one of {', '.join(list_models())}"
    raise UserError(f"unknown model {name!r}: {hint}; `cnmm models` lists all")


def summary(plan: Plan) -> dict[str, Any]:
    """The size of a model, as `models` and `info` print it."""
    config = plan.config
    lattice = plan.chain.dag
    cost = CostTable.of(config).exit()
    inner = [edge for edge in lattice.edges if edge[0] != 0 and edge[1] != lattice.output]
    return {
        "model": config.name,
        "task": config.task,
        "blocks": config.blocks,
        "scales": config.scales,
        "channels": config.channels,
        "num_classes": config.num_classes,
        "in_chans": config.in_chans,
        "input_size": list(config.input_size),
        "maps": lattice.output - 1,
        "edges": len(lattice.edges),
        "block_edges": len(inner),
        "networks": num_networks(plan),
        "macs": cost.macs,
        "params": cost.params,
    }


def num_networks(plan: Plan, exit: int | None = None) -> int:
    """Networks in the mixture of an exit; the deterministic variant is one network."""
    return 1 if plan.config.mixing == "sum" else plan.chain.count(exit)


@register_model
def cnmm_b6s3() -> MixtureConfig:
    """The paper's CIFAR model: 6 blocks, 3 scales, 64 channels, 32x32 images."""
    return MixtureConfig(name="cnmm_b6s3")


@register_model
def cnmm_b12s3() -> MixtureConfig:
    """The paper's larger CIFAR model: 12 blocks, 3 scales, 64 channels, 32x32 images."""
    return MixtureConfig(name="cnmm_b12s3", blocks=12)


@register_model
def cnmm_seg_b5s5() -> MixtureConfig:
    """The paper's Cityscapes model: segmentation, 5 blocks, 5 scales, 48 channels, 512x1024 images."""
    return MixtureConfig(
        name="cnmm_seg_b5s5",
        task="segmentation",
        blocks=5,
        scales=5,
        channels=48,
        num_classes=19,
        stem_stride=4,
        input_size=(512, 1024),
    )


@register_model
def cnmm_b5s4() -> MixtureConfig:
    """Photos of 224 pixels: 5 blocks, 4 scales, 64 channels, stem stride 4."""
    return MixtureConfig(name="cnmm_b5s4", blocks=5, scales=4, stem_stride=4, input_size=(224, 224))


@register_model
def cnmm_b4s3() -> MixtureConfig:
    """Training on a CPU in minutes: 4 blocks, 3 scales, 64 channels, stem stride 2, 32x32 images."""
    return MixtureConfig(name="cnmm_b4s3", blocks=4, stem_stride=2, gate_init="uniform")


@register_model
def cnmm_b4s3_c32() -> MixtureConfig:
    """As many macs at full resolution: 4 blocks, 3 scales, 32 channels, 32x32 images."""
    return MixtureConfig(name="cnmm_b4s3_c32", blocks=4, channels=32)


@register_model
def cnmm_grey() -> MixtureConfig:
    """Small grey images: 4 blocks, 3 scales, 32 channels, stem stride 2, 28x28 images."""
    return MixtureConfig(
        name="cnmm_grey",
        blocks=4,
        channels=32,
        in_chans=1,
        stem_stride=2,
        input_size=(28, 28),
        gate_init="uniform",
    )


@register_model
def cnmm_full8() -> MixtureConfig:
    """The full DAG of section 3: each of 8 maps feeds all later ones, 128 channels, stem stride 4, 32x32 images."""
    return MixtureConfig(name="cnmm_full8", blocks=8, scales=1, channels=128, stem_stride=4, gate_init="uniform")


@register_model
def cnmm_tiny() -> MixtureConfig:
    """Tests and the demo: 3 blocks, 2 scales, 16 channels, 28x28 grey images."""
    return MixtureConfig(name="cnmm_tiny", blocks=3, scales=2, channels=16, in_chans=1, input_size=(28, 28))


@register_model
def cnmm_seg_tiny() -> MixtureConfig:
    """Tests and the demo: segmentation, 2 blocks, 3 scales, 16 channels, 64x64 images."""
    return MixtureConfig(
        name="cnmm_seg_tiny",
        task="segmentation",
        blocks=2,
        scales=3,
        channels=16,
        num_classes=5,
        stem_stride=4,
        input_size=(64, 64),
    )
