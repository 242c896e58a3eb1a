"""Pads states as the layout says, and removes the padding before they are saved."""

import dataclasses
import functools

import jax
from jax.sharding import Mesh

from layouts.padding import resized
from trainer.step import State, TrainStepSpec, abstract_state


@dataclasses.dataclass(frozen=True)
class StatePadding:
    """Pads and unpads states of training, or parts of them."""

    step_spec: TrainStepSpec
    mesh: Mesh

    @functools.cached_property
    def padded(self) -> State:
        """Returns shapes, types and placements on devices."""
        return abstract_state(self.step_spec, self.mesh)

    @functools.cached_property
    def unpadded(self) -> State:
        """Returns the same without padding, as it is saved; arrays that have some are replicated
        along those axes."""
        even = self.step_spec.without_padding()
        if even is self.step_spec:
            return self.padded
        even_state = abstract_state(even, self.mesh)
        return jax.tree.map(lambda a, b: a if a.shape == b.shape else b, self.padded, even_state)

    def unpad(self, state: State) -> State:
        return self._like(self.unpadded, state)

    def pad(self, state: State) -> State:
        return self._like(self.padded, state)

    def _like(self, abstract: State, state: State) -> State:
        if self.step_spec.without_padding() is self.step_spec:
            return state
        leaves, structure = jax.tree.flatten(state)
        targets = jax.tree.leaves({name: abstract[name] for name in state})
        differ = [i for i, leaf in enumerate(targets) if leaf.shape != leaves[i].shape]
        forms = tuple((targets[i].shape, targets[i].sharding.spec) for i in differ)
        with jax.set_mesh(self.mesh):
            new = all_resized([leaves[i] for i in differ], forms)
        for i, leaf in zip(differ, new, strict=True):
            leaves[i] = leaf
        return jax.tree.unflatten(structure, leaves)


@functools.partial(jax.jit, static_argnums=1)
def all_resized(
    arrays: list[jax.Array], forms: tuple[tuple[tuple[int, ...], jax.P], ...]
) -> list[jax.Array]:
    """Pads with zeros or cuts arrays to other shapes, and places them."""
    return [resized(x, *form) for x, form in zip(arrays, forms, strict=True)]
