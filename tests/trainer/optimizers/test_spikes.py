"""Spikes: what is skipped leaves no trace, and all else is as without."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from trainer.optimizers.spikes import FIRST_UPDATES, skip_spikes

FACTOR, STEPS = 3.0, FIRST_UPDATES + 10


def weights_after(transform: optax.GradientTransformation, gradients: list[np.ndarray]):
    params = {"w_D": jnp.ones(7, jnp.float32)}
    state = transform.init(params)

    @jax.jit
    def update(state, params, gradient_D):
        updates, state = transform.update({"w_D": gradient_D}, state, params)
        return state, optax.apply_updates(params, updates)

    skipped = []
    for gradient_D in gradients:
        state, params = update(state, params, jnp.asarray(gradient_D, jnp.float32))
        skipped.append(int(getattr(state, "in_row", 0)))
    return params["w_D"], skipped


def test_a_spike_and_what_is_no_number_leave_no_trace() -> None:
    rng = np.random.default_rng(0)
    gradients = [rng.normal(size=7) for _ in range(STEPS)]
    adam = optax.adam(0.1)
    large = np.full(7, 5.0)  # beyond the bound, unless a spike before it raised that
    spikes = dict(enumerate([1e3 * large, large, np.full(7, np.nan), large], FIRST_UPDATES + 2))
    with_spikes = list(gradients)
    for number, spike in spikes.items():
        with_spikes.insert(number, spike)
    plain, none = weights_after(skip_spikes(adam, FACTOR), gradients)  # the same program
    unwrapped, _ = weights_after(adam, gradients)
    np.testing.assert_allclose(plain, unwrapped, rtol=1e-6)
    result, skipped = weights_after(skip_spikes(adam, FACTOR), with_spikes)
    np.testing.assert_array_equal(result, plain)
    assert not any(none)
    assert [number for number, count in enumerate(skipped) if count] == [*spikes]


def test_the_first_updates_are_no_measure_but_must_be_numbers() -> None:
    gradients = [np.full(7, 1.0), np.full(7, 50.0), np.full(7, np.inf), np.full(7, np.nan)]
    _, skipped = weights_after(skip_spikes(optax.sgd(0.1), FACTOR), gradients)
    assert skipped == [0, 0, 1, 2]


def test_the_bound_follows_the_norms() -> None:
    """Norms that grow by less than the factor are never skipped, however far they get."""
    gradients = [np.full(7, 1.02**step) for step in range(200)]
    _, skipped = weights_after(skip_spikes(optax.sgd(1e-9), FACTOR), gradients)
    assert not any(skipped)
