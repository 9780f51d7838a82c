"""Cutting orders that were measured: `orders.json` of a run folder. Torch-free.

Orders by flow are a function of the gates; an order by damage depends on images and on the weights of its time, so it
is data that belongs to the run. The points of a frontier that carry the letter d are points of these orders.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cnmm import _fields
from cnmm._errors import UserError
from cnmm._files import inside, read_json, write_json
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
    path, fix = Path(folder) / ORDERS_FILE, f"remove it, and measure again: cnmm frontier {folder}"
    try:
        data = read_json(path, fix=fix)
    except FileNotFoundError:
        return None
    with inside(path, fix):
        return _read(data, config)


def _read(data: Mapping[str, Any], config: MixtureConfig) -> Orders:
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
