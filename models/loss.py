"""Computes cross entropy in slices, with gradients computed in the forward pass."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from layouts.layout import Layout
from layouts.reduction import scaled, zero_gradient
from layouts.shards import spec_of
from models.attention.plain import capped


class LossSums(NamedTuple):
    """Holds sums over tokens, to be divided once all microbatches and devices are added."""

    objective: Array  # what is minimized: smoothed cross entropy and z-loss
    loss: Array  # plain cross entropy, natural logarithm
    correct: Array  # tokens whose target had the largest logit
    tokens: Array
    loads: Any = ()  # of the experts, by stack; sums as well
    router_objectives: Mapping[str, Array] = {}
    """Losses of the routers of each stack, summed over all of its tokens."""

    def total_objective(self, weights: Mapping[str, Array]) -> Array:
        """Returns the objective plus the losses of routers, each times the weight of its stack."""
        weighted = (weights[stack] * total for stack, total in self.router_objectives.items())
        return sum(weighted, start=self.objective)


def token_weights(batch: Mapping[str, Array]) -> dict[str, Array]:
    """Returns the ratio of counted targets to tokens of each stack, in a full batch.

    Sums over tokens times these weights, divided by the targets, are means over tokens, with any
    number of microbatches.
    """
    targets = jnp.sum(counted_targets(batch), dtype=float)
    stacks = {"decoder": batch["segments_BL"]} if "loss_mask_BL" in batch else {}
    stacks |= {"encoder": batch["segments_BM"]} if "segments_BM" in batch else {}
    tokens = {stack: jnp.sum(segments > 0, dtype=float) for stack, segments in stacks.items()}
    weights = {stack: targets / jnp.maximum(count, 1) for stack, count in tokens.items()}
    return {"decoder": jnp.ones(()), **weights}


def counted_targets(batch: Mapping[str, Array]) -> Array:
    """Returns which targets the loss counts: all but padding, or those that a mask selects."""
    counted_BL = batch["segments_BL"] > 0
    return counted_BL & (batch["loss_mask_BL"] > 0) if "loss_mask_BL" in batch else counted_BL


@dataclasses.dataclass(frozen=True)
class Criterion:
    """Holds the settings of the loss.  Hashable: part of the jit key."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    logit_cap: float | None = None
    """Bounds logits softly, before `logit_scale`.  Set by the model."""
    logit_scale: float = 1.0
    r_drop: float = 0.0
    drop_tokens: bool = True
    """Whether experts drop the tokens beyond their capacity."""
    teacher_weight: float = 0.0
    """Weight of the divergence from a teacher's predictions; the usual objective has the rest."""
    temperature: float = 1.0
    """Divides the logits of both models before the divergence."""
    dpo_beta: float | None = None
    """Scale of the margins in an objective of preferences; None: an objective of tokens."""
    teacher_cap: float | None = None
    """Bounds the teacher's logits softly.  Set by the teacher's model."""


CROSS_ENTROPY = Criterion()


class LogitOperands(NamedTuple):
    """Holds the operands whose product is the logits, and the bias of the logits."""

    x_BLD: Array
    softmax_VD: Array
    bias_V: Array | None = None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def softmax_loss(
    layout: Layout,
    criterion: Criterion,
    chunks: int,
    output: LogitOperands,
    targets_BL: Array,
    counted_BL: Array,
    teacher: LogitOperands | None = None,
) -> LossSums:
    """Sums the loss over the counted tokens of softmax(x softmax_VD^T) against the targets.

    With label smoothing e the target's probability is 1 - e, and e is spread over all tokens;
    z-loss adds z * (log sum exp)^2 (Mesh-TensorFlow's softmax_cross_entropy_with_logits).  With a
    teacher, the objective includes T^2 KL(teacher || student), where logits are divided by the
    temperature T (Hinton et al. 2015).  A bias of logits has no gradient.
    """
    return _in_slices(layout, criterion, chunks, output, targets_BL, counted_BL, teacher)[0]


def bounded_logits(layout: Layout, axes: str, output: LogitOperands, cap: float | None) -> Array:
    """Returns logits with axes "BLV" or "BlV", in JAX's float type, softly bounded by a cap."""
    x_BLD, softmax_VD, bias_V = output
    logits = layout.einsum(f"{axes[:2]}D,VD->{axes}", x_BLD, softmax_VD, dtype=float)
    if bias_V is not None:
        logits += layout.broadcast_like(bias_V.astype(float), "V", axes)
    return capped(logits, cap)


