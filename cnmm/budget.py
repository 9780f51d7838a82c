"""Budgets as people write them: `60M` macs, `25ms`, `40%` of the full mixture, `acc:0.92`. Torch-free.

Macs are multiply-adds for one image; milliseconds are the 95th percentile measured on this machine at batch 1; a
quality is a share between 0 and 1 of the metric that its prefix names.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from numbers import Real
from typing import Literal

from cnmm import _fields
from cnmm._errors import UserError

BudgetKind = Literal["macs", "ms", "percent", "quality"]

METRICS = {"acc": "accuracy", "mca": "mean_class_accuracy", "miou": "miou", "pix": "pixel_accuracy"}
"""The metric that each prefix of a quality stands for."""
EXAMPLES = "60M, 1.5G or 800k (macs), 25ms, 40% (of the full mixture's macs), acc:0.92 or miou:0.55"

_NUMBER = r"([0-9]+(?:\.[0-9]*)?|[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+(?:_[0-9]+)+|\.[0-9]+)"
_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a network may cost, or how good it has to be."""

    kind: BudgetKind
    value: float
    """Macs, milliseconds, percent of the full mixture's macs, or a quality between 0 and 1."""
    text: str
    """As it was written, for messages."""
    metric: str | None = None
    """Of a quality: accuracy, mean_class_accuracy, miou or pixel_accuracy."""


def prefix_of(metric: str) -> str:
    """How budgets spell a metric."""
    return next((prefix for prefix, name in METRICS.items() if name == metric), metric)


def parse_budget(text: object) -> Budget:
    """A budget from its text; a plain number means macs."""
    if isinstance(text, Budget):
        return text
    text = _fields.plain(text)
    if isinstance(text, bool) or not isinstance(text, str | Real):
        raise UserError(f"budget {_fields.shown(text)}: must look like {EXAMPLES}")
    if not isinstance(text, str):
        try:
            macs = float(text)
        except OverflowError:
            macs = math.inf
        if not (math.isfinite(macs) and macs > 0):
            raise UserError(f"budget {_fields.shown(text)}: macs must be positive and finite; other forms: {EXAMPLES}")
        return Budget(kind="macs", value=macs, text=str(text))
    plain = text.strip().lower()
    if match := re.fullmatch(rf"{_NUMBER} ?([kmg]?)", plain):
        return _checked("macs", float(_decimal(match[1]) * _FACTORS[match[2]]), text)
    if match := re.fullmatch(rf"{_NUMBER} ?ms", plain):
        return _checked("ms", float(_decimal(match[1])), text)
    if match := re.fullmatch(rf"{_NUMBER} ?%", plain):
        return _checked("percent", float(_decimal(match[1])), text)
    if match := re.fullmatch(rf"({'|'.join(METRICS)}):{_NUMBER}", plain):
        return _checked("quality", float(_decimal(match[2])), text, METRICS[match[1]])
    raise UserError(f"budget {text!r}: must look like {EXAMPLES}")


def _decimal(digits: str) -> Decimal:
    return Decimal(digits.replace(",", "").replace("_", ""))


def _checked(kind: BudgetKind, value: float, text: str, metric: str | None = None) -> Budget:
    if kind == "quality":
        if value > 1:
            raise UserError(f"budget {text!r}: a quality must be between 0 and 1; try {text.partition(':')[0]}:0.92")
    elif value == 0:
        raise UserError(f"budget {text!r}: must be greater than zero, for example {EXAMPLES}")
    elif not math.isfinite(value):
        raise UserError(f"budget {text!r}: must be finite, for example {EXAMPLES}")
    return Budget(kind=kind, value=value, text=text.strip(), metric=metric)
