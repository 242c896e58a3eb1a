"""Implements what all models with an nnx network share."""

import abc
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Generic, Self, TypeVar

import jax
from flax import nnx

from configs.errors import UserError
from layouts.layout import Layout
from layouts.low_rank import Adapted, merged
from layouts.mesh import abstract_mesh
from layouts.padding import with_axes, with_padding
from models import loss
from models.adapters.lora import ADAPTER, Lora, side_by_side
from models.api import Batch, Cache, Params, WeightInfo
from models.dropout import Key
from models.initializers import Weights, infos_of
from models.loss import Criterion, LogitOperands, LossSums, TokenLosses, counted_targets

NetworkT = TypeVar("NetworkT", bound=nnx.Module)


@functools.partial(jax.jit, static_argnums=0)
def _trace_build(model: Any) -> Any:
    return model.build(jax.random.key(0))


@dataclasses.dataclass(frozen=True)
class NetworkModel(abc.ABC, Generic[NetworkT]):
    """Implements `models.api.Model` with a network whose outputs go to a softmax."""

    spec: Any
    layout: Layout
    adapters: tuple[Lora, ...] = dataclasses.field(default=(), kw_only=True)
    """Adapters, of which each decoded row uses one or none; the weights hold them by number."""

    def __post_init__(self) -> None:
        layout = with_axes(self.layout, *self.spec.axes)
        object.__setattr__(self, "layout", with_padding(layout, **self.spec.sizes))

    @abc.abstractmethod
    def make_network(self, weights: Weights) -> NetworkT:
        """Makes the network, whose modules draw their weights from `weights`."""

    @abc.abstractmethod
    def hidden(self, params: Params, batch: Batch) -> tuple[Layout, Batch, jax.Array, jax.Array]:
        """Runs the network as decoding does, and pads the batch with empty rows if needed.

        Returns the layout with the sizes of the rows, the padded batch, the last hidden states and
        the weights of the softmax.
        """

    def with_layout(self, layout: Layout) -> Self:
        return dataclasses.replace(self, layout=layout)

    def build(self, key: jax.Array) -> NetworkT:
        """Returns the network with new weights."""
        spec, rngs = self.spec, nnx.Rngs(params=key)
        return self.make_network(Weights(self.layout, spec.sizes, rngs, spec.precision.store))

    def init(self, key: jax.Array) -> Params:
        params: Params = nnx.to_pure_dict(nnx.split(self.build(key))[1])
        base, adapter, key = self.base_weights(), self.spec.adapter, jax.random.fold_in(key, 1)
        if adapter is None:
            return params
        return params | adapter.init(self.layout, base, self.spec.declared_axes, key)

    def weights(self) -> Mapping[str, WeightInfo]:
        base, adapter = self.base_weights(), self.spec.adapter
        return base if adapter is None else {**base, **adapter.infos(base)}

    def base_weights(self) -> Mapping[str, WeightInfo]:
        """Describes the weights of the network, by path."""
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            mesh = abstract_mesh({"one": 1})
        with jax.sharding.use_abstract_mesh(mesh):
            return infos_of(self.with_layout(self.layout.replicated()).abstract())

    def abstract(self) -> NetworkT:
        """Returns the network with shapes instead of weights; `jit` caches its trace."""
        return _trace_build.eval_shape(self)

    def network(self, params: Params) -> NetworkT:
        """Returns the network with these weights."""
        return nnx.merge(nnx.split(self.abstract())[0], self.adapted(params))

    def adapted(self, params: Params) -> Params:
        """Returns the weights of the network, with their adapters if there are any."""
        adapter: Lora | None = self.spec.adapter
        if self.adapters:
            return side_by_side(self.adapters, params, self.base_weights())
        return params if adapter is None else adapter.applied(params, self.base_weights())

    def merged(self, params: Params) -> Params:
        if self.adapters:  # rows use different ones, so they stay separate from the weights
            return self.adapted(params)
        return jax.tree.map(merged, self.adapted(params), is_leaf=lambda x: isinstance(x, Adapted))

    def trains(self, path: str) -> bool:
        return self.spec.adapter is None or path.split("/")[0] == ADAPTER

    @property
    def runs_stages(self) -> bool:
        return False

    def logit_bias(self, params: Params) -> jax.Array | None:
        """Returns the bias of the logits, which no training changes, or None."""
        return params.get("logit_bias_V")

    def loss(self, params: Params, batch: Batch, criterion: Criterion, key: Key = None) -> LossSums:
        criterion = dataclasses.replace(criterion, logit_cap=self.spec.logit_cap)
        layout, batch, x_BLD, softmax_VD = self.hidden(params, batch)
        output = LogitOperands(x_BLD, softmax_VD, self.logit_bias(params))
        counted_BL = counted_targets(batch)
        return loss.softmax_loss(layout, criterion, 1, output, batch["targets_BL"], counted_BL)

    def prepare(self, params: Params, *, for_one_call: bool = False) -> Params:
        raise UserError(
            f"Run.model = @{type(self.spec).__name__}(): it cannot continue text.  Legal: meshloom "
            "evaluate and meshloom score."
        )

    # If a model does not define these, `prepare` raises before either is called.

    def init_cache(self, *arguments: Any, **named: Any) -> Cache:
        raise NotImplementedError

    def step(self, *arguments: Any, **named: Any) -> tuple[Cache, jax.Array]:
        raise NotImplementedError

    def update_routers(self, params: Params, loads: Any) -> Params:
        return params

    def token_losses(self, params: Params, batch: Batch) -> TokenLosses:
        shape = batch["targets_BL"].shape
        layout, batch, x_BLD, softmax_VD = self.hidden(params, batch)
        output = LogitOperands(x_BLD, softmax_VD, self.logit_bias(params))
        targets_BL, counted_BL = batch["targets_BL"], counted_targets(batch)
        losses = loss.token_losses(layout, output, targets_BL, counted_BL, self.spec.logit_cap)
        if losses.loss_BL.shape == shape:
            return losses
        axes = "".join(letter.lower() if layout.pads(letter) else letter for letter in "BL")
        return TokenLosses(*(layout.reshard(array, axes) for array in losses))
