"""The task of a model: what its loss, its targets and its quality are."""

from __future__ import annotations

from cnmm.config import MixtureConfig
from cnmm.evaluation.classification import Classification
from cnmm.evaluation.quality import Task
from cnmm.evaluation.segmentation import Segmentation


def task_of(config: MixtureConfig) -> Task:
    """The task of a model."""
    return Classification() if config.task == "classification" else Segmentation()
