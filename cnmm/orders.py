"""Cutting orders that were measured: `orders.json` of a run folder. Torch-free.

Orders by flow are a function of the gates; an order by damage depends on images and on the weights of its time, so it
is data that belongs to the run. The points of a frontier that carry the letter d are points of these orders.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cnmm import _fields
from cnmm._errors import UserError
from cnmm._files import check_version, write_json
from cnmm.config import MixtureConfig
from cnmm.lattice import Orders, build_lattice
from cnmm.prune import follow_cuts

ORDERS_FILE = "orders.json"


def save_orders(folder: str | Path, orders: Orders) -> None:
    """Writes the orders of a run, in one step."""
    entries = [{"exit": exit, "cuts": [list(edge) for edge in cuts]} for exit, cuts in sorted(orders.items())]
    write_json(Path(folder) / ORDERS_FILE, {"rule": "damage", "orders": entries})


def load_orders(folder: str | Path, config: MixtureConfig) -> Orders | None:
    """The orders of a run, if some were measured. Every field is checked, and that they are orders of this model."""
    path = Path(folder) / ORDERS_FILE
    try:
        return _read(json.loads(path.read_text("utf-8")), config)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        words = " ".join(str(error).split())
        raise UserError(
            f"{path}: cannot be read as cutting orders: {words}; remove it, and measure again: cnmm frontier {folder}"
        ) from None


def _read(data: Any, config: MixtureConfig) -> Orders:
    if not isinstance(data, Mapping):
        raise UserError("it must be an object with 'rule' and 'orders'")
    check_version(data)
    _fields.get(data, "rule", _fields.one_of("damage"))
    orders: dict[int, tuple[tuple[int, int], ...]] = {}
    for number, entry in enumerate(_fields.get(data, "orders", _fields.list_of(_fields.OBJECT))):
        where = f"orders[{number}]."
        exit = _fields.get(entry, "exit", _fields.one_of(*config.exit_numbers), where)
        cuts = _fields.get(entry, "cuts", _fields.list_of(_fields.list_of(_fields.COUNT, 2)), where)
        orders[exit] = tuple((i, j) for i, j in cuts)
        follow_cuts(build_lattice(config), exit, orders[exit])
    missing = sorted(set(config.exit_numbers) - orders.keys())
    if missing:
        raise UserError(f"exit {missing[0]} has no order")
    return orders
