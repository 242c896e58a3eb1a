"""AdamW, of optax's parts."""

import optax

from configs.spec import Fraction, NotNegative, Positive, spec
from trainer.optimizers.optimizer import NOT_PADDED, OptimizerSpec, Shapes, clip, finish
from trainer.optimizers.schedules import Cosine, ScheduleSpec


@spec
class AdamW(OptimizerSpec):
    """Makes Adam with decoupled weight decay.  Loshchilov and Hutter 2019, algorithm 2."""

    schedule: ScheduleSpec = Cosine()
    beta1: Fraction = 0.9
    beta2: Fraction = 0.98
    epsilon: Positive = 1e-8
    weight_decay: NotNegative = 0.01
    clip_global_norm: Positive | None = 1.0

    def transform(self, steps: int, padded: Shapes = NOT_PADDED) -> optax.GradientTransformation:
        """Returns the update of all weights.  Padding stays zero by itself."""
        adam = optax.scale_by_adam(self.beta1, self.beta2, self.epsilon)
        outer = [clip(self.clip_global_norm), adam]
        return finish(outer, self.weight_decay, self.schedule, steps)
