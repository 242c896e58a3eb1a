"""Implements what models made of an nnx network share."""

import abc
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Generic, Self, TypeVar

import jax
from flax import nnx

from layouts.layout import Layout
from layouts.mesh import abstract_mesh
from layouts.padding import with_padding
from models.api import Batch, Params, WeightInfo
from models.initializers import Weights, infos_of
from models.loss import counted_targets, token_losses

NetworkT = TypeVar("NetworkT", bound=nnx.Module)


@functools.partial(jax.jit, static_argnums=0)
def _trace_build(model: Any) -> Any:
    return model.build(jax.random.key(0))


@dataclasses.dataclass(frozen=True)
class NetworkModel(abc.ABC, Generic[NetworkT]):
    """Implements the part of `models.api.Model` that follows from a network and its outputs."""

    spec: Any
    layout: Layout

    def __post_init__(self) -> None:
        object.__setattr__(self, "layout", with_padding(self.layout, **self.spec.sizes))

    @abc.abstractmethod
    def make_network(self, weights: Weights) -> NetworkT:
        """Makes the network, whose modules draw their weights from these."""

    @abc.abstractmethod
    def hidden(self, params: Params, batch: Batch) -> tuple[Layout, Batch, jax.Array, jax.Array]:
        """Runs the network as decoding does, and pads the batch with empty rows if needed.

        Returns the layout that knows the rows, the padded batch, the last hidden states and the
        weights of the softmax.
        """

    def with_layout(self, layout: Layout) -> Self:
        return dataclasses.replace(self, layout=layout)

    def build(self, key: jax.Array) -> NetworkT:
        """Returns the network with new weights."""
        spec, rngs = self.spec, nnx.Rngs(params=key)
        return self.make_network(Weights(self.layout, spec.sizes, rngs, spec.precision.store))

    def init(self, key: jax.Array) -> Params:
        return nnx.to_pure_dict(nnx.split(self.build(key))[1])

    def weights(self) -> Mapping[str, WeightInfo]:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            mesh = abstract_mesh({"one": 1})
        with jax.sharding.use_abstract_mesh(mesh):
            return infos_of(self.with_layout(self.layout.replicated()).abstract())

    def abstract(self) -> NetworkT:
        """Returns the network with shapes in place of weights; `jit` caches its trace."""
        return _trace_build.eval_shape(self)

    def network(self, params: Params) -> NetworkT:
        """Returns the network with these weights."""
        return nnx.merge(nnx.split(self.abstract())[0], params)

    def update_routers(self, params: Params, loads: Any) -> Params:
        return params

    def token_losses(self, params: Params, batch: Batch) -> jax.Array:
        rows = len(batch["targets_BL"])
        layout, batch, x_BLD, weights_VD = self.hidden(params, batch)
        targets_BL, counted_BL = batch["targets_BL"], counted_targets(batch)
        losses_BL = token_losses(layout, x_BLD, weights_VD, targets_BL, counted_BL)
        return losses_BL if len(losses_BL) == rows else layout.reshard(losses_BL, "bL")
