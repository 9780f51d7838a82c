"""A model without its weights, and the way to the modules that need torch. Torch-free."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cnmm._errors import INSTALL_TRAIN, UserError
from cnmm.chain import Chain, initial_logits
from cnmm.config import MixtureConfig
from cnmm.lattice import Orders, build_lattice


@dataclass(frozen=True)
class Plan:
    """A model without its weights: its config and its distribution over networks. Needs no torch."""

    config: MixtureConfig
    logits: tuple[float, ...] | None = None
    """Trained gate logits; None: those before training."""
    orders: Orders | None = dataclasses.field(default=None, compare=False)
    """Measured cutting orders, if there are any."""

    @cached_property
    def chain(self) -> Chain:
        lattice = build_lattice(self.config)
        return Chain(lattice, self.logits or initial_logits(lattice, self.config.gate_init))


def require_torch() -> Any:
    """The module that needs torch, or one line that says how to install it."""
    try:
        from cnmm import mixture
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise UserError(f"this needs torch, which is not installed; install it with: {INSTALL_TRAIN}") from None
    return mixture
