"""Convolutional Neural Mixture Models: train one network, then run it at any compute budget."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cnmm.chain import Chain, to_network, to_sequence
from cnmm.config import MixtureConfig
from cnmm.cost import Cost, CostTable
from cnmm.lattice import Dag, Lattice, OperatingPoint, full_dag, network_point
from cnmm.prune import cutting_order, named_point
from cnmm.run_folder import load, save
from cnmm.zoo import create_model, list_models, model_plan, register_model

if TYPE_CHECKING:
    from cnmm.evaluation.measure import measure
    from cnmm.export.ladder import export_ladder
    from cnmm.export.network import export_onnx
    from cnmm.export.slim import SlimNetwork, load_slim, save_slim, slim
    from cnmm.frontier import Frontier
    from cnmm.runtime.session import Prediction, Session

__version__ = "0.1.0"

__all__ = [
    "Chain",
    "Cost",
    "CostTable",
    "Dag",
    "Frontier",
    "Lattice",
    "MixtureConfig",
    "OperatingPoint",
    "Prediction",
    "Session",
    "SlimNetwork",
    "create_model",
    "cutting_order",
    "export_ladder",
    "export_onnx",
    "full_dag",
    "list_models",
    "load",
    "load_slim",
    "measure",
    "model_plan",
    "named_point",
    "network_point",
    "register_model",
    "save",
    "save_slim",
    "slim",
    "to_network",
    "to_sequence",
]

_LATER = {
    "Frontier": "frontier",
    "Prediction": "runtime.session",
    "Session": "runtime.session",
    "SlimNetwork": "export.slim",
    "export_ladder": "export.ladder",
    "export_onnx": "export.network",
    "load_slim": "export.slim",
    "measure": "evaluation.measure",
    "save_slim": "export.slim",
    "slim": "export.slim",
}
"""Names that need numpy or torch, and the module that has them: imported when they are first used."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'cnmm' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"cnmm.{_LATER[name]}"), name)
