"""Budgets as people write them: `60M` macs, `25ms`, `40%` of the full mixture, `acc:0.92`. Torch-free.

Macs are multiply-adds for one image; milliseconds are the 95th percentile measured on this machine at batch 1; a
quality is a share between 0 and 1.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

from cnmm._errors import UserError

BudgetKind = Literal["macs", "ms", "percent", "quality"]

ALLOWED = "60M, 1.5G or 800k (macs), 25ms, 40% (of the full mixture's macs), acc:0.92 or miou:0.55"

_NUMBER = r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a network may cost, or how good it has to be."""

    kind: BudgetKind
    value: float
    """Macs, milliseconds, percent of the full mixture's macs, or a quality between 0 and 1."""
    text: str
    """As it was written, for messages."""


def parse_budget(text: str | int | float | Budget) -> Budget:
    """A budget from its text; a plain number means macs."""
    if isinstance(text, Budget):
        return text
    if isinstance(text, bool) or not isinstance(text, str | int | float):
        raise UserError(f"budget {text!r}: allowed are {ALLOWED}")
    if not isinstance(text, str):
        if not (math.isfinite(text) and text > 0):
            raise UserError(f"budget {text!r}: a positive number of macs is needed; allowed are {ALLOWED}")
        return Budget(kind="macs", value=text, text=str(text))
    plain = text.strip().lower().replace(",", "").replace("_", "")
    if match := re.fullmatch(rf"{_NUMBER} ?([kmg]?)", plain):
        return _checked("macs", float(Decimal(match[1]) * _FACTORS[match[2]]), text)
    if match := re.fullmatch(rf"{_NUMBER} ?ms", plain):
        return _checked("ms", float(match[1]), text)
    if match := re.fullmatch(rf"{_NUMBER} ?%", plain):
        return _checked("percent", float(match[1]), text)
    if match := re.fullmatch(rf"(?:acc|miou):{_NUMBER}", plain):
        return _checked("quality", float(match[1]), text)
    raise UserError(f"budget {text!r}: allowed are {ALLOWED}")


def _checked(kind: BudgetKind, value: float, text: str) -> Budget:
    if kind == "quality":
        if value > 1:
            raise UserError(f"budget {text!r}: a quality lies between 0 and 1; try {text.partition(':')[0]}:0.92")
    elif value == 0:
        raise UserError(f"budget {text!r}: nothing costs nothing; allowed are {ALLOWED}")
    return Budget(kind=kind, value=value, text=text.strip())
