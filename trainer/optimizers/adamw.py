"""Makes AdamW from optax's parts."""

import optax

from configs.spec import Fraction, NotNegative, Positive, spec
from layouts.layout import Layout
from trainer.optimizers import chain
from trainer.optimizers.optimizer import FloatType, Infos, OptimizerSpec
from trainer.optimizers.schedules import Cosine, ScheduleSpec


@spec
class AdamW(OptimizerSpec):
    """Uses Adam with decoupled weight decay.  Loshchilov and Hutter 2019, algorithm 2."""

    schedule: ScheduleSpec = Cosine()
    beta1: Fraction = 0.9
    """Decay of the first moment."""
    beta2: Fraction = 0.98
    """Decay of the second moment."""
    epsilon: Positive = 1e-8
    """Added to the root of the second moment."""
    first_moment: FloatType | None = None
    """Type of the stored first moment. None: the type of the weights."""
    weight_decay: NotNegative = 0.01
    """Each step subtracts this share of each matrix, times the learning rate."""
    clip_global_norm: Positive | None = 1.0
    """Scales all gradients down to this norm if they exceed it."""

    def transform(self, steps: int, weights: Infos, layout: Layout) -> optax.GradientTransformation:
        """Returns the update of all weights.  Padding stays zero by itself."""
        outer = [chain.clip(self.clip_global_norm), self.scaling(weights)]
        return chain.finish(outer, self.weight_decay, self.schedule.rate(steps), weights)

    def scaling(self, weights: Infos) -> optax.GradientTransformation:
        """Returns the update before weight decay and learning rate."""
        return optax.scale_by_adam(self.beta1, self.beta2, self.epsilon, mu_dtype=self.first_moment)
