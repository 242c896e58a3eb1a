"""Initializes weights from another run; a dense one gives each expert a copy (sparse upcycling).

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
from models.api import Model, ModelSpec, Params
from models.spec import TransformerSpec
from trainer.checkpoints.manager import Checkpoints, Described

Array = jax.Array
logger = logging.getLogger(__name__)
NEW_WITH_EXPERTS = re.compile("/mlp/(router_DE|router_bias_E|bias_E|shared/.*)$")
"""Weights that dense models lack; they keep their initial values."""


class WeightSource(NamedTuple):
    """Names the saved weight that a new one starts from, or some of its layers."""

    path: str
    layers: slice | int | None = None
    """None: all."""
    total: int = 0
    """Number of layers of the saved weight, if `layers` selects some of them."""
    copied: bool = False
    """Whether each expert gets a copy."""

    def shape(self, axes: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape that the saved weight must have, given the new one's shape."""
        without = "E" * self.copied + "N" * (self.layers is not None)
        sizes = zip(axes, shape, strict=True)
        kept = tuple(size for axis, size in sizes if axis not in without)
        return kept if self.layers is None else (self.total, *kept)


@jax.jit
def checksum(weights: Params) -> Array:
    """Returns a checksum of the bits of all weights, which does not depend on the layout."""
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
    """Returns these weights with the values of another run's checkpoint, and that one's step.

    Uses the newest checkpoint unless a step is given.  Routers and shared experts that the other
    run lacks stay as they are.  Errors name `setting`.
    """
    new = traverse_util.flatten_dict(params, sep="/")

    def layout_of(path: str) -> Layout:
        """Returns the layout in which the letters of a weight are the axes of its part."""
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
        described = checkpoints.describe(step).items()
        saved = {p.removeprefix("params/"): x for p, x in described if p.startswith("params/")}
        title = f"{setting} = {folder!r}, step {step}"
        if ADAPTER in {path.partition("/")[0] for path in saved}:
            raise UserError(f"{title}: adapters.  Legal: the run that they start from.")
        sources = weight_sources(new, model.spec, saved, title)
        layouts = {path: layout_of(path) for path in new}
        places = {source.path: layouts[path] for path, source in sources.items()}
        in_float32, cut = {}, {x.path for x in sources.values() if x.layers is not None}
        for path, array in saved.items():
            axes = axes_of_path(path).replace("N", "n" if path in cut else "N")
            place = places.get(path, model.layout).place(axes, stored=True)
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
    kept = ", ".join(sorted(new.keys() - sources.keys()))
    new_ones = f"; new: {kept}" if kept else ""
    logger.info("%s: weights of %s, step %d%s.", setting, folder, step, new_ones)
    return traverse_util.unflatten_dict(weights, sep="/"), step


def weight_sources(
    new: dict[str, Array], spec: ModelSpec, saved: Described, title: str
) -> dict[str, WeightSource]:
    """Returns the source of each weight except new routers; one error lists all mismatches.

    The layers of a run with first blocks fit only the same blocks.
    """
    first = [path for path in saved if "/first/" in path]
    layers = {} if first else layers_of_blocks(spec)
    sources, problems = {}, [f"{path}: this model has none." for path in first if path not in new]
    for path, weight in new.items():
        axes = axes_of_path(path)
        candidates = _candidates(path, layers)
        there = [source for source in candidates if source.path in saved]
        fits = (one for one in there if saved[one.path].shape == one.shape(axes, weight.shape))
        if (source := next(fits, None)) is not None:
            sources[path] = source
        elif there:
            problems.append(
                f"{path}: {there[0].path} is {saved[there[0].path].shape}, legal: "
                f"{there[0].shape(axes, weight.shape)}."
            )
        elif isinstance(weight, jax.ShapeDtypeStruct) or not NEW_WITH_EXPERTS.search(path):
            problems.append(f"{path}: there is no {candidates[-1].path}.")
    if problems:
        raise UserError(listed(title, problems))
    return sources


def layers_of_blocks(spec: ModelSpec) -> dict[str, tuple[int, slice | int]]:
    """Returns, by path of a block, its stack's number of layers, and which of them it has."""
    layers = dict[str, tuple[int, slice | int]]()
    if not isinstance(spec, TransformerSpec):
        return layers
    for stack in ("decoder", "encoder"):
        blocks = spec.placed_blocks(stack)
        total = sum(len(block.layers) for block in blocks)
        for path, _, numbers in blocks:
            which = slice(numbers.start, None, numbers.step)
            is_first = path.startswith("first/")
            layers[f"{stack}/{path}"] = total, numbers.start if is_first else which
    return layers


def _candidates(path: str, layers: dict[str, tuple[int, slice | int]]) -> list[WeightSource]:
    """Returns the same path, and a dense model's path for layers of a pattern and for experts."""
    candidates = [WeightSource(path)]
    for block, (total, which) in layers.items():
        if path.startswith(f"{block}/"):
            stack = block.partition("/")[0]
            dense = f"{stack}/layers_N/{path.removeprefix(f'{block}/')}"
            candidates.append(WeightSource(dense, which, total))
    for source in tuple(candidates):
        expert = re.match(r"^(.*/mlp/[wb][igo])_E(DF|FD|F|D)$", source.path)
        if expert is not None:
            dense = f"{expert[1]}_{expert[2]}"
            candidates.append(source._replace(path=dense, copied=True))
    return candidates


def converted(layout: Layout, saved: Array, source: WeightSource, new: Array, path: str) -> Array:
    """Returns the saved weight in the shape, type and sharding of the new one."""
    axes = axes_of_path(path)
    if source.layers is not None:  # it was restored with all layers on each device
        saved = saved[source.layers]
    if source.copied:
        at = axes.index("E")
        dimensions = tuple(i for i in range(len(axes)) if i != at)
        whole = layout.reshard(saved, axes.replace("E", "").lower())
        saved = jax.lax.broadcast_in_dim(whole, new.shape, dimensions)
    return layout.reshard(saved.astype(new.dtype), axes, stored=True)
