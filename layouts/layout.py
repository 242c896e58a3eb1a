"""Shards tensors: applies a few rules to the axis letters of each tensor."""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from configs.errors import UserError
from configs.spec import Count, spec
from layouts import annotations, convolution, einsum, top_k
from layouts.axes import ROW_AXES, SYNONYMS, Axis, alphabet, check_distinct
from layouts.quantized import Operand, Quantized
from layouts.reduction import like_sums, reduced_over
from layouts.shards import mesh_axes, num_shards, spec_of

Tree = TypeVar("Tree")
ABSENT_AXES = re.compile(r"\(\w+\)")  # of "(E)GD"


class Rule(NamedTuple):
    """Pairs an axis with a mesh axis; a rule with a "?" is not firm, a rule with a "+" pads."""

    axis: str
    mesh_axis: str
    firm: bool = True
    pads: bool = False

    def __str__(self) -> str:
        return f"{self.axis}:{self.mesh_axis}{'' if self.firm else '?'}{'+' if self.pads else ''}"


def parts(text: str) -> list[str]:
    """Splits a text at commas, semicolons, dots and spaces."""
    return [part for part in re.split(r"[,;.\s]+", text) if part]


def pairs(text: str) -> tuple[tuple[str, str], ...]:
    """Splits Mesh-TensorFlow's "a:b;c:d" (also with commas, dots or spaces) into pairs."""
    names = []
    for part in parts(text):
        left, colon, right = part.partition(":")
        if not (left and colon and right):
            raise UserError(f"{part!r} in {text!r}: legal is name:name, as in 'batch:data'.")
        names.append((left, right))
    return tuple(names)


@functools.lru_cache
def parse_rules(text: str) -> tuple[Rule, ...]:
    """Parses a layout string, in order, and translates Mesh-TensorFlow's axis names."""
    rules = []
    for axis, word in pairs(text):
        mesh_axis = word.rstrip("?+")
        marks = word[len(mesh_axis) :]
        if len(set(marks)) < len(marks):
            raise UserError(f"'{axis}:{word}' in {text!r}: write one '?' or '+', not {marks!r}.")
        rules.append(Rule(SYNONYMS.get(axis, axis), mesh_axis, "?" not in marks, "+" in marks))
    return tuple(rules)


def _by_letter(rules: tuple[Rule, ...], axes: tuple[Axis, ...]) -> Mapping[str, tuple[Rule, ...]]:
    """Returns the rules by the letter of their axis.

    "heads" also means kv_heads, unless kv_heads or queries have rules; "batch" also means groups,
    unless groups have a rule.
    """
    names = {rule.axis for rule in rules}
    letters = {axis.name: letter for letter, axis in alphabet(axes).by_letter.items()}
    wants: dict[str, tuple[Rule, ...]] = {}
    for rule in rules:
        split = [rule.axis]
        if rule.axis == "heads" and not names & {"kv_heads", "queries"}:
            split.append("kv_heads")
        if rule.axis == "batch" and "groups" not in names:
            split.append("groups")
        for name in split:  # without axes of other parts, and mistakes, which the lint reports
            if (letter := letters.get(name)) is not None:
                wants[letter] = (*wants.get(letter, ()), rule)
    return wants


class AxisAssignment(NamedTuple):
    """Holds what a rule gets in a tensor: its mesh axis, or nothing because `lost_to` has it."""

    position: int
    rule: Rule
    lost_to: Rule | None


@functools.cache
def axis_assignments(layout: "Layout", axes: str, stored: bool) -> tuple[AxisAssignment, ...]:
    """Assigns mesh axes to the axes of a tensor, in the order in which rules choose."""
    wants = dict(_by_letter(parse_rules(layout.rules), layout.declared_axes))
    if stored:
        wants |= _by_letter(parse_rules(layout.param_rules), layout.declared_axes)
    matches = [(i, rule) for i, letter in enumerate(axes) for rule in wants.get(letter, ())]
    taken: dict[str, Rule] = {}
    assignments = []
    for i, rule in sorted(matches, key=lambda match: not match[1].firm):
        assignments.append(AxisAssignment(i, rule, taken.get(rule.mesh_axis)))
        taken.setdefault(rule.mesh_axis, rule)
    return tuple(assignments)


