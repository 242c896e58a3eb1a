"""Trains low-rank adapters instead of the weights (LoRA, Hu et al. 2021)."""

import collections
import fnmatch
from collections.abc import Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util

from configs.errors import UserError, did_you_mean
from configs.spec import Count, Positive, spec
from layouts.axes import Axis, axes_of_path, letters_of
from layouts.layout import Layout
from layouts.low_rank import RANK, Adapted, factor_axes
from layouts.padding import with_axes
from layouts.shards import spec_of
from models.api import Params, WeightInfo
from models.initializers import Weights
from models.precision import FloatType

Infos = Mapping[str, WeightInfo]
Factors = tuple[str, Infos]  # kinds, as in `factor_axes`, and the two matrices by path
ADAPTER = "adapter"
"""The path of adapters among the weights of a model."""
MERGED = ("embed_VD", "router_DE", "wk_RJK", "wv_RJK")
"""Ends of the paths of weights that decoding also uses outside products with rows."""


@spec
class Lora:
    """Adds a product of two thin matrices to each chosen weight W: W + alpha / rank * A B.

    Only A and B are trained and saved; all other weights come from Run.start_from.  A starts
    random, B at zero.
    """

    rank: Count = 8
    """Columns of A and rows of B."""
    alpha: Positive = 16.0
    """Scale of the product, times the rank."""
    targets: tuple[str, ...] = ("w*",)
    """Names of weights, without their axes: "wq", "attention/wq", "mlp/w*". A name may begin at any
    part of a path, and "*" matches anything. Legal: weights of matmuls."""
    store: FloatType = "float32"
    """Type of the stored matrices."""

    def __post_init__(self) -> None:
        if not self.targets:
            raise UserError("Lora.targets = (): trains nothing.  Legal: one name or more.")

    def factors(self, base: Infos) -> dict[str, Factors]:
        """Describes the adapters of the chosen weights, by the path of the weight."""
        names = {p: p.removesuffix(f"_{letters_of(p)}") for p, info in base.items() if info.reads}
        chosen: dict[str, Factors] = {}
        for target in self.targets:
            paths = [p for p in names if fnmatch.fnmatchcase(f"/{names[p]}", f"*/{target}")]
            if not paths:
                legal = sorted({"/".join(name.split("/")[-2:]) for name in names.values()})
                hint = did_you_mean(target, {name.rpartition("/")[2] for name in legal})
                raise UserError(
                    f"Lora.targets = {self.targets}: no weight has the name {target!r}.{hint}  "
                    f"Legal: {', '.join(legal)}."
                )
            chosen |= {path: self._factors(path, names[path], base[path]) for path in paths}
        return chosen

    def _factors(self, path: str, name: str, info: WeightInfo) -> Factors:
        letters, matrices = axes_of_path(path), dict[str, WeightInfo]()
        outer = letters.removesuffix(letters_of(path))
        kinds = "".join("i" if axis in info.reads else "o" for axis in info.axes[info.stacked :])
        kinds = kinds.rjust(len(letters), "s")
        sizes = {**dict(zip(letters, info.shape, strict=True)), RANK.letter: self.rank}
        names = {**dict(zip(letters, info.axes, strict=True)), RANK.letter: RANK.name}
        reads = info.reads, (RANK.name,)
        for matrix, axes, read in zip("ab", factor_axes(letters, kinds), reads, strict=True):
            shape, named = tuple(sizes[x] for x in axes), tuple(names[x] for x in axes)
            path = f"{ADAPTER}/{name}/{matrix}_{axes.removeprefix(outer)}"
            matrices[path] = WeightInfo(shape, named, read)
        return kinds[len(outer) :], matrices

    def merged_paths(self, base: Infos) -> list[str]:
        """Lists the weights that decoding uses with merged adapters: experts and `MERGED`."""
        factors = self.factors(base).items()
        return [path for path, (kinds, _) in factors if "s" in kinds or path.endswith(MERGED)]

    def infos(self, base: Infos) -> dict[str, WeightInfo]:
        """Describes the matrices of all adapters, by path."""
        return {p: info for _, of in self.factors(base).values() for p, info in of.items()}

    def init(self, layout: Layout, base: Infos, declared: Iterable[Axis], key: jax.Array) -> Params:
        """Draws new adapters, sharded by the layout; their products are zero."""
        flat, rngs = {}, nnx.Rngs(params=key)
        for path, info in self.infos(base).items():
            axes = axes_of_path(path)
            named = set(zip(axes, info.axes, strict=True))
            placed = with_axes(layout, *(axis for axis in declared if axis[:2] in named))
            new = Weights(placed, dict(zip(axes, info.shape, strict=True)), rngs, self.store)
            read = "".join(axes[info.axes.index(name)] for name in info.reads)
            weight = new.zeros(axes) if read == RANK.letter else new.normal(axes, fan_in=read)
            flat[path] = weight.get_value()
        return traverse_util.unflatten_dict(flat, sep="/")

    def applied(self, params: Params, base: Infos) -> Params:
        """Returns the weights, with adapters for the chosen ones."""
        flat = traverse_util.flatten_dict(params, sep="/")
        for path, (kinds, matrices) in self.factors(base).items():
            a, b = map(flat.pop, matrices)
            flat[path] = Adapted(flat[path], a, b, self.alpha / self.rank, kinds)
        return traverse_util.unflatten_dict(flat, sep="/")


def side_by_side(adapters: Sequence[Lora], params: Params, base: Infos) -> Params:
    """Returns the weights, each with all its adapters; each row of a batch uses one of them.

    The params hold the weights, and the matrices of adapter i under "i/adapter", from 1 on.
    """
    flat = traverse_util.flatten_dict(params, sep="/")
    by_path = collections.defaultdict[str, list[tuple[int, str, jax.Array, jax.Array]]](list)
    for number, adapter in enumerate(adapters, 1):
        for path, (kinds, matrices) in adapter.factors(base).items():
            pair = [flat.pop(f"{number}/{matrix}") for matrix in matrices]
            a, b = (x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in pair)
            by_path[path].append((number, kinds, a * (adapter.alpha / adapter.rank), b))
    for path, members in by_path.items():
        letters, kinds = axes_of_path(path), members[0][1]
        of_a, of_b = factor_axes(letters, kinds.rjust(len(letters), "s"))
        a = _concatenated([a for *_, a, _ in members], of_a.index(RANK.letter))
        b = _concatenated([b for *_, b in members], of_b.index(RANK.letter))
        columns = np.repeat([n for n, *_ in members], [a.shape[-1] for *_, a, _ in members])
        is_of_each = np.arange(1, len(adapters) + 1)[:, None] == columns
        stack = a.shape[: len(letters) - len(kinds)]
        reads = jnp.broadcast_to(jnp.asarray(is_of_each, a.dtype), (*stack, *is_of_each.shape))
        reads = jax.sharding.reshard(reads, jax.P(*[None] * reads.ndim))
        flat[path] = Adapted(flat[path], a, b, 1.0, kinds, reads)
    return traverse_util.unflatten_dict(flat, sep="/")


def _concatenated(matrices: Sequence[jax.Array], axis: int) -> jax.Array:
    """Concatenates matrices along an axis, after replicating it."""

    def gathered(matrix: jax.Array) -> jax.Array:
        place = [*spec_of(matrix).partitions]
        place[axis] = None
        return jax.sharding.reshard(matrix, jax.P(*place))

    return jnp.concatenate([gathered(matrix) for matrix in matrices], axis)