Gradients = tuple[Array, Array]  # dx_BLD, of the last hidden states, and dsoftmax_DV


class TokenLosses(NamedTuple):
    """Holds the loss of each counted target, and whether no token is likelier than it."""

    loss_BL: Array  # in nats; 0 where no target is counted
    is_likeliest_BL: Array


def token_losses(
    layout: Layout,
    output: LogitOperands,
    targets_BL: Array,
    counted_BL: Array,
    logit_cap: float | None = None,
) -> TokenLosses:
    """Returns the loss of each counted target, and whether greedy decoding chooses it."""
    logits_BLV = bounded_logits(layout, "BLV", output, logit_cap)
    logits_BLV = layout.mask_padding(logits_BLV, "BLV", "V", -jnp.inf)
    target_BL1 = layout.broadcast_like(targets_BL, "BL", "BLV")
    target_logit_BL1 = layout.take_last(logits_BLV, target_BL1, "BLV")
    loss_BL1 = jax.nn.logsumexp(logits_BLV, axis=-1, keepdims=True) - target_logit_BL1
    is_likeliest_BL1 = target_logit_BL1 >= logits_BLV.max(-1, keepdims=True)
    loss_BL = layout.reshard(loss_BL1[:, :, 0], "BL")
    is_likeliest_BL = layout.reshard(is_likeliest_BL1[:, :, 0], "BL")
    return TokenLosses(jnp.where(counted_BL, loss_BL, 0), is_likeliest_BL & counted_BL)


@jax.named_scope("r_drop")
def divergence(
    layout: Layout,
    criterion: Criterion,
    chunks: int,
    output: LogitOperands,
    other_BLD: Array,
    counted_BL: Array,
) -> Array:
    """Sums the divergence of two predictions of the same target over the counted tokens.

    It is the mean of both Kullback-Leibler divergences (R-drop, Liang et al. 2021, equation 2).
    """
    count, axes, take = _slices(layout, chunks, output.x_BLD, other_BLD, counted_BL)
    axes = f"{axes[:2]}V"

    @jax.checkpoint
    def part(index: Array | int) -> Array:
        first, second, counted = take(index)
        (logits_BLV, probs_BLV), (other_logits_BLV, other_probs_BLV) = (
            _predictions(layout, criterion, axes, output._replace(x_BLD=x)) for x in (first, second)
        )
        # The divisors of the softmaxes cancel, as the differences of probabilities sum to zero.
        apart_BLV = (probs_BLV - other_probs_BLV) * (logits_BLV - other_logits_BLV)
        counted_BL1 = layout.broadcast_like(counted, axes[:2], axes)
        return jnp.sum(jnp.where(counted_BL1, apart_BLV, 0)) / 2

    if count == 1:
        return part(0)
    return jnp.sum(jax.lax.map(part, jnp.arange(count, dtype=jnp.int32)))


def _predictions(
    layout: Layout, criterion: Criterion, axes: str, output: LogitOperands
) -> tuple[Array, Array]:
    """Returns the logits, zero in padding, and the probabilities of one slice."""
    logits_BLV = bounded_logits(layout, axes, output, criterion.logit_cap) * criterion.logit_scale
    probs_BLV = jax.nn.softmax(layout.mask_padding(logits_BLV, axes, "V", -jnp.inf), axis=-1)
    return layout.mask_padding(logits_BLV, axes, "V", 0), probs_BLV


def _with_gradients(
    layout: Layout, criterion: Criterion, chunks: int, *operands: Any
) -> tuple[LossSums, tuple[Array, Array]]:
    """Returns the sums, and the objective's gradients with respect to x and the softmax weights."""
    sums, gradients = _in_slices(layout, criterion, chunks, *operands, gradients=True)
    assert gradients is not None
    dx_BLD, dsoftmax_DV = gradients
    return sums, (dx_BLD, layout.einsum("DV->VD", dsoftmax_DV, stored=True))


def _scale_gradients(
    layout: Layout, criterion: Criterion, chunks: int, gradients: Gradients, cotangent: LossSums
) -> tuple[LogitOperands, None, None, None]:
    products = LogitOperands(*(scaled(g, cotangent.objective.astype(g.dtype)) for g in gradients))
    return products, None, None, None


