"""Exchanges any number of rows between the devices of a mesh axis."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array


class Exchange(NamedTuple):
    """Sends a device's rows, sorted by destination, to other devices and brings results back.

    It runs inside `Layout.shard_map`.  Each device may send all its rows to a single one, so every
    device has a receive buffer for all rows of all devices.
    """

    axes: tuple[str, ...]
    rows: int
    """Rows of a device, some of which may go nowhere."""
    sizes_nn: Array
    """How many rows each device sends to each."""

    @classmethod
    def of(cls, axes: tuple[str, ...], destination_c: Array) -> "Exchange":
        """Prepares to send rows to these devices; an index beyond the last one sends nowhere."""
        size_n = jnp.bincount(destination_c, length=jax.lax.axis_size(axes)).astype(jnp.int32)
        return cls(axes, destination_c.size, jax.lax.all_gather(size_n, axes))

    @property
    def starts_nn(self) -> Array:
        """Returns the index of the first row that each device sends to each."""
        return jnp.cumsum(self.sizes_nn, axis=1) - self.sizes_nn

    def send(self, x_cd: Array, empty: int) -> Array:
        """Returns the rows that this device receives, with a separate range for each sender.

        Unused rows of the buffer hold `empty`.
        """
        device, devices = jax.lax.axis_index(self.axes), len(self.sizes_nn)
        return self.exchange(
            x_cd,
            jnp.full_like(x_cd, empty, shape=(devices * self.rows, x_cd.shape[1])),
            self.starts_nn[device],
            self.sizes_nn[device],
            jnp.full(devices, device * self.rows, jnp.int32),
            self.sizes_nn[:, device],
        )

    def send_back(self, y_rd: Array) -> Array:
        """Returns the results of this device's rows, from the devices that have them."""
        device, devices = jax.lax.axis_index(self.axes), len(self.sizes_nn)
        return self.exchange(
            y_rd,
            jnp.zeros_like(y_rd, shape=(self.rows, y_rd.shape[1])),
            jnp.arange(devices, dtype=jnp.int32) * self.rows,
            self.sizes_nn[:, device],
            self.starts_nn[:, device],
            self.sizes_nn[device],
        )

    def exchange(
        self, x_cd: Array, out_rd: Array, start_n: Array, size_n: Array, place_n: Array,
        received_n: Array,
    ) -> Array:  # fmt: skip
        """Sends rows start to start + size to each device, where they begin at place in out_rd."""
        ragged = functools.partial(jax.lax.ragged_all_to_all, axis_name=self.axes)

        def padded(*operands: Array) -> Array:
            """Does what `jax.lax.ragged_all_to_all` does, which XLA does not have on CPUs."""
            x_cd, out_rd, start_n, _, place_n, received_n = operands
            row_1c = jnp.arange(self.rows, dtype=jnp.int32)[None]
            x_ncd = x_cd.at[start_n[:, None] + row_1c].get(mode="fill", fill_value=0)
            all_to_all = functools.partial(
                jax.lax.all_to_all, axis_name=self.axes, split_axis=0, concat_axis=0
            )
            place_nc = all_to_all(place_n)[:, None] + row_1c
            place_nc = jnp.where(row_1c < received_n[:, None], place_nc, len(out_rd))
            return out_rd.at[place_nc].set(all_to_all(x_ncd), mode="drop")

        operands = (x_cd, out_rd, start_n, size_n, place_n, received_n)
        return jax.lax.platform_dependent(*operands, cpu=padded, default=ragged)
