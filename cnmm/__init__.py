"""Convolutional Neural Mixture Models: train one network, then run it at any compute budget."""

from __future__ import annotations

from cnmm.chain import Chain, to_network, to_sequence
from cnmm.checkpoint import load, save
from cnmm.config import MixtureConfig
from cnmm.cost import Cost, CostTable
from cnmm.lattice import Dag, Lattice, OperatingPoint, full_dag, network_point
from cnmm.prune import cutting_order, named_point
from cnmm.zoo import create_model, list_models, model_plan, register_model

__version__ = "0.1.0"

__all__ = [
    "Chain",
    "Cost",
    "CostTable",
    "Dag",
    "Lattice",
    "MixtureConfig",
    "OperatingPoint",
    "create_model",
    "cutting_order",
    "full_dag",
    "list_models",
    "load",
    "model_plan",
    "named_point",
    "network_point",
    "register_model",
    "save",
    "to_network",
    "to_sequence",
]
