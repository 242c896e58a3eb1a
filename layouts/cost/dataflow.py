"""Tracks which equations of a trace make and use each value; counts FLOPs."""

import functools
import math
from collections.abc import Iterator, Mapping
from operator import add, floordiv, mul, sub
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Jaxpr, Literal, jaxprs_in_params

from layouts.cost.collectives import checkout_file
from layouts.shards import Entry, mesh_axes


def convolution_flops(eqn: Any) -> int:
    """Counts the FLOPs of a traced convolution: two per multiplication, except with padding."""
    settings = eqn.params
    left, kernel, out = (v.aval.shape for v in (*eqn.invars, *eqn.outvars))
    of_left, of_kernel, of_out = settings["dimension_numbers"]
    pairs = math.prod(
        valid_pairs(
            left[of_left[axis]], kernel[of_kernel[axis]], out[of_out[axis]],
            stride=settings["window_strides"][axis - 2], dilate=settings["lhs_dilation"][axis - 2],
            spread=settings["rhs_dilation"][axis - 2], low=settings["padding"][axis - 2][0],
        )
        for axis in range(2, len(left))
    )  # fmt: skip
    batch = left[of_left[0]] // settings["batch_group_count"]
    return 2 * batch * out[of_out[1]] * kernel[of_kernel[1]] * pairs


@functools.cache
def valid_pairs(
    size: int, kernel: int, out: int, *, stride: int, dilate: int, spread: int, low: int
) -> int:
    """Counts the pairs of output and kernel indices along one axis that read an input."""
    index = np.arange(out)[:, None] * stride + np.arange(kernel) * spread - low
    inside = (index >= 0) & (index <= (size - 1) * dilate) & (index % dilate == 0)
    return int(np.sum(inside))


# Operations that only give the same numbers another shape or type.
VIEWS = ("reshape", "transpose", "convert_element_type", "squeeze", "broadcast_in_dim")
MOVES = (*VIEWS, "reshard", "pvary")
SLICES = ("dynamic_slice", "gather")
# JAX replicates the operands of these and reshards the result; every compiler removes both.
FRAMED = ("gather", "scatter-add", "random_bits")
KERNEL, MOSAIC_KERNEL = "pallas_call", "mpmd_map"
KERNELS = {KERNEL, MOSAIC_KERNEL}
CONVOLUTION = "conv_general_dilated"
PRODUCTS = ("dot_general", CONVOLUTION)
MATRIX_UNITS = (128, 256)
"""Rows and columns of the matrix units of TPUs; v6e and tpu7x have the larger ones."""
EXPONENTIALS = ("exp", "exp2")
KEY_BYTES = 8  # of a random key, whose dtype has no itemsize


class Flow:
    """Maps the values of one jaxpr to the equations that make and use them."""

    def __init__(self, jaxpr: Jaxpr) -> None:
        self.makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        self.users: dict[Any, list[Any]] = {}
        for eqn in jaxpr.eqns:
            for v in eqn.invars:
                if not isinstance(v, Literal):
                    self.users.setdefault(v, []).append(eqn)

    def maker(self, v: Any) -> Any | None:
        """Returns the equation that makes a value; None for arguments and constants."""
        return None if isinstance(v, Literal) else self.makers.get(v)

    def root(self, v: Any) -> Any:
        """Returns the value that this one is a view of."""
        while (eqn := self.maker(v)) is not None and eqn.primitive.name in VIEWS:
            v = eqn.invars[0]
        return v

    def user(self, v: Any) -> Any | None:
        """Returns the only equation that uses a value, views skipped; None if there are several."""
        while len(users := self.users.get(v, [])) == 1 and users[0].primitive.name in VIEWS:
            v = users[0].outvars[0]
        return users[0] if len(users) == 1 else None

    def frames(self, eqn: Any) -> bool:
        """Returns whether an equation is a reshard next to a lookup or a random draw."""
        if eqn is None or eqn.primitive.name != "reshard":
            return False
        around = (self.maker(self.root(eqn.invars[0])), self.user(eqn.outvars[0]))
        return any(near is not None and near.primitive.name in FRAMED for near in around)

    def before(self, v: Any) -> Any:
        """Returns an operand of a lookup before its surrounding reshard."""
        maker: Any = self.maker(self.root(v))
        return maker.invars[0] if self.frames(maker) else v

    def after(self, v: Any) -> Any:
        """Returns the result of a lookup after its surrounding reshard."""
        user: Any = self.user(v)
        return user.outvars[0] if self.frames(user) else v

    def last_summand(self, eqn: Any) -> Any | None:
        """Returns the equation of the last sum added to this one; None if nothing is added."""
        last = None
        while (user := self.user(eqn.outvars[0])) is not None:
            if user.primitive.name != "add_any":
                break
            eqn, last = user, self.maker(self.root(user.invars[1]))
        return last