@spec
class Layout:
    """Maps the axes of tensors to mesh axes.  Hashable, so it is part of every jit key.

    A mesh axis "data?" applies only if no other axis of the tensor uses it.  "data+" pads the axis
    if its size does not divide (`layouts.padding`).  An axis with several rules is split over
    several mesh axes.  Shazeer et al. 2018 (Mesh-TensorFlow), section 3.1.
    """

    mesh: str = "data:-1"
    """Mesh axes and sizes, "data:2,model:4". One size may be -1: all remaining devices."""
    rules: str = "batch:data"
    """Rules for every tensor, such as "batch:data;heads:model;d_ff:model;vocab:model"."""
    param_rules: str = ""
    """Rules for stored weights and optimizer state; they replace `rules` for the same axis."""
    order: str | None = None
    """Axes of the TPU torus along which each mesh axis is placed, "data:y;model:x;model:core".
    None: JAX chooses. No effect on CPUs and GPUs, which have no torus."""
    slices: str | None = None
    """Mesh axes that span several slices, "data:2", or "data:-1" for all slices. The other mesh
    axes stay inside a slice. No effect on a single slice."""
    pipeline_repeats: Count = 1
    """How many times each microbatch goes through all stages, each time through another group of a
    stage's layers. 1: GPipe schedule; more: circular schedule, which has less idle time."""

    @property
    def declared_axes(self) -> tuple[Axis, ...]:
        """Returns the axes that a part of the model adds to the common ones."""
        return ()

    @property
    def whole_axes(self) -> frozenset[str]:
        """Returns the axes that claim their mesh axes but are not sharded."""
        return frozenset()

    def place(self, axes: str, *, stored: bool = False) -> jax.P:
        """Returns the partition spec of a tensor with these axes; lowercase axes are replicated.

        Firm rules choose before "?" rules, and among equals the leftmost axis wins.  An axis in
        parentheses chooses as well, though the tensor lacks it: "(E)GD" is split as G and D are in
        "EGD".  Raises ValueError if an axis occurs twice.
        """
        check_distinct(axes)
        places: list[tuple[str, ...]] = [()] * len(axes)
        for assigned in axis_assignments(self, axes, stored):
            if assigned.lost_to is None and assigned.rule.axis not in self.whole_axes:
                places[assigned.position] += (assigned.rule.mesh_axis,)
        if "(" in axes:
            marked = ABSENT_AXES.sub(lambda absent: " " * len(absent[0]), axes)
            places = [entry for entry, axis in zip(places, marked, strict=True) if axis != " "]
        return jax.P(*(p[0] if len(p) == 1 else p or None for p in places))

    @property
    def stage_axes(self) -> tuple[str, ...]:
        """Returns the mesh axes, of any size, over which the rules split layers into stages."""
        return mesh_axes(self.place("NBLD")[0])

    def einsum(
        self, equation: str, *operands: Array, stored: bool = False, dtype: DTypeLike | None = None
    ) -> Array:
        """Computes an einsum over axis letters; the result is sharded by its letters."""
        if isinstance(weight := operands[-1], Operand):
            return weight.product(self, equation, operands[0], dtype, stored=stored)
        if equation.count("->") != 1:
            raise ValueError(f"einsum {equation!r}: legal is a form such as 'BLD,DF->BLF'.")
        inputs, out = equation.split("->")
        for axes in inputs.split(","):
            check_distinct(axes)
        return einsum.einsum(equation, operands, self.place(out, stored=stored), dtype)

    def convolve(
        self,
        equation: str,
        x: Array,
        kernel: Array,
        *,
        strides: Sequence[int] | None = None,
        dilation: Sequence[int] | None = None,
        base_dilation: Sequence[int] | None = None,
        padding: Literal["SAME", "VALID"] | Sequence[convolution.Padding] = "SAME",
    ) -> Array:
        """Convolves images with a kernel, "BYXD,OPDF->BYXF"; letters shard the result.

        Strides, dilations and pairs of padding are in the order of the kernel's axes.  A base
        dilation puts rows of zeros between those of the image: with padding "SAME" and strides of 1
        the result equals `jax.lax.conv_transpose`.  Devices that split height, width or depth
        exchange rows with their neighbours.  The padding of x does not change the result, and the
        result's own padding is undefined.
        """
        by_letter = alphabet(self.declared_axes).by_letter
        axes = convolution.Equation.parse(equation, by_letter)
        windows = axes.windows(kernel.shape, (strides, dilation, base_dilation), padding)
        # `astype` makes a quantized kernel an array.
        operands = (x, reduced_over(kernel.astype(x.dtype), ()))
        slides = dict(zip(axes.spatial, windows, strict=True))
        work = convolution.Work(
            f"convolve {axes}", axes[:2], axes.result, axes.channels, slides, 0, axes.convolve,
            by_letter,
        )  # fmt: skip
        return self._slide(work, operands)

    def pool(
        self,
        axes: str,
        x: Array,
        window: Mapping[str, int],
        *,
        strides: Mapping[str, int] | None = None,
        padding: convolution.Padding = "SAME",
        kind: Literal["max", "sum"] = "max",
    ) -> Array:
        """Returns the maximum or sum of each window, such as `{"Y": 2, "X": 2}` over "BYXD".

        By default, strides are the sizes of the windows.
        """
        strides = {**window, **(strides or {})}
        if unused := strides.keys() - window.keys():
            raise ValueError(f"pool {axes!r}: strides along {[*unused]}, without a window.")
        windows = {
            axis: convolution.Window(size, strides[axis], padding=padding)
            for axis, size in window.items()
        }
        by_letter = alphabet(self.declared_axes).by_letter
        return self._slide(convolution.pooling(axes, windows, kind, by_letter), (x,))

    def _slide(self, work: convolution.Work, operands: Sequence[Array]) -> Array:
        """Slides windows over the first operand; each mesh axis splits one axis of the work."""
        image = work.operands[0]
        if not jnp.issubdtype(operands[0].dtype, jnp.floating):
            raise ValueError(f"{work.name}: images of {operands[0].dtype}.  Legal: floating point.")
        sizes = dict(zip(image, self.unpadded_shape(image, operands[0].shape), strict=True))
        results = work.sizes_of_result(sizes, [x.shape for x in operands])
        shape = self.padded_shape(work.result, tuple(results.values()))
        letters = work.result + work.summed_over  # as if one tensor had all of them
        place = dict(zip(letters, self.place(letters), strict=True))
        padded = dict(zip(work.result, shape, strict=True))
        work.check_divides(padded, {letter: num_shards(entry) for letter, entry in place.items()})
        operands = [self.reshard(*each) for each in zip(operands, work.operands, strict=True)]
        return self.reshard(work.run(operands, sizes, padded, place), work.result)

    def reshard(self, x: Array, axes: str, *, stored: bool = False) -> Array:
        """Reshards x by these letters."""
        if isinstance(x, Operand):
            return x.map(self.reshard, axes, stored=stored)
        return jax.sharding.reshard(x, like_sums(x, self.place(axes, stored=stored)))

    def reshape(self, x: Array, shape: tuple[int, ...], axes: str) -> Array:
        """Reshapes x; the result is sharded by these letters."""
        return jax.lax.reshape(x, shape, out_sharding=self.place(axes))

    def broadcast_like(self, x: Array, axes: str, like: str) -> Array:
        """Prepares x for elementwise work with a tensor of more axes.

        Axes that x lacks get size 1; axes that it has are sharded as in the other tensor.
        """
        places = dict(zip(like, self.place(like), strict=True))
        placed = jax.sharding.reshard(x, jax.P(*(places[letter] for letter in axes)))
        missing = tuple(i for i, letter in enumerate(like) if letter not in axes)
        return jnp.expand_dims(placed, missing)

    def broadcast_in_dim(
        self, x: Array, shape: tuple[int, ...], dimensions: Sequence[int], axes: str
    ) -> Array:
        """Repeats x along new axes; the result is sharded by these letters."""
        return jax.lax.broadcast_in_dim(x, shape, dimensions, out_sharding=self.place(axes))

    def zeros(self, shape: tuple[int, ...], axes: str, dtype: DTypeLike) -> Array:
        """Returns sharded zeros, with padding, which are never unsharded on one device."""
        zero = jnp.zeros((), dtype)
        return self.broadcast_in_dim(zero, self.padded_shape(axes, shape), (), axes)

    def cumsum(self, x: Array, axes: str) -> Array:
        """Returns cumulative sums along the last axis, which is not split."""
        return self.auto_axes(lambda x: jnp.cumsum(x, axis=-1), axes)(x)

    def auto_axes(self, function: Callable[..., Array], axes: str) -> Callable[..., Array]:
        """Lets the compiler shard arrays inside a function; letters shard its result.

        If no axis is split, returns the function itself, which may then run in a `shard_map`.
        """
        place = self.place(axes)
        return jax.sharding.auto_axes(function, out_sharding=place) if any(place) else function

    def take(self, table: Array, ids: Array, axes: str) -> Array:
        """Gathers rows of a table by integer ids; the result is sharded by these letters."""
        if isinstance(table, Quantized):
            values = self.take(table.values, ids, axes).astype(table.dtype)
            return values * self.take(table.scale, ids, axes[:-1] + "1")
        if isinstance(table, Operand):
            table = table.astype(table.dtype)
        place = self.place(axes)
        tokens = place.partitions[: ids.ndim]
        table = reduced_over(table, tokens)
        # A reduced table needs it, and XLA aborts if it shards the ids of stages (jaxlib 0.10.2).
        ids = jax.sharding.reshard(ids, jax.P(*tokens))
        return table.at[ids].get(mode="clip", out_sharding=place)

    def take_last(self, x: Array, index: Array, axes: str) -> Array:
        """Gathers the element at an index along the last axis of a tensor with these axes."""
        if self.place(axes)[-1] is None:
            return jnp.take_along_axis(x, index, axis=-1, mode="clip")
        hit = self.iota(axes, x.shape, axes[-1]) == index
        return jnp.sum(jnp.where(hit, x, 0), axis=-1, keepdims=True)

    def top_k(self, x: Array, k: int, axes: str) -> tuple[Array, Array]:
        """Returns the k largest numbers along the last axis, in order, and their indices.

        Both are replicated along that axis.  If it is split, only k numbers per shard are gathered.
        """
        return top_k.top_k(x, k, self.place(axes))

    def take_along_axis(self, x: Array, index: Array, axes: str) -> Array:
        """Gathers slices of x along its second axis; the index has the first axis as well."""
        place = self.place(axes)
        assert place[1] is None, "the axis that is gathered along must be replicated"
        # Another axis of x may have the mesh axis that splits the first axis of the index.
        index = jax.sharding.reshard(index, jax.P(spec_of(x)[0], None))
        # jnp.take_along_axis raises a ShardingTypeError where x is 1 x 1 (jax 0.10.2).
        return jax.vmap(lambda row, at: jnp.take(row, at, axis=0, mode="clip"))(x, index)

    def iota(self, axes: str, shape: tuple[int, ...], letter: str) -> Array:
        """Returns the index along one axis, as a tensor with all these axes."""
        return jax.lax.broadcasted_iota(
            jnp.int32, shape, axes.index(letter), out_sharding=self.place(axes)
        )

    def random(
        self,
        sample: Callable[..., Array],
        key: Array,
        axes: str,
        shape: tuple[int, ...],
        *,
        stored: bool = False,
    ) -> Array:
        """Draws random numbers whose bits do not depend on the layout."""
        return sample(key, shape=shape, out_sharding=self.place(axes, stored=stored))

    def pads(self, letter: str) -> bool:
        """Returns whether an axis is padded if its size does not divide."""
        return any(rule.pads for each in self.padded_with(letter) for rule in self.rules_for(each))

    def padded_with(self, letter: str) -> str:
        """Returns the letters of axes padded together with this one: queries and keys of a row."""
        axis = alphabet(self.declared_axes).by_letter.get(letter)
        return "LM" if axis is not None and axis.name in ROW_AXES else letter

    def rules_for(self, letter: str) -> tuple[Rule, ...]:
        """Returns the rules of an axis; rules of stored weights come last."""
        texts = self.rules, self.param_rules
        both = (_by_letter(parse_rules(text), self.declared_axes) for text in texts)
        return tuple(rule for by_letter in both for rule in by_letter.get(letter, ()))

    def unpadded_shape(self, axes: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of a tensor without its padding."""
        return shape

    def padded_shape(self, axes: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of a tensor with its padding."""
        return shape

    def mask_padding(self, x: Array, axes: str, letter: str, fill: float) -> Array:
        """Writes `fill` into the padding of one axis."""
        return x

    def with_sizes(self, **sizes: int) -> "Layout":
        """Returns the layout with these sizes of axes without padding, by letter."""
        return self

    def gather_stack(self, tree: Tree) -> Tree:
        """Replicates the first axis of stacked arrays, which loops over it need."""

        def gathered(array: Array) -> Array:
            first, *others = spec_of(array).partitions
            if first is None:  # even a reshard that changes nothing counts as a copy in a trace
                return array
            return jax.sharding.reshard(array, like_sums(array, jax.P(None, *others)))

        return jax.tree.map(gathered, tree)

    def unstack(self, tree: Tree) -> list[Tree]:
        """Splits a tree of stacked arrays along their first axis, after replicating it.

        The gradient is one concatenation; gradients of slices would each add a full array.
        """

        def parts(array: Array) -> list[Array]:
            split = jax.lax.split(array, (1,) * array.shape[0], axis=0)
            return [jax.lax.squeeze(part, (0,)) for part in split]

        leaves, structure = jax.tree.flatten(self.gather_stack(tree))
        slices = zip(*map(parts, leaves), strict=True)
        return [jax.tree.unflatten(structure, arrays) for arrays in slices]

    def replicate(self, x: Array) -> Array:
        """Replicates x on every device.  GShard's annotation."""
        return jax.sharding.reshard(x, jax.P())

    def split(self, x: Array, split_axis: int, parts: int) -> Array:
        """Splits one axis of x (counted from 0) into `parts` parts.  GShard's annotation."""
        return jax.sharding.reshard(x, annotations.by_count(x.ndim, split_axis, parts))

    def shard(self, x: Array, devices: Sequence[object]) -> Array:
        """Places part i, j, ... of x on device `devices[i][j]...`.  GShard's annotation."""
        return jax.sharding.reshard(x, annotations.by_assignment(x.ndim, devices))

    def shard_map(
        self, function: Callable[..., Array], equation: str, *, check_vma: bool = True
    ) -> Callable[..., Array]:
        """Maps a function over the shards of tensors with axes such as "GSD,GS->GSD".

        Operands are resharded by their letters first; an operand named "*" is not.  Only
        collectives (`jax.lax.psum` and the like) reach the shards of other devices.  `check_vma` is
        passed to `jax.shard_map`; kernels need it to be False.
        """
        terms, result = equation.split("->")

        def mapped(*operands: Array) -> Array:
            pairs = zip(operands, terms.split(","), strict=True)
            placed = tuple(spec_of(x) if axes == "*" else self.place(axes) for x, axes in pairs)
            out = self.place(result)
            run = jax.shard_map(function, in_specs=placed, out_specs=out, check_vma=check_vma)
            return run(*map(jax.sharding.reshard, operands, placed))

        return mapped

    def replicated(self) -> "Layout":
        """Returns the layout without rules: every tensor is replicated on every device."""
        return dataclasses.replace(self, rules="", param_rules="")

    def without(self, *axes: str, mesh_axes: Sequence[str] = ()) -> "Layout":
        """Returns the layout without the rules of some axes, or of mesh axes."""

        def kept(text: str) -> str:
            rules = (r for r in parse_rules(text) if r.axis not in axes)
            return ";".join(str(rule) for rule in rules if rule.mesh_axis not in mesh_axes)

        return dataclasses.replace(self, rules=kept(self.rules), param_rules=kept(self.param_rules))
