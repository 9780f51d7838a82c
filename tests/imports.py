"""Who imports whom in the package, by room: `python -m tests.imports` draws the graph by level."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "cnmm"

PRIVATE = {"_errors", "_fields", "_files", "_lock", "_machine", "_onnx", "_progress", "palette"}
PAPER = {
    "config",
    "lattice",
    "chain",
    "cost",
    "prune",
    "orders",
    "plan",
    "pretrained",
    "distributed",
    "rows",
    "pixels",
    "fused",
    "blocks",
    "mixture",
    "zoo",
    "draw",
    "run_folder",
}
VALUES = {"budget", "cascade", "frontier", "ladder", "pictures"}
RUN = {"run", "run_exporting", "run_held_out", "run_images", "run_measuring", "run_training"}
BELOW_EVALUATION = {"private", "paper", "values", "data"}
MAY_IMPORT = {
    "private": set(),
    "paper": {"private"},
    "values": {"private", "paper"},
    "data": {"private"},
    "evaluation": BELOW_EVALUATION,
    "training": BELOW_EVALUATION | {"evaluation"},
    "export": BELOW_EVALUATION | {"evaluation", "training"},
    "runtime": {"private", "values", "data"},
    "serve": {"private", "values", "data", "runtime"},
    "run": BELOW_EVALUATION | {"evaluation", "training", "export", "runtime"},
    "cli": BELOW_EVALUATION | {"evaluation", "training", "export", "runtime", "serve", "run"},
}
"""The rooms that a room may import, besides itself, at the top of a module or inside a function.

`__init__` and `__main__` are the front door: they hand out what the rooms hold.
"""
WITHOUT_TORCH = {"private", "values", "data", "runtime", "serve", "cli"}
TORCH_FREE_PAPER = PAPER - {"distributed", "rows", "pixels", "fused", "blocks", "mixture"}
HEAVY = {"torch", "matplotlib", "safetensors", "onnx", "onnxruntime", "openvino"}


@functools.cache
def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name inside it."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = path
    return found


def room(module: str) -> str:
    """The room of a module."""
    first = module.split(".")[0]
    for name, members in (("private", PRIVATE), ("paper", PAPER), ("values", VALUES), ("run", RUN)):
        if first in members:
            return name
    return first


@functools.cache
def imports(path: Path, *, top_level_only: bool = False) -> set[str]:
    """Everything that a file imports, as dotted names; names for annotations only do not count at the top level."""
    tree = ast.parse(path.read_text("utf-8"))
    found: set[str] = set()
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return found


@functools.cache
def edges() -> dict[str, set[str]]:
    """For every module of the package, the modules of the package that it imports."""
    known = modules()
    graph = {}
    for module, path in known.items():
        inside = {name.removeprefix("cnmm.") for name in imports(path) if name.startswith("cnmm.")}
        graph[module] = {name for name in inside if name in known and name != module}
    return graph


def levels() -> list[list[str]]:
    """Modules by level: each imports only from the levels before its own. A ValueError names a cycle."""
    left = {name: set(targets) for name, targets in edges().items() if not name.startswith("__")}
    result = []
    done: set[str] = set()
    while left:
        ready = sorted(name for name, targets in left.items() if targets <= done)
        if not ready:
            raise ValueError(f"a cycle among {sorted(left)}")
        result.append(ready)
        done.update(ready)
        for name in ready:
            del left[name]
    return result


if __name__ == "__main__":
    for number, names in enumerate(levels()):
        print(f"{number:2}  {'  '.join(names)}")