softmax_loss.defvjp(_with_gradients, _scale_gradients)

Total = tuple[LossSums, Array | None]  # and the gradient by the softmax weights


@jax.named_scope("softmax_loss")
def _in_slices(
    layout: Layout,
    criterion: Criterion,
    chunks: int,
    output: LogitOperands,
    targets_BL: Array,
    counted_BL: Array,
    teacher: LogitOperands | None,
    *,
    gradients: bool = False,
) -> tuple[LossSums, Gradients | None]:
    """Adds up the sums and, on request, both gradients over slices of the rows.

    The slices run one after another, so only the logits of one slice exist at a time.
    """
    of_teacher = [] if teacher is None else [teacher.x_BLD]
    count, axes, take = _slices(layout, chunks, output.x_BLD, targets_BL, counted_BL, *of_teacher)

    def part(index: Array | int) -> tuple[LossSums, Gradients | None]:
        x, targets, counted, *of_teacher = take(index)
        here = output._replace(x_BLD=x)
        taught = None if teacher is None else teacher._replace(x_BLD=of_teacher[0])
        sums, dlogits = _forward(layout, criterion, axes[1], here, targets, counted, taught)
        return sums, _backward(layout, axes, output.softmax_VD, x, dlogits) if gradients else None

    if count == 1:
        return part(0)

    def add(total: Total, index: Array) -> tuple[Total, Array | None]:
        sums, of_slice = part(index)
        dx, dsoftmax_DV = of_slice or (None, None)
        return jax.tree.map(jnp.add, total, (sums, dsoftmax_DV)), dx

    zero_DV = None
    if gradients:
        zero_VD = zero_gradient(output.softmax_VD, output.softmax_VD.dtype)
        zero_DV = layout.reshard(zero_VD.T, "DV", stored=True)
    zero_sum = jnp.zeros(())
    zero = LossSums(zero_sum, zero_sum, zero_sum, zero_sum), zero_DV
    (sums, dsoftmax_DV), dx_slices = jax.lax.scan(add, zero, jnp.arange(count, dtype=jnp.int32))
    if dsoftmax_DV is None or dx_slices is None:
        return sums, None
    dx_BlD = jnp.concatenate(layout.unstack(dx_slices), axis=1)
    return sums, (layout.reshard(dx_BlD, "BLD"), dsoftmax_DV)


def _slices(
    layout: Layout, chunks: int, *arrays: Array
) -> tuple[int, str, Callable[[Array | int], list[Array]]]:
    """Returns the number of slices of the rows, their axes, and a function that returns a slice.

    The first array has the axes BLD; the others have only the first ones of these.
    """
    length = layout.unpadded_shape("BL", arrays[0].shape[:2])[1]
    count = math.gcd(chunks, length)
    axes = "BLD" if count == 1 else "BlD"
    rows = [layout.reshard(array, axes[: array.ndim]) for array in arrays]
    step = rows[0].shape[1] // count

    def take(index: Array | int) -> list[Array]:
        return [jax.lax.dynamic_slice_in_dim(array, index * step, step, axis=1) for array in rows]

    return count, axes, take


def _backward(layout: Layout, axes: str, softmax_VD: Array, x: Array, dlogits: Array) -> Gradients:
    """Returns the gradients of one slice, with axes "BLD" or "BlD", given that of its logits."""
    dlogits = dlogits.astype(x.dtype)
    if spec_of(softmax_VD).reduced:
        product = functools.partial(layout.einsum, f"{axes},VD->{axes[:2]}V", x)
        (dsoftmax_VD,) = jax.linear_transpose(product, softmax_VD)(dlogits)
        dsoftmax_DV = layout.reshard(dsoftmax_VD.T, "DV", stored=True)
    else:
        # Transposes the narrow operand; XLA's CPU backend would transpose the wide one.
        x_DBL = jax.lax.optimization_barrier(jnp.transpose(x, (2, 0, 1)))
        dsoftmax_DV = layout.einsum("DBL,BLV->DV", x_DBL, dlogits, stored=True)
    dx = layout.einsum(f"B{axes[1]}V,VD->{axes}", dlogits, softmax_VD)
    return dx, jax.lax.optimization_barrier(dsoftmax_DV)


