"""Cross entropy over a vocabulary, in slices whose gradients are made on the way forward."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from layouts.layout import Layout

Array = jax.Array


class Sums(NamedTuple):
    """Sums over tokens; divided once, after all microbatches and devices are added."""

    objective: Array  # what is minimised: smoothed cross entropy and z-loss
    loss: Array  # plain cross entropy, natural logarithm
    correct: Array  # tokens whose target had the largest logit
    tokens: Array

    def __add__(self, other: object) -> "Sums":
        assert isinstance(other, Sums)
        return Sums(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


@dataclasses.dataclass(frozen=True)
class Criterion:
    """What the loss is made of.  Hashable: part of the jit key."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    logit_scale: float = 1.0


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def softmax_loss(
    layout: Layout,
    criterion: Criterion,
    chunks: int,
    x_BLD: Array,
    softmax_VD: Array,
    targets_BL: Array,
    counted_BL: Array,
) -> Sums:
    """Sums of the loss over the counted tokens of softmax(x softmax_VD^T) against the targets.

    With label smoothing e the target's share is 1 - e, and e is spread evenly over all tokens;
    z-loss adds z * (log sum exp)^2 (Mesh-TensorFlow's softmax_cross_entropy_with_logits).
    """
    length, parts = _slices(layout, chunks, x_BLD, targets_BL, counted_BL)
    sums = [_forward(layout, criterion, length, softmax_VD, *part)[0] for part in parts]
    return functools.reduce(Sums.__add__, sums)


def token_losses(
    layout: Layout, x_BLD: Array, softmax_VD: Array, targets_BL: Array, counted_BL: Array
) -> Array:
    """Negative log-likelihood of each counted target; 0 elsewhere."""
    logits_BLV = layout.einsum("BLD,VD->BLV", x_BLD, softmax_VD, dtype=jnp.float32)
    hit_BLV = layout.iota("BLV", logits_BLV.shape, "V") == layout.align(targets_BL, "BL", "BLV")
    gold_BL = jnp.sum(jnp.where(hit_BLV, logits_BLV, 0), axis=-1)
    loss_BL = layout.to(jax.nn.logsumexp(logits_BLV, axis=-1) - gold_BL, "BL")
    return jnp.where(counted_BL, loss_BL, 0)


def _with_gradients(
    layout: Layout,
    criterion: Criterion,
    chunks: int,
    x_BLD: Array,
    softmax_VD: Array,
    targets_BL: Array,
    counted_BL: Array,
) -> tuple[Sums, tuple[Array, Array]]:
    """The sums, and the objective's gradients by x and by the softmax weights."""
    length, parts = _slices(layout, chunks, x_BLD, targets_BL, counted_BL)
    sums, dx_BLDs, dsoftmax_VDs = [], [], []
    for x_BLD_part, *targets in parts:
        part, dlogits_BLV = _forward(layout, criterion, length, softmax_VD, x_BLD_part, *targets)
        dlogits_BLV = dlogits_BLV.astype(x_BLD.dtype)
        sums.append(part)
        dx_BLDs.append(layout.einsum(f"B{length}V,VD->B{length}D", dlogits_BLV, softmax_VD))
        dsoftmax_VDs.append(layout.einsum("BLV,BLD->VD", dlogits_BLV, x_BLD_part, stored=True))
    dx_BLD = layout.to(jnp.concatenate(dx_BLDs, axis=1), "BLD")
    return functools.reduce(Sums.__add__, sums), (dx_BLD, sum(dsoftmax_VDs[1:], dsoftmax_VDs[0]))


def _scale_gradients(
    layout: Layout,
    criterion: Criterion,
    chunks: int,
    gradients: tuple[Array, Array],
    cotangent: Sums,
) -> tuple[Array, Array, None, None]:
    dx_BLD, dsoftmax_VD = (g * cotangent.objective.astype(g.dtype) for g in gradients)
    return dx_BLD, dsoftmax_VD, None, None


softmax_loss.defvjp(_with_gradients, _scale_gradients)


def _slices(layout: Layout, chunks: int, *arrays: Array) -> tuple[str, list[tuple[Array, ...]]]:
    """The rows cut along their length, and the letter of that axis: whole where it is cut."""
    if chunks == 1:
        return "L", [arrays]
    whole = [layout.to(array, "BlD"[: array.ndim]) for array in arrays]
    length = arrays[0].shape[1]
    step = -(-length // chunks)
    return "l", [
        tuple(array[:, start : start + step] for array in whole) for start in range(0, length, step)
    ]


def _forward(
    layout: Layout,
    criterion: Criterion,
    length: str,
    softmax_VD: Array,
    x_BLD: Array,
    targets_BL: Array,
    counted_BL: Array,
) -> tuple[Sums, Array]:
    """The sums of one slice and the objective's gradient by its logits."""
    axes = f"B{length}V"
    logits_BLV = layout.einsum(f"B{length}D,VD->{axes}", x_BLD, softmax_VD, dtype=jnp.float32)
    logits_BLV = logits_BLV * criterion.logit_scale
    target_BL1 = layout.align(targets_BL, axes[:2], axes)
    counted_BL1 = layout.align(counted_BL, axes[:2], axes).astype(jnp.float32)
    hit_BLV = layout.iota(axes, logits_BLV.shape, "V") == target_BL1

    top_BL1 = jnp.max(logits_BLV, axis=-1, keepdims=True)
    exp_BLV = jnp.exp(logits_BLV - top_BL1)
    sum_BL1 = jnp.sum(exp_BLV, axis=-1, keepdims=True)
    log_z_BL1 = jnp.log(sum_BL1) + top_BL1
    gold_BL1 = jnp.sum(jnp.where(hit_BLV, logits_BLV, 0), axis=-1, keepdims=True)
    loss_BL1 = log_z_BL1 - gold_BL1
    objective_BL1 = loss_BL1 + criterion.z_loss * jnp.square(log_z_BL1)
    smooth = criterion.label_smoothing
    if smooth:
        objective_BL1 += smooth * (gold_BL1 - jnp.mean(logits_BLV, axis=-1, keepdims=True))
    sums = Sums(
        objective=jnp.sum(objective_BL1 * counted_BL1),
        loss=jnp.sum(loss_BL1 * counted_BL1),
        correct=jnp.sum(jnp.where(gold_BL1 >= top_BL1, counted_BL1, 0)),
        tokens=jnp.sum(counted_BL1),
    )

    pull_BL1 = counted_BL1 * (1 + 2 * criterion.z_loss * log_z_BL1) / sum_BL1
    wanted_BLV = jnp.where(hit_BLV, 1 - smooth, 0.0) + smooth / logits_BLV.shape[-1]
    dlogits_BLV = exp_BLV * pull_BL1 - wanted_BLV * counted_BL1
    return sums, dlogits_BLV * criterion.logit_scale
