"""A 3-D U-Net that segments volumes, and its data, in one module outside of Meshloom.

Çiçek et al. 2016, "3D U-Net", with the Transformer's norms.  Mesh-TensorFlow's README names such a
model as a use case: examples that are too large for one device.  A run file imports this module:

    meshloom train --model_dir=runs/unet --gin_import_path=docs/examples \
      --gin_file=docs/examples/unet.gin
    python docs/examples/dice.py --model_dir=runs/unet      # the Dice score of the test volumes
"""

import dataclasses
import glob
import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np
from flax import nnx

from configs.errors import UserError
from configs.spec import Count, Positive, spec
from data.packing.pack import Packed, place_dtype
from data.packing.rows import Counts, Rows, hashed_pair, read_rows
from data.sources.pairs import Pair, Pairs
from data.task import PackChunk, PartOfText, Task, hashed
from data.tokenizers.labels import Labels
from data.vocabs import Vocabs
from layouts.axes import Axis
from layouts.layout import Layout
from layouts.padding import pad_batch
from models.api import Batch, ModelSpec, Params
from models.initializers import Weights
from models.network_model import NetworkModel
from models.norms import normed
from models.precision import Precision

Array = jax.Array
Shape = tuple[int, int, int]
CLASSES = ("background", "object")
HALF = {"Z": 2, "Y": 2, "X": 2}
VOLUME = "BZYXD"


@spec
class UNet(ModelSpec):
    """Makes a U-Net.  Each level has half the size and twice the channels of the level before."""

    axes: ClassVar[tuple[Axis, ...]] = (
        Axis("Z", "depth", "slices of a volume", pads=True),
        Axis("R", "kernel_depth", "slices of a convolution's kernel", slides="Z"),
        Axis("D", "d_model", "channels"),
        Axis("F", "features", "channels that a convolution makes"),
    )

    d_model: Count
    """Channels of the first level."""
    levels: Count = 3
    """Number of sizes of the volume on the way down; 1 is a plain stack of convolutions."""
    kernel: Count = 3
    """Voxels along each side of a kernel."""
    norm_epsilon: Positive = 1e-6
    """Added to the mean square in all norms."""
    precision: Precision = Precision()
    """Types of stored weights and of computation."""

    def __post_init__(self) -> None:
        if self.precision.products != "compute":
            raise UserError(
                f"Precision.products = {self.precision.products!r}: @UNet() rounds no "
                "products.  Legal: 'compute'."
            )

    @property
    def array_shapes(self) -> dict[str, tuple[int | None, ...]]:
        return {"volumes_BZYX": (None, None, None)}

    @property
    def sizes(self) -> dict[str, int]:
        kernels = dict.fromkeys("ROP", self.kernel)
        return {"V": self.vocab_rows, "D": self.d_model, "F": self.d_model, **kernels}

    def model(self, layout: Layout) -> "UNetModel":
        return UNetModel(self, layout)


class Level(nnx.Module):
    """Computes two convolutions, each with a norm; the first may also read a second volume."""

    def __init__(self, spec: UNet, weights: Weights, given: int, width: int, skipped: int = 0):
        self.spec = spec
        self.wi_ROPDF = weights.with_sizes(D=given, F=width).normal("ROPDF", fan_in="ROPD")
        self.ws_ROPDF = (
            weights.with_sizes(D=skipped, F=width).normal("ROPDF", fan_in="ROPD")
            if skipped
            else None
        )
        weights = weights.with_sizes(D=width, F=width)
        self.wo_ROPFD = weights.normal("ROPFD", fan_in="ROPF")
        self.scale_F, self.shift_F = weights.ones("F"), weights.zeros("F")
        self.scale_D, self.shift_D = weights.ones("D"), weights.zeros("D")

    def __call__(self, layout: Layout, x_BZYXD: Array, skip_BZYXD: Array | None = None) -> Array:
        into, out = "BZYXD,ROPDF->BZYXF", "BZYXF,ROPFD->BZYXD"
        h_BZYXF = layout.convolve(into, x_BZYXD, self.wi_ROPDF[...])
        if skip_BZYXD is not None:  # as one convolution of both, concatenated along the channels
            assert self.ws_ROPDF is not None
            h_BZYXF += layout.convolve(into, skip_BZYXD, self.ws_ROPDF[...])
        h_BZYXF = self.activate(layout, h_BZYXF, "BZYXF", self.scale_F[...], self.shift_F[...])
        y_BZYXD = layout.convolve(out, h_BZYXF, self.wo_ROPFD[...])
        return self.activate(layout, y_BZYXD, VOLUME, self.scale_D[...], self.shift_D[...])

    def activate(self, layout: Layout, x: Array, axes: str, scale: Array, shift: Array) -> Array:
        epsilon = self.spec.norm_epsilon
        return jax.nn.relu(normed(layout, x, scale, axes, epsilon, centered=True, shift=shift))


