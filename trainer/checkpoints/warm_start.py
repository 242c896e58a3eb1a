"""Takes first weights from another run; a dense one gives each expert a copy (sparse upcycling).

Komatsuzaki et al. 2022.
"""

import logging
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import traverse_util
from jax.sharding import Mesh, NamedSharding

from configs.errors import UserError, listed
from configs.paths import path_of
from layouts.axes import axes_of_path
from layouts.layout import Layout
from layouts.padding import with_axes
from models.adapters.lora import ADAPTER
from models.api import Model, Params
from trainer.checkpoints.manager import Checkpoints, Described

Array = jax.Array
logger = logging.getLogger(__name__)
NEW_WITH_EXPERTS = re.compile("/mlp/(router_DE|router_bias_E|bias_E|shared/.*)$")
"""Weights that no dense model has, which stay as they are initialized."""


class WeightSource(NamedTuple):
    """Names the saved weight that a new one starts from: every `stride`-th layer, from the
    `first` on."""

    path: str
    first: int = 0
    stride: int = 1
    copied: bool = False
    """Whether each expert gets a copy."""

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape that the saved weight must have, from that of the new one."""
        layers, *rest = shape[:1] + shape[2:] if self.copied else shape
        return (layers * self.stride, *rest)


@jax.jit
def checksum(weights: Params) -> Array:
    """Returns a number that depends on the bits of all weights, and on no layout."""
    total = jnp.zeros((), jnp.uint32)
    for weight in jax.tree.leaves(weights):
        bits = jax.lax.bitcast_convert_type(weight, f"uint{8 * weight.dtype.itemsize}")
        total = total * jnp.uint32(31) + jnp.sum(bits.astype(jnp.uint32), dtype=jnp.uint32)
    return total


def warm_started(
    params: Params,
    folder: str,
    model: Model,
    mesh: Mesh,
    step: int | None = None,
    setting: str = "Run.start_from",
) -> tuple[Params, int]:
    """Returns the weights of a checkpoint of another run in place of these, and its step.

    It is the newest unless a step is given.  Routers and shared experts that the other run does not
    have stay as they are.  Errors name the setting.
    """
    new = traverse_util.flatten_dict(params, sep="/")

    def layout_of(path: str) -> Layout:
        """Returns the layout that reads the letters of a weight as the axes of its part."""
        named = set(zip(axes_of_path(path), model.weights()[path].axes, strict=True))
        return with_axes(model.layout, *(x for x in model.spec.declared_axes if x[:2] in named))

    with Checkpoints(path_of(folder)) as checkpoints:
        step = checkpoints.latest if step is None else step
        if step is None:
            raise UserError(
                f"{setting} = {folder!r}: no checkpoint there.  Legal: the model directory of "
                "a run that has saved one."
            )
        if step not in (steps := checkpoints.steps()):
            there = ", ".join(map(str, steps)) or "none"
            raise UserError(
                f"{setting} = {folder!r}: step {step}, whose weights the run was trained with, is "
                f"no longer there.  Steps there: {there}.  Copy it back, and raise Run.keep_last "
                "where that run trains on."
            )
        saved = {
            path.removeprefix("params/"): array
            for path, array in checkpoints.describe(step).items()
            if path.startswith("params/")
        }
        title = f"{setting} = {folder!r}, step {step}"
        if ADAPTER in {path.partition("/")[0] for path in saved}:
            raise UserError(f"{title}: adapters.  Legal: the run that they start from.")
        sources = weight_sources(new, saved, title)
        layouts = {path: layout_of(path) for path in new}
        places = {source.path: layouts[path] for path, source in sources.items()}
        in_float32 = {}
        for path, array in saved.items():
            place = places.get(path, model.layout).place(axes_of_path(path), stored=True)
            sharding = NamedSharding(mesh, place)
            in_float32[path] = jax.ShapeDtypeStruct(array.shape, jnp.float32, sharding=sharding)
        abstract = traverse_util.unflatten_dict(in_float32, sep="/")
        restored = traverse_util.flatten_dict(checkpoints.restore_params(abstract, step), sep="/")

    def replace(restored: dict[str, Array]) -> dict[str, Array]:
        return {
            path: converted(layouts[path], restored[source.path], source, new[path], path)
            for path, source in sources.items()
        }

    with jax.set_mesh(mesh):
        weights = new | jax.jit(replace)(restored)
    kept = sorted(new.keys() - sources.keys())
    logger.info(
        "Weights of %s, step %d%s.", folder, step, f"; new: {', '.join(kept)}" if kept else ""
    )
    return traverse_util.unflatten_dict(weights, sep="/"), step


def weight_sources(new: dict[str, Array], saved: Described, title: str) -> dict[str, WeightSource]:
    """Returns the source of each weight but new routers; raises all that does not fit at once."""
    blocks: dict[str, int] = {}
    for path in new:
        for stack, block in re.findall(r"^(.*/layers_N)/block(\d+)/", path):
            blocks[stack] = max(blocks.get(stack, 0), int(block) + 1)
    sources, problems = {}, []
    for path, weight in new.items():
        source = _source(path, blocks, saved)
        if source.path not in saved:
            if isinstance(weight, jax.ShapeDtypeStruct) or not NEW_WITH_EXPERTS.search(path):
                problems.append(f"{path}: there is no {source.path}.")
        elif saved[source.path].shape != source.shape(weight.shape):
            problems.append(
                f"{path}: {source.path} is {saved[source.path].shape}, legal: "
                f"{source.shape(weight.shape)}."
            )
        else:
            sources[path] = source
    if problems:
        raise UserError(listed(title, problems))
    return sources


def _source(path: str, blocks: dict[str, int], saved: Described) -> WeightSource:
    """Returns the same path, or the dense model's for a layer of a pattern and for an expert."""
    candidates = [WeightSource(path)]
    layer = re.match(r"^(.*/layers_N)/block(\d+)/(.*)$", path)
    if layer is not None:
        stack, block, rest = layer.groups()
        candidates.append(WeightSource(f"{stack}/{rest}", int(block), blocks[stack]))
    for source in tuple(candidates):
        expert = re.match(r"^(.*/mlp/[wb][igo])_E(DF|FD|F|D)$", source.path)
        if expert is not None:
            dense = f"{expert[1]}_{expert[2]}"
            candidates.append(source._replace(path=dense, copied=True))
    return next((source for source in candidates if source.path in saved), candidates[-1])


def converted(layout: Layout, saved: Array, source: WeightSource, new: Array, path: str) -> Array:
    """Returns the saved weight in the shape, type and placement of the new one."""
    axes = axes_of_path(path)
    saved = saved[source.first :: source.stride] if source.stride > 1 else saved
    if source.copied:
        at = axes.index("E")
        dimensions = tuple(i for i in range(len(axes)) if i != at)
        whole = layout.reshard(saved, axes.replace("E", "").lower())
        saved = jax.lax.broadcast_in_dim(whole, new.shape, dimensions)
    return layout.reshard(saved.astype(new.dtype), axes, stored=True)
