"""A run that does not fit is refused with the bytes that it needs."""

import dataclasses

import jax
import pytest
from jax.sharding import AxisType

from configs.errors import UserError
from layouts.layout import Layout
from models.decoding.beam import Beam
from models.decoding.sampling import Sampling
from tests.toys import TOY
from tests.trainer.planning.runs import TASK
from trainer.decoding.decoder import Decoder, Request
from trainer.memory import check_batch_memory, check_memory, device_memory_bytes
from trainer.run import Run
from trainer.step import abstract_params

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
    check_batch_memory(RUN, layout, mesh, 64)
    with pytest.raises(UserError, match=r"--batch_sequences=2000000000: a batch needs [\d,]{13,} "):
        check_batch_memory(RUN, layout, mesh, 2 * 10**9)


@pytest.mark.parametrize("search", [Sampling(width=10**8), Beam(width=10**8)])
def test_a_cache_that_does_not_fit_is_refused_with_its_bytes(search: Sampling | Beam) -> None:
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Explicit,))
    model = TOY.model(Layout(mesh="data:2", rules="batch:data"))
    decoder = Decoder(model, abstract_params(model, mesh), mesh, search, 4)
    with pytest.raises(UserError, match=r"KV cache does not fit: [\d,]{13,} bytes, and"):
        next(decoder.decode([Request([5, 6], 3)]))
