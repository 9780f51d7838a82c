"""Convolutional Neural Mixture Models: train one network, then run it at any compute budget."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cnmm._errors import UserError
    from cnmm.budget import Budget
    from cnmm.chain import Chain
    from cnmm.config import MixtureConfig, Preprocessing
    from cnmm.cost import CostTable
    from cnmm.evaluation.measure import measure
    from cnmm.export.ladder import export_ladder
    from cnmm.export.network import export_onnx
    from cnmm.export.slim import load_slim, save_slim, slim
    from cnmm.frontier import Frontier
    from cnmm.lattice import Lattice, OperatingPoint
    from cnmm.mixture import Mixture
    from cnmm.prune import cutting_order, named_point
    from cnmm.run import Run
    from cnmm.run_folder import load, save
    from cnmm.run_training import train
    from cnmm.runtime.answers import Prediction
    from cnmm.runtime.bench import bench
    from cnmm.runtime.session import Session
    from cnmm.zoo import create_model, list_models, model_plan, register_model

__version__ = "0.1.0"

__all__ = [
    "Budget",
    "Chain",
    "CostTable",
    "Frontier",
    "Lattice",
    "Mixture",
    "MixtureConfig",
    "OperatingPoint",
    "Prediction",
    "Preprocessing",
    "Run",
    "Session",
    "UserError",
    "bench",
    "create_model",
    "cutting_order",
    "export_ladder",
    "export_onnx",
    "list_models",
    "load",
    "load_slim",
    "measure",
    "model_plan",
    "named_point",
    "register_model",
    "save",
    "save_slim",
    "slim",
    "train",
]

_HOMES = {
    "Budget": "budget",
    "Chain": "chain",
    "CostTable": "cost",
    "Frontier": "frontier",
    "Lattice": "lattice",
    "Mixture": "mixture",
    "MixtureConfig": "config",
    "OperatingPoint": "lattice",
    "Prediction": "runtime.answers",
    "Preprocessing": "config",
    "Run": "run",
    "Session": "runtime.session",
    "UserError": "_errors",
    "bench": "runtime.bench",
    "create_model": "zoo",
    "cutting_order": "prune",
    "export_ladder": "export.ladder",
    "export_onnx": "export.network",
    "list_models": "zoo",
    "load": "run_folder",
    "load_slim": "export.slim",
    "measure": "evaluation.measure",
    "model_plan": "zoo",
    "named_point": "prune",
    "register_model": "zoo",
    "save": "run_folder",
    "save_slim": "export.slim",
    "slim": "export.slim",
    "train": "run_training",
}
"""Where each public name lives: its module is imported when the name is first used."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'cnmm' has no attribute {name!r}")
    try:
        return getattr(import_module(f"cnmm.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "safetensors", "matplotlib", "onnx"):
            raise
        from cnmm._errors import INSTALL_TRAIN, UserError

        raise UserError(f"cnmm.{name} needs {error.name}; install it with: {INSTALL_TRAIN}") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
