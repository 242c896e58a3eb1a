"""Defines the settings that all optimizers share.

optax, and flax with it, load when an optimizer makes its transform, so that settings load fast.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from configs.spec import abstract_spec
from trainer.optimizers.schedules import ScheduleSpec

if TYPE_CHECKING:
    import optax

Shapes = Mapping[str, tuple[int, ...]]
"""The true shape of each weight that has padding, by its path."""
NOT_PADDED: Shapes = {}


@abstract_spec
class OptimizerSpec:
    """Holds the settings of an optimizer; a run file names one of its kinds."""

    schedule: ScheduleSpec

    def transform(self, steps: int, padded: Shapes = NOT_PADDED) -> "optax.GradientTransformation":
        """Returns the update of all weights in a run of so many steps."""
        raise NotImplementedError