class UNetwork(nnx.Module):
    """Computes a vector for each voxel."""

    def __init__(self, spec: UNet, weights: Weights):
        self.spec = spec
        widths = [spec.d_model << level for level in range(spec.levels)]
        self.stem_ROPD = weights.normal("ROPD", fan_in="ROP")
        self.bias_D = weights.zeros("D")  # without it, the norms would make all grey levels equal
        givens = [spec.d_model, *widths[:-1]]
        pairs = zip(givens, widths, strict=True)
        self.down = nnx.Dict({f"level{i}": Level(spec, weights, *p) for i, p in enumerate(pairs)})
        self.up, self.upsample = nnx.Dict[Level](), nnx.Dict[Any]()
        for level, width in enumerate(widths[:-1]):
            twice = weights.with_sizes(D=2 * width, F=width, R=2, O=2, P=2)
            self.upsample[f"level{level}"] = nnx.Dict(w_ROPDF=twice.normal("ROPDF", fan_in="D"))
            self.up[f"level{level}"] = Level(spec, weights, width, width, skipped=width)
        self.softmax_VD = weights.normal("VD", fan_in="D")

    @jax.named_scope("convolutions")
    def __call__(self, layout: Layout, volumes_BZYX: Array) -> Array:
        """Returns the vectors of all voxels, in the shape of a text with one token per voxel."""
        to_compute = self.spec.precision.to_compute
        volumes_BZYX = to_compute(layout.reshard(volumes_BZYX, "BZYX")) / 255
        x_BZYXD = layout.convolve("BZYX,ROPD->BZYXD", volumes_BZYX, to_compute(self.stem_ROPD[...]))
        x_BZYXD += layout.broadcast_like(to_compute(self.bias_D[...]), "D", VOLUME)
        skips: list[tuple[Layout, Array]] = []
        for level in range(self.spec.levels):
            if level:
                x_BZYXD = layout.pool(VOLUME, x_BZYXD, HALF)
                layout = halved(layout, skips[-1][1])
            x_BZYXD = self.in_compute_type(self.down[f"level{level}"])(layout, x_BZYXD)
            skips.append((layout, x_BZYXD))
        for level in reversed(range(self.spec.levels - 1)):
            w_ROPDF = to_compute(self.upsample[f"level{level}"]["w_ROPDF"][...])
            x_BZYXF = layout.convolve(
                "BZYXD,ROPDF->BZYXF", x_BZYXD, w_ROPDF, base_dilation=(2, 2, 2)
            )
            layout, skip_BZYXD = skips[level]
            x_BZYXD = layout.reshard(x_BZYXF, VOLUME)
            x_BZYXD = self.in_compute_type(self.up[f"level{level}"])(layout, x_BZYXD, skip_BZYXD)
        # Voxels are ordered by depth, which may stay split, then by rows and columns.
        pads = layout.pads("Z") or layout.pads("L")
        x_BZyxD = layout.reshard(x_BZYXD, "BzyxD" if pads else "BZyxD")
        rows, *sides, width = x_BZyxD.shape
        shape = (rows, math.prod(sides), width)
        x_BLD = layout.reshape(x_BZyxD, shape, "BlD" if pads else "BLD")
        return to_compute(layout.reshard(x_BLD, "BLD"))

    def in_compute_type(self, level: Level) -> Level:
        """Returns a level with its weights in the type of computation."""
        graph, weights = nnx.split(level)
        return nnx.merge(graph, self.spec.precision.to_compute(weights))


