"""Makes Adafactor from its settings and parts."""

import jax
import jax.numpy as jnp
import optax

from configs.errors import UserError
from configs.spec import Fraction, NotNegative, Positive, spec
from layouts.layout import Layout
from trainer.optimizers import chain, factored
from trainer.optimizers.optimizer import FloatType, Infos, OptimizerSpec
from trainer.optimizers.schedules import InverseSqrt, ScheduleSpec


@spec
class Adafactor(OptimizerSpec):
    """Makes Adafactor with the papers' settings.  Shazeer and Stern 2018, algorithms 4 to 7."""

    schedule: ScheduleSpec = InverseSqrt()
    decay_exponent: Positive = 0.8
    """The second moment's decay at step t is 1 - t^-exponent."""
    decay_cap: Fraction | None = None
    """Upper bound of the decay (GShard: 0.99)."""
    momentum: Fraction | None = None
    """Decay of the first moment. None: no first moment."""
    first_moment: FloatType | None = None
    """Type in which the first moment is stored; None: that of the weights."""
    clip_update_rms: Positive = 1.0
    """Scales an update down to this root mean square if it is larger."""
    multiply_by_parameter_scale: bool = True
    """Multiplies an update by the root mean square of its weight, at least 0.001."""
    factored_from: int = 128
    """A second moment is factored when its two longest axes are at least this long."""
    weight_decay: NotNegative = 0.0
    """Share of each matrix that a step subtracts, times the learning rate."""
    clip_global_norm: Positive | None = None
    """Scales all gradients down to this norm if they exceed it."""

    def __post_init__(self) -> None:
        if self.first_moment is not None and self.momentum is None:
            raise UserError("Adafactor.first_moment: there is none.  Set Adafactor.momentum.")

    def transform(self, steps: int, weights: Infos, layout: Layout) -> optax.GradientTransformation:
        """Returns the update of these weights, by path; their shapes here have no padding."""
        scaling = factored.FactoredScaling(self.decay, self.factored_from, weights)
        parts = [
            optax.GradientTransformation(scaling.init, scaling.update),
            factored.clip_by_rms(self.clip_update_rms, weights),
        ]
        if self.multiply_by_parameter_scale:
            parts.append(factored.scale_by_weight_rms(1e-3, weights))
        outer = [chain.clip(self.clip_global_norm), chain.by_path(optax.chain(*parts))]
        if self.momentum is not None:
            outer.append(optax.ema(self.momentum, False, self.first_moment))
        return chain.finish(outer, self.weight_decay, self.schedule.rate(steps), weights)

    def decay(self, step: jax.Array) -> jax.Array:
        """Returns the decay of the second moment at a step, counted from 0.  Section 7.2."""
        plain = 1.0 - (step + 1.0) ** -self.decay_exponent
        return plain if self.decay_cap is None else jnp.minimum(plain, self.decay_cap)
