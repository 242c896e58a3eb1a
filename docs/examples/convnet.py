"""A convolutional network that classifies images, in a module outside of Meshloom.

He et al. 2016, "Identity Mappings in Deep Residual Networks", with the Transformer's norms.  A run
file imports this module:

    meshloom train --model_dir=runs/glyphs --gin_import_path=docs/examples \
      --gin_file=docs/examples/glyphs.gin
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from image_task import ImageTask as ImageTask  # for run files

from configs.errors import UserError
from configs.spec import Count, Positive, spec
from layouts.axes import Axis
from layouts.layout import Layout
from layouts.padding import pad_batch
from models.api import Batch, ModelSpec, Params
from models.initializers import Weights
from models.network_model import NetworkModel
from models.norms import normed
from models.precision import Precision

Array = jax.Array


@spec
class ConvNet(ModelSpec):
    """Makes a network that classifies images of any size."""

    axes: ClassVar[tuple[Axis, ...]] = (Axis("Z", "channels", "colours of a pixel"),)

    vocab: Count
    """Number of classes, at least the number of labels in the task."""
    channels: Count = 1
    """Numbers per pixel: 1 for grey, 3 for RGB."""
    d_model: Count
    """Width of the residual stream."""
    d_ff: Count
    """Width inside a block, between its two convolutions."""
    layers: Count
    """Number of blocks."""
    stride_every: Count = 2
    """Blocks 0, `stride_every`, 2 `stride_every`, ... halve height and width."""
    kernel: Count = 3
    """Rows and columns of a kernel."""
    norm_epsilon: Positive = 1e-6
    """Added to the mean square in all norms."""
    precision: Precision = Precision()
    """Types of stored weights and of computation."""

    def __post_init__(self) -> None:
        if self.precision.products != "compute":
            raise UserError(
                f"Precision.products = {self.precision.products!r}: @ConvNet() rounds no "
                "products.  Legal: 'compute'."
            )

    @property
    def array_shapes(self) -> dict[str, tuple[int | None, ...]]:
        return {"images_BYXZ": (None, None, self.channels)}

    @property
    def sizes(self) -> dict[str, int]:
        """Returns the size of each axis of the weights, by letter."""
        return {
            "V": self.vocab_rows, "N": self.layers, "D": self.d_model, "F": self.d_ff,
            "Z": self.channels, "O": self.kernel, "P": self.kernel,
        }  # fmt: skip

    def model(self, layout: Layout) -> "ConvNetModel":
        return ConvNetModel(self, layout)


class ConvBlock(nnx.Module):
    """Adds two convolutions to its input, or halves the input with them."""

    def __init__(self, spec: ConvNet, weights: Weights):
        self.spec = spec
        self.scale_D = weights.ones("D")
        self.wi_OPDF = weights.normal("OPDF", fan_in="OPD")
        self.wo_OPFD = weights.normal("OPFD", fan_in="OPF")

    def __call__(self, layout: Layout, x_BYXD: Array, stride: int) -> tuple[Layout, Array]:
        """Returns the layout with the size of the output, and the output."""
        y_BYXD = normed(layout, x_BYXD, self.scale_D[...], "BYXD", self.spec.norm_epsilon)
        h_BYXF = layout.convolve(
            "BYXD,OPDF->BYXF", y_BYXD, self.wi_OPDF[...], strides=(stride, stride)
        )
        _, height, width, _ = layout.unpadded_shape("BYXD", x_BYXD.shape)
        layout = layout.with_sizes(Y=-(-height // stride), X=-(-width // stride))
        y_BYXD = layout.convolve("BYXF,OPFD->BYXD", jax.nn.relu(h_BYXF), self.wo_OPFD[...])
        return layout, y_BYXD if stride > 1 else x_BYXD + y_BYXD


class ConvNetwork(nnx.Module):
    """Computes one vector for each image."""

    def __init__(self, spec: ConvNet, weights: Weights):
        self.spec = spec
        self.stem_OPZD = weights.normal("OPZD", fan_in="OPZ")
        self.layers_N = ConvBlock(spec, weights.stacked("N"))
        self.scale_D = weights.ones("D")
        self.softmax_VD = weights.normal("VD", fan_in="D")

    @jax.named_scope("convolutions")
    def __call__(self, layout: Layout, images_BYXZ: Array) -> Array:
        """Returns the mean over the pixels of each image, in the shape of a text of one token."""
        to_compute = self.spec.precision.to_compute
        images_BYXZ = to_compute(layout.reshard(images_BYXZ, "BYXZ")) / 255
        x_BYXD = layout.convolve("BYXZ,OPZD->BYXD", images_BYXZ, to_compute(self.stem_OPZD[...]))
        graph, stacked = nnx.split(self.layers_N)
        for index, weights in enumerate(layout.unstack(to_compute(stacked))):
            block = nnx.merge(graph, weights)
            stride = 1 if index % self.spec.stride_every else 2
            layout, x_BYXD = block(layout, x_BYXD, stride)
        x_BYXD = normed(layout, x_BYXD, self.scale_D[...], "BYXD", self.spec.norm_epsilon)
        for axis in "YX":
            x_BYXD = layout.mask_padding(x_BYXD, "BYXD", axis, 0)
        _, height, width, _ = layout.unpadded_shape("BYXD", x_BYXD.shape)
        x_BD = jnp.sum(x_BYXD, axis=(1, 2), dtype=float) / (height * width)
        return to_compute(layout.reshard(x_BD[:, None], "BLD"))

    def output_weights(self) -> Array:
        return self.spec.precision.to_compute(self.softmax_VD[...])


@dataclasses.dataclass(frozen=True)
class ConvNetModel(NetworkModel[ConvNetwork]):
    """Implements `models.api.Model` for a convolutional network under a layout."""

    spec: ConvNet

    def make_network(self, weights: Weights) -> ConvNetwork:
        return ConvNetwork(self.spec, weights)

    def hidden(self, params: Params, batch: Batch) -> tuple[Layout, Batch, Array, Array]:
        _, height, width, _ = batch["images_BYXZ"].shape
        layout, batch = pad_batch(self.layout.with_sizes(Y=height, X=width), batch, {})
        network = self.network(params)
        x_BLD = network(layout, batch["images_BYXZ"])
        return layout, batch, x_BLD, network.output_weights()
