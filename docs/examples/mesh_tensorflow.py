"""The two networks of Mesh-TensorFlow's README and examples, for Mesh-TensorFlow's layout strings.

Shazeer et al. 2018 (https://github.com/tensorflow/mesh).  A run file imports this module:

    meshloom train --model_dir=runs/mnist --gin_import_path=docs/examples \
      --gin_file=docs/examples/mnist.gin
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from configs.errors import UserError
from configs.spec import Count, spec
from layouts.axes import Axis
from layouts.layout import Layout
from layouts.padding import pad_batch, with_axes
from models.api import Batch, ModelSpec, Params
from models.initializers import Weights
from models.network_model import NetworkModel
from models.precision import Precision

Array = jax.Array
IO = Axis("I", "io", "numbers of an example")
HIDDEN = Axis("H", "hidden", "width of the hidden layer", pads=True)


def toy_loss(layout: Layout, x_BI: Array, wi_IH: Array, wo_HI: Array) -> Array:
    """Returns the loss of the toy model, which learns to repeat its input."""
    layout = with_axes(layout, IO, HIDDEN)
    h_BH = jax.nn.relu(layout.einsum("BI,IH->BH", x_BI, wi_IH))
    y_BI = layout.einsum("BH,HI->BI", h_BH, wo_HI)
    return jnp.mean(jnp.square(y_BI - layout.reshard(x_BI, "BI")))


@spec
class Mnist(ModelSpec):
    """Makes the README's network: one hidden layer over all pixels of an image."""

    # Meshloom's softmax expects the letters D and V, so they name these axes here.
    axes: ClassVar[tuple[Axis, ...]] = (
        Axis("R", "rows", "of an image"),
        Axis("C", "cols", "of an image"),
        Axis("D", "hidden", "width of the hidden layer"),
        Axis("V", "classes", "of images", pads=True),
        Axis("Z", "channels", "colours of a pixel"),
    )

    rows: Count = 28
    """Rows of an image."""
    cols: Count = 28
    """Columns of an image."""
    hidden: Count = 1024
    """Width of the hidden layer."""
    precision: Precision = Precision()
    """Types of stored weights and of computation."""

    def __post_init__(self) -> None:
        if self.precision.products != "compute":
            raise UserError(
                f"Precision.products = {self.precision.products!r}: @Mnist() rounds no "
                "products.  Legal: 'compute'."
            )

    @property
    def array_shapes(self) -> dict[str, tuple[int | None, ...]]:
        return {"images_BYXZ": (self.rows, self.cols, 1)}

    @property
    def sizes(self) -> dict[str, int]:
        return {"R": self.rows, "C": self.cols, "D": self.hidden, "V": self.vocab_rows}

    def model(self, layout: Layout) -> "MnistModel":
        return MnistModel(self, layout)


class MnistNetwork(nnx.Module):
    """Computes the hidden layer."""

    def __init__(self, spec: Mnist, weights: Weights):
        self.spec = spec
        weights = weights.with_axes(*spec.axes)
        self.w1_RCD = weights.normal("RCD", fan_in="RC")
        self.w2_VD = weights.normal("VD", fan_in="D")

    def __call__(self, layout: Layout, images_BYXZ: Array) -> Array:
        """Returns the hidden layer of each image, in the shape of a text of one token."""
        to_compute = self.spec.precision.to_compute
        images_BRC = to_compute(layout.reshard(images_BYXZ[..., 0], "BRC")) / 255
        h_BD = jax.nn.relu(layout.einsum("BRC,RCD->BD", images_BRC, to_compute(self.w1_RCD[...])))
        return layout.reshard(h_BD[:, None], "BLD")


@dataclasses.dataclass(frozen=True)
class MnistModel(NetworkModel[MnistNetwork]):
    """Implements `models.api.Model`."""

    spec: Mnist

    def make_network(self, weights: Weights) -> MnistNetwork:
        return MnistNetwork(self.spec, weights)

    def hidden(self, params: Params, batch: Batch) -> tuple[Layout, Batch, Array, Array]:
        layout, batch = pad_batch(self.layout, batch, {})
        network = self.network(params)
        x_BLD = network(layout, batch["images_BYXZ"])
        return layout, batch, x_BLD, self.spec.precision.to_compute(network.w2_VD[...])
