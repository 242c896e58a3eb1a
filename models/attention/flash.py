"""Chooses the kernel that computes attention, or explains why attention is plain.

Flash attention (Dao et al. 2022) computes the softmax in blocks of keys, so that logits are never
written to memory.  The kernels are JAX's and tokamax's.
"""

import functools
import itertools
import tomllib
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
from jax import Array

from layouts.einsum import has_tpu_kernels, mesh_device
from layouts.layout import Layout
from layouts.shards import mesh_axes, num_shards
from models.attention.mosaic import missing_mosaic, mosaic_attention
from models.attention.plain import Operands
from models.attention.triton import missing_triton, triton_attention
from models.sizes import Sizes

Implementation = Literal["auto", "plain", "flash"]
KernelName = Literal["splash", "mosaic", "triton"]
GPU_KERNELS: tuple[KernelName, ...] = ("mosaic", "triton")
NEW_GPUS = ("NVIDIA",)  # GPUs before Ampere are named Tesla and Quadro
HOPPERS = ("NVIDIA H", "NVIDIA GH")  # H100, H200, H20, GH200
BLOCK = 128
MIN_WIDTH, MAX_WIDTH = 16, 256  # of a head


class Kernel(NamedTuple):
    """Holds a kernel, and whether it is interpreted, which is slow."""

    name: KernelName
    interpret: bool = False


class Call(NamedTuple):
    """Holds what decides whether a kernel can compute an attention."""

    attention: Any
    """Its settings, a `SoftmaxAttention`."""
    sizes: Sizes
    layout: Layout
    lengths: tuple[int, int]
    """Of the queries and of the keys."""
    is_cross: bool
    """Whether the keys belong to a source."""
    training: bool
    has_bias: bool
    """Whether a bias is added to the logits."""

    @property
    def cases(self) -> dict[str, Any]:
        """Returns whether each case in flash.toml applies, by name."""
        attention = self.attention
        *queries, q_width = (mesh_axes(entry) for entry in self.layout.place("BJQLK"))
        *_, memory, width = (mesh_axes(entry) for entry in self.layout.place("BJMK"))
        shards = num_shards(queries[3])  # devices that share the queries of a row and head
        window = None if self.is_cross else attention.window
        return {
            "is_cross": self.is_cross,
            "has_bias": self.has_bias,
            "has_dropout": self.training and attention.has_dropout,
            "has_cap": attention.logit_cap is not None,
            "has_sinks": attention.sinks,
            "has_narrow_values": attention.has_narrow_values,
            "splits_queries": shards > 1,
            # The width of heads is split, or keys are over mesh axes that do not split queries.
            "splits_keys_alone": q_width or width or {*memory} - {*itertools.chain(*queries)},
            "has_parts_of_blocks": any(length % (BLOCK * shards) for length in self.lengths),
            "has_short_window": window is not None and window < self.lengths[1],
            "has_unfit_width": not MIN_WIDTH <= self.sizes.d_kv <= MAX_WIDTH,
            "is_float32": self.sizes.precision.compute == "float32",
            "has_x64": jax.config.read("jax_enable_x64"),
        }


LIMITS = [
    {**limit, "case": limit["case"].format(**globals())}
    for limit in tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["limits"]
]
"""The cases in which attention is plain, from flash.toml."""


class Choice(NamedTuple):
    """Names the kernel that computes an attention, or explains why attention is plain."""

    kernel: Kernel | None
    reason: str = ""
    """Why there is no kernel, or not the fastest."""

    def __str__(self) -> str:
        name = "plain" if self.kernel is None else self.kernel.name
        return f"{name}, {self.reason}" if self.reason else name


def choose(call: Call) -> Choice:
    """Chooses the kernel for the devices of the current mesh."""
    if call.attention.implementation == "plain":
        return Choice(None, "implementation = 'plain'")
    reason = ""
    for kernel in kernels_of_mesh(interpreted=call.attention.implementation == "flash"):
        limits = (x for x in LIMITS if kernel.name in x["kernels"] and call.cases[x["when"]])
        if not (problem := missing(kernel.name)) and (limit := next(limits, None)):
            problem = f"{limit['case']}: {limit['reason']}"
        if problem is None:
            return Choice(kernel, reason)
        reason = problem
    return Choice(None, reason or "there is no kernel for these devices")


def missing(name: KernelName) -> str | None:
    """Returns why no attention can use a kernel, or None."""
    checks = {"mosaic": missing_mosaic, "triton": missing_triton}
    return checks[name]() if name in checks else None


def kernels_of_mesh(*, interpreted: bool) -> tuple[Kernel, ...]:
    """Returns the kernels for the devices of the current mesh; on CPUs, an interpreted one."""
    device = mesh_device()
    if device is None:
        return ()
    if has_tpu_kernels():
        return (Kernel("splash"),)
    if device.platform == "gpu" and device.device_kind.startswith(NEW_GPUS):
        is_hopper = device.device_kind.startswith(HOPPERS)
        return tuple(map(Kernel, GPU_KERNELS if is_hopper else ("triton",)))
    if device.platform == "cpu" and interpreted:
        return (Kernel("splash", interpret=True),)
    return ()


def flash_attention(
    layout: Layout,
    kernel: Kernel,
    operands: Operands,
    segments_BL: Array,
    segments_BM: Array,
    *,
    causal: bool,
    window: int | None = None,
    logit_cap: float | None = None,
) -> Array:
    """Averages values by the softmax of query-key products, in blocks and within segments."""
    assert operands.sink_JQ is None or kernel.name == "splash"
    settings: dict[str, Any] = {"causal": causal, "window": window, "logit_cap": logit_cap}
    if kernel.name == "triton":
        assert window is None and logit_cap is None
        attend = functools.partial(triton_attention, causal=causal, interpret=kernel.interpret)
    elif kernel.name == "mosaic":
        attend = functools.partial(mosaic_attention, **settings)
    else:  # imported here, because most runs on CPUs never need it
        from models.attention.splash import splash_attention

        settings |= {"entry": layout.place("BJQLK")[3], "interpret": kernel.interpret}
        attend = functools.partial(splash_attention, **settings)
    # Lowercase axes are not split.  Axes in parentheses claim their mesh axes although the tensor
    # lacks them.  Keys have the letter of queries, and are split in the same way.
    arrays = [*operands[:3], segments_BL, segments_BM]
    inputs = "BJQLk,BJ(Q)Lk,BJ(Q)Lk,B(J)(Q)L,B(J)(Q)L"
    if operands.sink_JQ is not None:
        arrays, inputs = [*arrays, operands.sink_JQ], f"{inputs},(B)JQ(L)"
    return layout.shard_map(attend, f"{inputs}->BJQLk", check_vma=False)(*arrays)
