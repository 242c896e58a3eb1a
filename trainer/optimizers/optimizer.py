"""Defines the settings that all optimizers share."""

import abc
from collections.abc import Mapping
from typing import Literal

import optax

from configs.spec import abstract_spec
from layouts.layout import Layout
from models.api import WeightInfo
from trainer.optimizers.schedules import ScheduleSpec

FloatType = Literal["float32", "bfloat16"]
Infos = Mapping[str, WeightInfo]
"""Infos of weights, by path."""


@abstract_spec
class OptimizerSpec(abc.ABC):
    """Holds the settings of an optimizer; a run file names one of its kinds."""

    schedule: ScheduleSpec
    """Learning rate over steps."""

    @abc.abstractmethod
    def transform(self, steps: int, weights: Infos, layout: Layout) -> optax.GradientTransformation:
        """Returns the update of these weights, by path, in a run of this many steps."""
