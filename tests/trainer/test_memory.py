"""A run that does not fit is refused with the bytes that it needs."""

import dataclasses

import jax
import pytest
from jax.sharding import AxisType

from configs.errors import UserError
from layouts.layout import Layout
from tests.toys import TOY
from tests.trainer.planning.runs import TASK
from trainer.memory import check_memory, device_memory_bytes
from trainer.run import Run

RUN = Run(model=TOY, task=TASK, steps=5, batch_sequences=8)


def test_what_does_not_fit_is_refused_with_its_bytes() -> None:
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Explicit,))
    layout = Layout(mesh="data:2", rules="batch:data")
    check_memory(RUN, layout, mesh)
    assert (device_memory_bytes(mesh) or 0) > 1 << 28
    wide = dataclasses.replace(TOY, d_ff=10**9)
    with pytest.raises(UserError, match=r"does not fit: [\d,]{15,} bytes of weights"):
        check_memory(dataclasses.replace(RUN, model=wide), layout, mesh)
    with pytest.raises(UserError, match=r"and [\d,]{13,} of the batch on each device"):
        check_memory(dataclasses.replace(RUN, batch_sequences=2 * 10**9), layout, mesh)