def _forward(
    layout: Layout,
    criterion: Criterion,
    length: str,
    output: LogitOperands,
    targets_BL: Array,
    counted_BL: Array,
    teacher: LogitOperands | None,
) -> tuple[LossSums, Array]:
    """Returns the sums of one slice, and the objective's gradient with respect to its logits."""
    axes = f"B{length}V"
    bounded_BLV = bounded_logits(layout, axes, output, criterion.logit_cap)
    logits_BLV = layout.mask_padding(bounded_BLV * criterion.logit_scale, axes, "V", -jnp.inf)
    vocab = layout.unpadded_shape(axes, logits_BLV.shape)[-1]
    target_BL1 = layout.broadcast_like(targets_BL, axes[:2], axes)
    counted_BL1 = layout.broadcast_like(counted_BL, axes[:2], axes).astype(float)
    top_BL1 = jnp.max(logits_BLV, axis=-1, keepdims=True)
    exp_BLV = jnp.exp(logits_BLV - top_BL1)
    sum_BL1 = jnp.sum(exp_BLV, axis=-1, keepdims=True)
    log_z_BL1 = jnp.log(sum_BL1) + top_BL1
    target_logit_BL1 = layout.take_last(logits_BLV, target_BL1, axes)
    loss_BL1 = log_z_BL1 - target_logit_BL1
    objective_BL1 = loss_BL1 + criterion.z_loss * jnp.square(log_z_BL1)
    smooth = criterion.label_smoothing
    if smooth:
        total_BL1 = jnp.sum(layout.mask_padding(logits_BLV, axes, "V", 0), axis=-1, keepdims=True)
        objective_BL1 += smooth * (target_logit_BL1 - total_BL1 / vocab)
    weight, pull_to_teacher_BLV = criterion.teacher_weight, None
    if teacher is not None:
        divergence_BL1, pull_to_teacher_BLV = _divergence_from_teacher(
            layout, criterion, axes, logits_BLV, teacher
        )
        objective_BL1 = (1 - weight) * objective_BL1 + weight * divergence_BL1
    sums = LossSums(
        objective=jnp.sum(objective_BL1 * counted_BL1),
        loss=jnp.sum(loss_BL1 * counted_BL1),
        correct=jnp.sum(jnp.where(target_logit_BL1 >= top_BL1, counted_BL1, 0)),
        tokens=jnp.sum(counted_BL1),
    )
    pull_BL1 = counted_BL1 * (1 + 2 * criterion.z_loss * log_z_BL1) / sum_BL1
    is_target_BLV = layout.iota(axes, logits_BLV.shape, "V") == target_BL1
    target_probs_BLV = jnp.where(is_target_BLV, 1 - smooth, 0.0) + smooth / vocab
    target_probs_BLV = layout.mask_padding(target_probs_BLV, axes, "V", 0)
    dlogits_BLV = exp_BLV * pull_BL1 - target_probs_BLV * counted_BL1
    if pull_to_teacher_BLV is not None:
        dlogits_BLV = (1 - weight) * dlogits_BLV + weight * pull_to_teacher_BLV * counted_BL1
    if criterion.logit_cap is not None:
        dlogits_BLV *= 1 - jnp.square(bounded_BLV / criterion.logit_cap)
    return sums, dlogits_BLV * criterion.logit_scale


def _divergence_from_teacher(
    layout: Layout, criterion: Criterion, axes: str, logits_BLV: Array, teacher: LogitOperands
) -> tuple[Array, Array]:
    """Returns the divergence from a teacher's predictions, and its gradient in the logits."""
    temperature = criterion.temperature
    teacher_BLV = bounded_logits(layout, axes, teacher, criterion.teacher_cap)
    teacher_BLV = layout.mask_padding(teacher_BLV, axes, "V", -jnp.inf)
    expected_BLV = jax.nn.log_softmax(teacher_BLV / temperature, axis=-1)
    predicted_BLV = jax.nn.log_softmax(logits_BLV / temperature, axis=-1)
    apart_BLV = layout.mask_padding(expected_BLV - predicted_BLV, axes, "V", 0)
    probs_BLV = jnp.exp(expected_BLV)
    divergence_BL1 = jnp.sum(probs_BLV * apart_BLV, axis=-1, keepdims=True)
    pull_BLV = jnp.exp(predicted_BLV) - probs_BLV
    return temperature**2 * divergence_BL1, temperature * pull_BLV