def halved(layout: Layout, x_BZYXD: Array) -> Layout:
    """Returns the layout of a volume of half the size."""
    shape = dict(zip(VOLUME, layout.unpadded_shape(VOLUME, x_BZYXD.shape), strict=True))
    return layout.with_sizes(**{axis: shape[axis] // 2 for axis in HALF})


@dataclasses.dataclass(frozen=True)
class UNetModel(NetworkModel[UNetwork]):
    """Implements `models.api.Model`."""

    spec: UNet

    def make_network(self, weights: Weights) -> UNetwork:
        return UNetwork(self.spec, weights)

    def hidden(self, params: Params, batch: Batch) -> tuple[Layout, Batch, Array, Array]:
        _, *sides = batch["volumes_BZYX"].shape
        if any(side % (smallest := 2 ** (self.spec.levels - 1)) for side in sides):
            raise UserError(
                f"UNet.levels = {self.spec.levels}: volumes of {described(sides)} are halved "
                f"{self.spec.levels - 1} times.  Legal: sides that {smallest} divides."
            )
        sizes = dict(zip(HALF, sides, strict=True))
        layout, batch = pad_batch(self.layout.with_sizes(**sizes), batch, {})
        network = self.network(params)
        x_BLD = network(layout, batch["volumes_BZYX"])
        return layout, batch, x_BLD, self.spec.precision.to_compute(network.softmax_VD[...])


@dataclasses.dataclass(frozen=True, eq=False)
class VolumeRows(Rows):
    """Holds the volumes of one split, and the classes of their voxels."""

    shape: Shape = (0, 0, 0)

    def batch(self, row_ids: np.ndarray) -> dict[str, np.ndarray]:
        volumes, targets_BL, segments_BL = read_rows(
            row_ids, self.arrays["volumes"], self.targets_BL, self.segments_BL
        )
        return {
            "volumes_BZYX": volumes.reshape(-1, *self.shape).astype(np.int32),
            "targets_BL": targets_BL.astype(np.int32),
            "segments_BL": segments_BL.astype(np.int32),
        }


@spec
class VolumeTask(Task):
    """Defines a task of volumes in which each voxel is background or object."""

    source: Pairs
    """@Ellipsoids() or @VolumeFiles()."""
    vocab: Labels = Labels()
    """The classes."""
    depth: Count
    """Slices of each volume."""
    height: Count
    """Rows of a slice."""
    width: Count
    """Columns of a slice."""

    takes_pairs = True
    unit = "voxels"
    rows_kind = VolumeRows

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length != math.prod(self.shape):
            raise UserError(
                f"VolumeTask.length = {self.length}: a volume of {described(self.shape)} has "
                f"{math.prod(self.shape)} voxels.  Legal: that number."
            )

    @property
    def shape(self) -> Shape:
        return self.depth, self.height, self.width

    @property
    def array_lengths(self) -> dict[str, int]:
        return dict.fromkeys(("targets_BL", "segments_BL"), self.length)

    @property
    def array_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"volumes_BZYX": self.shape, **super().array_shapes}

    def vocab_text(self, name: str) -> Iterator[str]:
        yield from CLASSES

    def prompt(self, line: str) -> str:
        raise UserError(f"task {self.name}: its model cannot continue text.  Legal: evaluate.")

    def columns(self, vocabs: Vocabs) -> dict[str, tuple[int, type]]:
        return {**super().columns(vocabs), "volumes": (self.length, np.uint8)}

    def part_of_text(
        self, name: str, part: Pairs, split: str, digest: "hashlib._Hash"
    ) -> PartOfText:
        pairs = hashed(part.read(split), digest, hashed_pair)
        return PartOfText(name, pairs, Counter())

    def chunk_packer(self, vocabs: Vocabs) -> PackChunk:
        return lambda pairs, tag, training: self.packed(pairs, vocabs)

    def packed(self, pairs: Sequence[Pair], vocabs: Vocabs) -> tuple[Packed, Counts]:
        """Reads volumes, each with the classes of its voxels, into rows."""
        ids = np.concatenate(vocabs.target.encode(CLASSES))
        both = np.array([[voxels_of(half, self.shape) for half in pair] for pair in pairs])
        arrays = {
            "volumes": both[:, 0],
            "targets": ids[(both[:, 1] > 0).astype(int)],
            "segments": np.ones((len(pairs), self.length), place_dtype(self.length)),
        }
        numbers = np.arange(len(pairs))
        pieces = np.stack([numbers, numbers, np.ones_like(numbers)], axis=1)
        tokens = len(pairs) * self.length
        return Packed(arrays, pieces), Counts(lines=len(pairs), tokens=tokens, rows=len(pairs))

    def row_settings(self, vocabs: Vocabs) -> dict[str, Any]:
        return {"shape": self.shape}

    def summary(self, counts: Counts) -> str:
        return f"{counts.rows:,} volumes of {described(self.shape)}"


def described(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def as_text(voxels_ZYX: np.ndarray) -> str:
    """Writes a volume of bytes as one line: its shape, and its voxels as hexadecimal digits."""
    return f"{described(voxels_ZYX.shape)} {voxels_ZYX.tobytes().hex()}"


def voxels_of(text: str, shape: Shape) -> np.ndarray:
    """Returns the voxels of a line from `as_text`; raises if its shape differs."""
    sides, _, digits = text.rpartition(" ")
    if sides != described(shape):
        raise UserError(f"volume of {sides}: the settings of VolumeTask say {described(shape)}.")
    return np.frombuffer(bytes.fromhex(digits), np.uint8)


@spec
class VolumeFiles(Pairs):
    """Reads NumPy files (.npz), each with the bytes of a `volume` and of its `mask`."""

    train: str
    """Glob of the training volumes."""
    validation: str
    """Glob of the validation volumes."""
    test: str | None = None
    """Glob of the test volumes."""

    def splits(self) -> tuple[str, ...]:
        return ("train", "validation", *(["test"] if self.test else []))

    def paths(self, split: str) -> list[str]:
        paths = sorted(glob.glob(getattr(self, split)))
        if not paths:
            raise UserError(f"VolumeFiles.{split} = {getattr(self, split)!r}: no such files.")
        return paths

    def read(self, split: str, errors: str = "strict") -> Iterator[Pair]:
        for path in self.paths(split):
            with np.load(path) as file:
                if missing := {"volume", "mask"} - {*file}:
                    raise UserError(f"{path}: no array {', '.join(missing)}.")
                volume_ZYX, mask_ZYX = file["volume"], file["mask"]
            if volume_ZYX.dtype != np.uint8:
                low, high = volume_ZYX.min(), volume_ZYX.max()
                raise UserError(
                    f"{path}: `volume` has {volume_ZYX.dtype} from {low:g} to {high:g}.  Legal: "
                    "bytes (uint8).  Scale the volumes, all by the same range, to 0 to 255."
                )
            yield Pair(as_text(volume_ZYX), as_text(mask_ZYX > 0))

    def fingerprint(self) -> dict[str, Any]:
        stats = {path: Path(path).stat() for split in self.splits() for path in self.paths(split)}
        return {path: [stat.st_size, stat.st_mtime_ns] for path, stat in stats.items()}


@spec
class Ellipsoids(Pairs):
    """Draws ellipsoids (the objects) among equally bright bars, in noise."""

    side: Count = 24
    """Voxels along each side of a volume."""
    count: Count = 160
    """Training volumes; the other splits have a fifth as many."""

    def read(self, split: str, errors: str = "strict") -> Iterator[Pair]:
        rng = np.random.Generator(np.random.PCG64([*split.encode(), self.side, self.count]))
        for _ in range(self.count if split == "train" else -(-self.count // 5)):
            volume, mask = drawn(rng, self.side)
            yield Pair(as_text(volume), as_text(mask))

    def fingerprint(self) -> dict[str, Any]:
        return {"rules": hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]}


def drawn(rng: np.random.Generator, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Draws one volume and the mask of its objects."""
    grid_ZYX3 = np.stack(np.meshgrid(*[np.arange(side)] * 3, indexing="ij"), -1)
    volume, mask = np.full((side,) * 3, 70.0), np.zeros((side,) * 3, bool)
    for is_object in rng.permutation([False, False, True, True]):
        radii = rng.uniform(0.15, 0.28, 3) if is_object else rng.permutation([0.05, 0.08, 0.5])
        distance_ZYX3 = np.abs(grid_ZYX3 - rng.uniform(0.2, 0.8, 3) * side) / (radii * side)
        inside = np.linalg.norm(distance_ZYX3, 2 if is_object else np.inf, axis=-1) <= 1
        volume[inside] = rng.uniform(120, 180)
        mask = (mask & ~inside) | (inside & is_object)
    return np.clip(volume + rng.normal(0, 25, volume.shape), 0, 255).astype(np.uint8), mask
