"""Exchanges any number of rows between the devices of a mesh axis."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class Ranges(NamedTuple):
    """Holds the ranges of rows that this device sends to, or receives from, each device."""

    start_n: Array
    """The first row, among the sorted rows of the sender."""
    size_n: Array
    place_n: Array
    """Where they begin among all rows of the receiver."""

    def within(self, first: Array, places: int) -> "Ranges":
        """Returns the parts at `places` places of the receiver from `first` on, relative to it."""
        start_n, size_n, place_n = self
        before_n = jnp.clip(first - place_n, 0, size_n)
        after_n = jnp.clip(place_n + size_n - first - places, 0, size_n)
        place_n = jnp.clip(place_n - first, 0, places)
        return Ranges(start_n + before_n, jnp.maximum(size_n - before_n - after_n, 0), place_n)


class Exchange(NamedTuple):
    """Sends a device's rows, sorted by destination, to other devices and brings results back.

    It runs inside `Layout.shard_map`.  A device gets its rows in the order of the devices that send
    them.  Without mesh axes, it sends to itself.
    """

    axes: tuple[str, ...]
    places: int
    """Rows that a device receives at once."""
    destination_c: Array
    """Destinations of this device's rows, in any order; beyond the last device means nowhere."""
    sent: Ranges
    received: Ranges

    @classmethod
    def of(cls, axes: tuple[str, ...], devices: int, to_c: Array, places: int) -> "Exchange":
        """Prepares to send each row to its destination among this number of devices."""
        size_n = jnp.bincount(to_c, length=devices).astype(jnp.int32)
        start_n = jnp.cumsum(size_n) - size_n
        received_start_n, received_n = swap(axes, jnp.stack([start_n, size_n], axis=1)).T
        received_place_n = jnp.cumsum(received_n) - received_n
        sent = Ranges(start_n, size_n, swap(axes, received_place_n))
        received = Ranges(received_start_n, received_n, received_place_n)
        return cls(axes, places, to_c, sent, received)

    def most_rows(self, axes: tuple[str, ...]) -> Array:
        """Returns the most rows that any device along these mesh axes receives.

        If the exchange itself has no mesh axes, this is the device's own number.
        """
        rows = jnp.sum(self.received.size_n, dtype=jnp.int32)
        return jax.lax.pmax(rows, axes) if self.axes else rows

    def part(self, first: Array) -> "Exchange":
        """Returns the exchange of the rows at the places from `first` on."""
        sent, received = (ranges.within(first, self.places) for ranges in self[3:])
        return self._replace(sent=sent, received=received)

    def send(self, x_cd: Array, empty: int) -> Array:
        """Returns the rows that this device receives; unused rows of the buffer hold `empty`."""
        out_rd = jnp.full_like(x_cd, empty, shape=(self.places, x_cd.shape[1]))
        return self.exchange(x_cd, out_rd, self.sent, self.received.size_n)

    def send_back(self, y_rd: Array, out_cd: Array) -> Array:
        """Returns out_cd with the results of this device's rows, sent by other devices."""
        start_n, size_n, place_n = self.received
        return self.exchange(y_rd, out_cd, Ranges(place_n, size_n, start_n), self.sent.size_n)

    def exchange(self, x_cd: Array, out_rd: Array, sent: Ranges, received_n: Array) -> Array:
        """Sends these rows to each device, which writes them to their places in out_rd."""
        ragged = functools.partial(jax.lax.ragged_all_to_all, axis_name=self.axes)

        def padded(*operands: Array) -> Array:
            """Replaces `jax.lax.ragged_all_to_all`, which XLA lacks on CPUs."""
            x_cd, out_rd, start_n, _, place_n, received_n = operands
            row_1c = jnp.arange(min(len(x_cd), len(out_rd)), dtype=jnp.int32)[None]
            x_ncd = x_cd.at[start_n[:, None] + row_1c].get(mode="fill", fill_value=0)
            place_nc = swap(self.axes, place_n)[:, None] + row_1c
            place_nc = jnp.where(row_1c < received_n[:, None], place_nc, len(out_rd))
            return out_rd.at[place_nc].set(swap(self.axes, x_ncd), mode="drop")

        operands = (x_cd, out_rd, *sent, received_n)
        if not self.axes:
            return padded(*operands)
        return jax.lax.platform_dependent(*operands, cpu=padded, default=ragged)


def swap(axes: tuple[str, ...], x: Array) -> Array:
    """Sends row n to device n; returns what each device sends to this one."""
    return jax.lax.all_to_all(x, axes, split_axis=0, concat_axis=0) if axes else x
