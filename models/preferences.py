"""Trains a model to prefer one answer to another (DPO, Rafailov et al. 2023)."""

import functools
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jax import Array
from pydantic import Field

from configs.spec import spec
from layouts.layout import Layout
from models.api import Frozen
from models.loss import Criterion, LogitOperands, LossSums, token_losses


@spec
class Dpo(Frozen):
    """Raises the likelihood of preferred answers over rejected ones, relative to a reference model,
    usually the one that the run starts from (DPO).

    The task must be a @PreferenceTask().  The loss is -log sigmoid(margin).  The accuracy is the
    share of positive margins.  Both are means over preferences; the metric `tokens` counts
    preferences.
    """

    beta: Annotated[float, Field(gt=0, le=100)] = 0.1
    """Scale of the margin: the gain in log-probability over the reference model, of the preferred
    minus the rejected answer. Smaller values let the model move further from the reference."""

    def criterion_fields(self) -> dict[str, Any]:
        return {"dpo_beta": self.beta}


def preference_loss(
    layout: Layout,
    criterion: Criterion,
    policy: LogitOperands,
    reference: LogitOperands,
    targets_BL: Array,
    counted_BL: Array,
    segments_BL: Array,
) -> LossSums:
    """Sums the loss over the preferences of a batch; segments 2n - 1 and 2n form one preference.

    Logits are not computed in slices: those of the whole batch exist at the same time.
    """
    assert criterion.dpo_beta is not None

    @functools.partial(jax.checkpoint, static_argnums=1)
    def log_p(output: LogitOperands, cap: float | None) -> Array:
        return -token_losses(layout, output, targets_BL, counted_BL, cap).loss_BL

    gain_BL = log_p(policy, criterion.logit_cap)
    gain_BL -= jax.lax.stop_gradient(log_p(reference, criterion.teacher_cap))
    is_chosen_BL = segments_BL % 2 == 1
    # With stages, a row holds the segments of several microbatches one after another.
    gain_Bl = layout.reshard(jnp.where(is_chosen_BL, gain_BL, -gain_BL), "Bl")
    segments_Bl = layout.reshard(segments_BL, "Bl")
    before_Bl = jnp.pad(segments_Bl[:, :-1], ((0, 0), (1, 0)))
    after_Bl = jnp.pad(segments_Bl[:, 1:], ((0, 0), (0, 1)))
    is_odd_Bl = segments_Bl % 2 == 1
    begins_Bl = is_odd_Bl & (before_Bl != segments_Bl)
    ends_Bl = ~is_odd_Bl & (segments_Bl > 0) & (after_Bl != segments_Bl)

    def add(left: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[Array, Array]:
        return left[0] | right[0], jnp.where(right[0], 0, left[1]) + right[1]

    _, margin_Bl = jax.lax.associative_scan(add, (begins_Bl, gain_Bl), axis=1)
    counts_Bl = ends_Bl.astype(float)
    loss = jnp.sum(counts_Bl * jax.nn.softplus(-criterion.dpo_beta * margin_Bl))
    correct = jnp.sum(jnp.where(margin_Bl > 0, counts_Bl, 0))
    return LossSums(objective=loss, loss=loss, correct=correct, tokens=jnp.sum(counts_Bl))