def places(aval: Any) -> tuple[Entry, ...]:
    """Returns the sharding of a type, one entry per axis; None for replicated axes."""
    sharding = getattr(aval, "sharding", None)
    spec = sharding.spec.partitions if sharding is not None else ()
    return spec + (None,) * (len(getattr(aval, "shape", ())) - len(spec))


def local_bytes(aval: Any, mesh: Mapping[str, int]) -> int:
    """Counts the bytes of a tensor on one device; 0 if it is in host memory."""
    return 0 if is_on_host(aval) or not hasattr(aval, "shape") else stored_bytes(aval, mesh)


def stored_bytes(aval: Any, mesh: Mapping[str, int]) -> int:
    """Counts the bytes of a device's shard of a tensor, in device or host memory."""
    return local_size(aval, mesh) * getattr(aval.dtype, "itemsize", KEY_BYTES)


def is_on_host(aval: Any) -> bool:
    """Returns whether a tensor is in host memory."""
    return bool(getattr(aval, "memory_space", None) == jax.memory.Space.Host)


def local_size(aval: Any, mesh: Mapping[str, int]) -> int:
    """Counts the elements of a tensor on one device."""
    shape = getattr(aval, "shape", ())
    shards = (math.prod(mesh[name] for name in mesh_axes(entry)) for entry in places(aval))
    return math.prod(-(-n // k) for n, k in zip(shape, shards, strict=True))


def bodies(eqn: Any) -> tuple[list[Jaxpr], int]:
    """Returns the jaxprs inside an equation, and how often they run; of branches, the costliest.

    Of branches for several platforms, this is the last: the one for accelerators.  A call without
    results, which rematerialization leaves if it saves the results, does not run.
    """
    inner = list(jaxprs_in_params(eqn.params)) if eqn.outvars or eqn.effects else []
    if eqn.primitive.name == "cond" and inner:
        inner = [max(reversed(inner), key=total_flops)]
    if eqn.primitive.name == KERNEL:
        return inner, math.prod(n for n in eqn.params["grid_mapping"].grid if isinstance(n, int))
    return inner, eqn.params["length"] if eqn.primitive.name == "scan" else 1


def executed_equations(jaxpr: Jaxpr, times: int = 1) -> Iterator[tuple[Any, int]]:
    """Yields all equations of a trace and how often they run; open loops count as one iteration."""
    for eqn in jaxpr.eqns:
        yield eqn, times
        inner, trip_count = bodies(eqn)
        for body in inner:
            yield from executed_equations(body, times * trip_count)


def product_flops(eqn: Any) -> int:
    """Counts the FLOPs of a product on all devices, without repeated computation."""
    if eqn.primitive.name == CONVOLUTION:
        return convolution_flops(eqn)
    (summed, _), _ = eqn.params["dimension_numbers"]
    inner = math.prod(eqn.invars[0].aval.shape[axis] for axis in summed)
    return 2 * inner * math.prod(eqn.outvars[0].aval.shape)


def total_flops(jaxpr: Jaxpr) -> int:
    """Counts the FLOPs of all products of a trace, on all devices."""
    executed = executed_equations(jaxpr)
    return sum(n * product_flops(eqn) for eqn, n in executed if eqn.primitive.name in PRODUCTS)


def line_of(eqn: Any) -> str:
    """Returns the line of this checkout that made an equation, "models/layers/blocks.py:62"."""
    frames = eqn.source_info.traceback.frames if eqn.source_info.traceback else ()
    lines = (f"{checkout_file(frame.file_name)}:{frame.line_num}" for frame in frames)
    return next((line for line in lines if not line.startswith(":")), "")


def bytes_read(jaxpr: Jaxpr, v: Any, mesh: Mapping[str, int]) -> int:
    """Counts the bytes of a value that a device reads; only the slices, if it is only sliced.

    For example, a few tokens read only the weights of their experts.
    """
    flow, read, all_bytes = Flow(jaxpr), 0, local_bytes(v.aval, mesh)
    for eqn in flow.users.get(v, ()):
        name, (inner, trip_count) = eqn.primitive.name, bodies(eqn)
        if name in SLICES:
            read += local_bytes(flow.after(eqn.outvars[0]).aval, mesh)
        elif name in MOVES:
            read += bytes_read(jaxpr, eqn.outvars[0], mesh)
        elif name in KERNELS and eqn.params["cost_estimate"] is not None:
            read += eqn.params["cost_estimate"].bytes_accessed
        elif inner and name not in KERNELS:
            body = inner[-1]  # of a loop, whose operands begin with constants of its condition
            arguments = zip(reversed(eqn.invars), reversed(body.invars), strict=False)
            inside = (bytes_read(body, argument, mesh) for x, argument in arguments if x is v)
            read += trip_count * sum(inside)
        else:
            read += all_bytes
    return min(read, all_bytes)


# Operations by which kernels compute the bounds of loops from a block's position in the grid.
INDEX_OPS = {"add": add, "sub": sub, "mul": mul, "div": floordiv}
Index = np.ndarray | int


class KernelWork(NamedTuple):
    """Holds what one call of a kernel computes on one device."""

    flops: float
    """The estimate of its author, or the FLOPs of the blocks that run."""
    flops_128: float = 0.0
    """The same, with the short axes of products padded to matrix units of 128 x 128."""
    flops_256: float = 0.0
    exponentials: float = 0.0


def kernel_work(eqn: Any) -> KernelWork:
    """Counts the work of a kernel: the estimate of its author, or everything in its body."""
    estimate = eqn.params["cost_estimate"]
    if estimate is not None:
        return KernelWork(estimate.flops)
    if eqn.primitive.name == MOSAIC_KERNEL:
        return KernelWork(mosaic_flops(eqn))
    (body,), blocks = bodies(eqn)
    flops = blocks * causal_share(eqn) * block_flops(body, eqn.params["grid_mapping"].grid)
    # Loops differ in length, but the shares are the same in every iteration.
    sums = np.zeros(len(KernelWork._fields))  # in the order of the fields
    for inner, times in executed_equations(body):
        if inner.primitive.name == "dot_general":
            product, out = product_flops(inner), inner.outvars[0].aval.shape
            sides = np.array([product // (2 * math.prod(out)), out[-1]])  # of the matrix
            padded = (np.prod(-(-sides // unit) * unit / sides) for unit in MATRIX_UNITS)
            sums[:-1] += times * product * np.array([1, *padded])
        elif inner.primitive.name in EXPONENTIALS:
            sums[-1] += times * math.prod(inner.outvars[0].aval.shape)
    return KernelWork(flops, *(flops / max(sums[0], 1) * sums[1:]))


def mosaic_flops(eqn: Any) -> int:
    """Counts the FLOPs of tokamax's attention, whose operands may hold each query's key range.

    Causal attention has first keys but no ends, and computes half of the blocks.  For gradients,
    two kernels together compute seven products.
    """
    q_BLHK, k_BMJK, v_BMJV, *others = (v.aval for v in eqn.invars)
    rows, length, heads, width = q_BLHK.shape
    ranges = [x for x in others if x.dtype == "int32" and x.shape[-1] == length]
    products = 1 if eqn.params["name"].startswith("flash_attention") else 1.75
    flops = 2 * rows * heads * length * k_BMJK.shape[1] * (width + v_BMJV.shape[-1])
    return round(products * flops / (1 if len(ranges) > 1 else 2))


def causal_share(eqn: Any) -> float:
    """Returns the share of its blocks that splash attention computes under a causal mask.

    The kernel reads from an array which blocks are masked, and a trace has no values.  Only under a
    causal mask does it read the positions of queries.  Blocks of queries and keys have equal sizes,
    and devices that share the queries of a row compute equally many blocks.  The grid is as wide as
    the longest row (for gradients of keys, column) of blocks, so a window makes it narrow.
    """
    body = eqn.params["jaxpr"]
    refs = dict(zip(body.debug_info.arg_names or (), range(len(body.invars)), strict=False))
    is_splash = eqn.params["name"].startswith("splash")
    if not is_splash or "q_sequence_ref" not in refs:
        return 1.0
    queries, keys = (
        eqn.invars[refs[name]].aval.shape[-2] // body.invars[refs[name]].aval.shape[-2]
        for name in ("q_ref", "k_ref")
    )
    window, share = eqn.params["grid_mapping"].grid[-1], 1.0
    if "_dkv_" in eqn.params["name"]:  # the grid covers a device's queries in each column
        window, share = (keys, 1.0) if window == queries else (window, queries / keys)
    return share * (1 - (window - 1) / (2 * keys))


def work_by_kernel(jaxpr: Jaxpr) -> dict[str, KernelWork]:
    """Returns the work per call of each kernel of a trace, by name: the mean of its calls."""
    calls: dict[str, list[KernelWork]] = {}
    for eqn, times in executed_equations(jaxpr):
        if eqn.primitive.name in KERNELS:
            calls.setdefault(eqn.params["name"], []).extend([kernel_work(eqn)] * times)
    return {name: KernelWork(*np.mean(works, axis=0).tolist()) for name, works in calls.items()}


def block_flops(body: Jaxpr, grid: tuple[int, ...]) -> float:
    """Counts the FLOPs of a block: the mean over the grid, as loops may differ in length."""
    indices: dict[Any, Index] = {}
    flops = 0.0
    for eqn in body.eqns:
        name = eqn.primitive.name
        known = [index_of(v, indices) for v in eqn.invars]
        operands = [index for index in known if index is not None]
        if name == "program_id":
            axis = eqn.params["axis"]
            shape = [size if i == axis else 1 for i, size in enumerate(grid)]
            indices[eqn.outvars[0]] = np.arange(grid[axis]).reshape(shape)
        elif name in INDEX_OPS and len(operands) == 2:
            indices[eqn.outvars[0]] = INDEX_OPS[name](*operands)
        elif name == "dot_general":
            flops += product_flops(eqn)
        else:
            inner, trip_count = bodies(eqn)
            times = mean_trip_count(eqn, known) if name == "while" else trip_count
            flops += times * math.fsum(total_flops(jaxpr) for jaxpr in inner)
    return flops


def index_of(v: Any, indices: dict[Any, Index]) -> Index | None:
    """Returns an integer that follows from the position in the grid; None for other values."""
    if isinstance(v, Literal):
        value = np.asarray(v.val)
        return int(value) if value.dtype.kind == "i" else None
    return indices.get(v)


def mean_trip_count(loop: Any, operands: list[Index | None]) -> float:
    """Returns the mean trip count of a loop "while index < bound"; 1 if either is unknown."""
    condition = loop.params["cond_jaxpr"].jaxpr
    first_carry = loop.params["cond_nconsts"] + loop.params["body_nconsts"]
    variables = condition.invars[loop.params["cond_nconsts"] :]
    carried = dict(zip(variables, operands[first_carry:], strict=True))
    last_eqn = condition.eqns[-1]
    if last_eqn.primitive.name != "lt" or any(isinstance(v, Literal) for v in last_eqn.invars):
        return 1.0
    first, last = map(carried.get, last_eqn.invars)
    if first is None or last is None:
        return 1.0
    return float(np.mean(np.maximum(np.subtract(last, first), 0)))
