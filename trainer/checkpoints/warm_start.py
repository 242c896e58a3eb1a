"""First weights from another run; a dense one gives each expert a copy (sparse upcycling).

Komatsuzaki et al. 2022.
"""

import logging
import re
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import traverse_util
from jax.sharding import Mesh, NamedSharding

from configs.errors import UserError, listed
from layouts.axes import axes_of_path
from layouts.layout import Layout
from models.api import Params
from trainer.checkpoints.manager import Checkpoints, Saved

Array = jax.Array
logger = logging.getLogger(__name__)


class WeightSource(NamedTuple):
    """Where a weight comes from: every `turns`-th layer of one, from the `first` on."""

    path: str
    first: int
    turns: int
    copied: bool
    """Whether each expert gets a copy."""

    def shape(self, wanted: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that the origin must have."""
        own = wanted[:1] + wanted[2:] if self.copied else wanted
        return (own[0] * self.turns, *own[1:]) if self.turns > 1 else own


def warm_started(params: Params, folder: str, layout: Layout, mesh: Mesh) -> Params:
    """The weights of the newest checkpoint of another run in place of these.

    Routers that the other run has not stay as they are.
    """
    with Checkpoints(Path(folder)) as checkpoints:
        step = checkpoints.latest
        if step is None:
            raise UserError(
                f"Run.start_from = {folder!r}: no checkpoint there.  Legal: the model directory of "
                "a run that has saved one."
            )
        saved = {
            path.removeprefix("params/"): array
            for path, array in checkpoints.describe(step).items()
            if path.startswith("params/")
        }
        wanted = traverse_util.flatten_dict(params, sep="/")
        origins = origins_of(wanted, saved, f"Run.start_from = {folder!r}, step {step}")

        def abstract(path: str) -> jax.ShapeDtypeStruct:
            place = NamedSharding(mesh, layout.place(axes_of_path(path), stored=True))
            return jax.ShapeDtypeStruct(saved[path].shape, jnp.float32, sharding=place)

        tree = traverse_util.unflatten_dict({path: abstract(path) for path in saved}, sep="/")
        found = traverse_util.flatten_dict(checkpoints.restore_params(tree, step), sep="/")

    def made(found: dict[str, Array], wanted: dict[str, Array]) -> dict[str, Array]:
        return wanted | {
            path: _taken(layout, found[origin.path], origin, wanted[path], path)
            for path, origin in origins.items()
        }

    with jax.set_mesh(mesh):
        weights = jax.jit(made)(found, wanted)
    fresh = sorted(wanted.keys() - origins.keys())
    new = f"; new: {', '.join(fresh)}" if fresh else ""
    logger.info("Weights of %s, step %d%s.", folder, step, new)
    return traverse_util.unflatten_dict(weights, sep="/")


def origins_of(
    wanted: dict[str, Array], saved: dict[str, Saved], where: str
) -> dict[str, WeightSource]:
    """Returns the source of each weight but the routers; raises all that does not fit at once."""
    parts: dict[str, int] = {}
    for path in wanted:
        for stack, block in re.findall(r"^(.*/layers_N)/block(\d+)/", path):
            parts[stack] = max(parts.get(stack, 0), int(block) + 1)
    origins, problems = {}, []
    for path, weight in wanted.items():
        origin = _origin(path, parts, saved)
        if origin.path not in saved:
            if not path.endswith("/router_DE"):
                problems.append(f"{path}: there is no {origin.path}.")
        elif saved[origin.path].shape != origin.shape(weight.shape):
            problems.append(
                f"{path}: {origin.path} is {saved[origin.path].shape}, legal: "
                f"{origin.shape(weight.shape)}."
            )
        else:
            origins[path] = origin
    if problems:
        raise UserError(listed(where, problems))
    return origins


def _origin(path: str, parts: dict[str, int], saved: dict[str, Saved]) -> WeightSource:
    """The same path, or the dense model's for a layer of a pattern and for an expert."""
    if path in saved:
        return WeightSource(path, 0, 1, copied=False)
    first, turns, source = 0, 1, path
    layer = re.match(r"^(.*/layers_N)/block(\d+)/(.*)$", path)
    if layer is not None:
        stack, block, rest = layer.groups()
        first, turns, source = int(block), parts[stack], f"{stack}/{rest}"
    expert = re.match(r"^(.*/mlp/w[igo])_E(DF|FD)$", source)
    if expert is not None and source not in saved:
        return WeightSource(f"{expert[1]}_{expert[2]}", first, turns, copied=True)
    return WeightSource(source, first, turns, copied=False)


def _taken(layout: Layout, found: Array, origin: WeightSource, like: Array, path: str) -> Array:
    """What a weight inherits, in its shape and placement."""
    axes = axes_of_path(path)
    found = found[origin.first :: origin.turns] if origin.turns > 1 else found
    if origin.copied:
        at = axes.index("E")
        kept = tuple(i for i in range(len(axes)) if i != at)
        whole = layout.reshard(found, axes.replace("E", "").lower())
        found = jax.lax.broadcast_in_dim(whole, like.shape, kept)
    return layout.reshard(found.astype(like.dtype), axes, stored=True)
