"""Private and undocumented APIs are as this code expects; CONTRIBUTING.md lists them.

Also: the bugs of JAX that this code works around are still there.  Where such a test fails, the
workaround that it names may go.
"""

import asyncio
import contextlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from gin import config_parser
from jax._src import clusters
from jax.extend.core import Jaxpr, jaxprs_in_params
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import AbstractMesh, AxisType
from orbax.checkpoint._src import asyncio_utils
from orbax.checkpoint._src.serialization import ocdbt_utils, serialization, tensorstore_utils
from uvicorn.protocols.http.h11_impl import H11Protocol

from layouts.cost import dataflow, jaxpr_cost
from layouts.layout import Layout
from layouts.mesh import make_mesh
from tests.toys import ROOT
from trainer.checkpoints.integrity import checksum_chunks, wait_for_writes
from trainer.serving.service import Compilations
from trainer.translation import metrics

# Orbax


def test_checkpoints_write_checksums_behind_their_chunks() -> None:
    checksum_chunks()
    metadata = tensorstore_utils._build_zarr3_metadata((4, 4), (2, 2), True)
    assert '"checksum": True' in str(metadata).replace("'", '"')
    build = inspect.getsource(tensorstore_utils._build_zarr_shard_and_chunk_metadata)
    assert " _build_zarr3_metadata(" in build, "Orbax no longer calls what is replaced"


def test_a_save_that_fails_waits_for_its_other_writes() -> None:
    wait_for_writes()
    written = []

    async def write() -> None:
        await asyncio.sleep(0.05)
        written.append(True)

    async def save() -> None:
        asyncio.get_running_loop().create_task(write())
        await asyncio.sleep(0)
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        asyncio_utils.run_sync(save())
    assert written


def test_names_of_orbax_that_are_used_are_there() -> None:
    assert "_read_array_index_and_device_put" in inspect.getsource(serialization)
    written = inspect.signature(tensorstore_utils.build_array_write_spec).parameters
    assert {"global_shape", "local_shape", "dtype", "use_ocdbt", "process_index"} <= set(written)
    assert "use_ocdbt" in inspect.signature(ocdbt_utils.get_process_index_for_subdir).parameters


def test_a_part_of_a_gigabyte_limits_what_is_written_together(tmp_path: Path) -> None:
    for limit_gb, problem in ((2e-9 * 400, None), (1e-9 * 300, "more bytes than we reserved")):
        handler = ocp.PyTreeCheckpointHandler(use_zarr3=True, save_concurrent_gb=limit_gb)
        refused = contextlib.nullcontext() if problem is None else pytest.raises(ValueError)
        folder = epath.Path(tmp_path / str(limit_gb))
        with refused as error, ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(folder, {"x": jnp.zeros(100)})
        assert problem is None or problem in str(error.value)


# JAX


def test_a_compilation_is_counted() -> None:
    """A positive control: an event of another name would be counted by none."""
    compilations = Compilations()
    jax.jit(lambda x: jnp.sin(x) * 17.25)(jnp.arange(3.0))
    assert compilations.count and compilations.seconds > 0


def test_the_cluster_is_asked_as_jax_asks_it() -> None:
    asked = inspect.signature(clusters.ClusterEnv.auto_detect_unset_distributed_params)
    names = ["coordinator_address", "num_processes", "process_id", "local_device_ids"]
    assert list(asked.parameters)[:4] == names and len(asked.parameters) == 6


@pytest.mark.parametrize("name", ["jax_platforms", "jax_enable_compilation_cache"])
def test_settings_of_jax_are_read(name: str) -> None:
    assert name in jax.config.values


def names_in(jaxpr: Jaxpr) -> set[str]:
    """Returns the names of the primitives of a trace, at any depth."""
    inner = (names_in(body) for eqn in jaxpr.eqns for body in jaxprs_in_params(eqn.params))
    return {eqn.primitive.name for eqn in jaxpr.eqns}.union(*inner)


def traced(call: Callable[..., Any], *shapes: tuple[int, ...]) -> Jaxpr:
    arrays = (jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes)
    return jax.make_jaxpr(call)(*arrays).jaxpr


def test_collectives_have_the_names_that_costs_are_read_by() -> None:
    def collectives(x: jax.Array) -> list[jax.Array]:
        return [
            jax.lax.psum(x, "a"),
            jax.lax.pmax(x, "a"),
            jax.lax.all_gather(x, "a"),
            jax.lax.psum_scatter(x, "a", tiled=True),
            jax.lax.all_to_all(x, "a", 0, 1, tiled=True),
            jax.lax.ppermute(x, "a", [(0, 1), (1, 0)]),
        ]

    mesh = AbstractMesh((2,), ("a",), axis_types=(AxisType.Explicit,))
    with jax.sharding.use_abstract_mesh(mesh):
        mapped = jax.shard_map(collectives, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
        names = names_in(traced(mapped, (4, 4)))
        varying = jax.shard_map(lambda x: jax.lax.psum(x, "a"), in_specs=jax.P(), out_specs=jax.P())
        names |= names_in(traced(varying, (4, 4)))
    known = set(jaxpr_cost.MANUAL)
    assert known - names <= {"ragged_all_to_all"}
    assert not {name for name in names - known if re.search("psum|gather|scatter|permute", name)}


def test_operations_have_the_names_that_costs_are_read_by() -> None:
    def operations(x: jax.Array, key: jax.Array) -> list[jax.Array]:
        at = jnp.array([0, 1])
        return [
            x.sum(), x.max(), x.min(), (x > 0).all(), (x > 0).any(), x.argmax(), x.reshape(-1),
            x.T, x.astype(jnp.int32), x[:1].squeeze(0), jnp.broadcast_to(x, (2, 4, 4)), x[at],
            x.at[at].add(1.0), jax.random.bits(key, (3,)), x.cumsum(0), jnp.sort(x),
            jax.lax.top_k(x, 2)[0], jnp.concatenate([x, x]), x @ x,
            jax.lax.conv(x[None, None], x[None, None], (1, 1), "SAME"),
        ]  # fmt: skip

    key = jax.eval_shape(lambda: jax.random.key(0))
    shape = jax.ShapeDtypeStruct((4, 4), np.float32)
    names = names_in(jax.make_jaxpr(operations)(shape, key).jaxpr)
    known = {*dataflow.VIEWS, *dataflow.FRAMED, *dataflow.PRODUCTS, *jaxpr_cost.MEMORY_OPS}
    assert known <= names


def test_a_trace_says_where_its_equations_are_from() -> None:
    def objective(x: jax.Array) -> jax.Array:
        with jax.named_scope("a_scope"):
            return (jnp.sin(x) * jnp.cos(x)).sum()

    jaxpr = traced(jax.grad(objective), (3,))
    scopes = [str(eqn.source_info.name_stack) for eqn in jaxpr.eqns]
    assert any("transpose(" in scope and "a_scope" in scope for scope in scopes)
    (added,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "add_any")
    frames = jaxpr.eqns[0].source_info.traceback.frames
    assert any(frame.file_name == __file__ for frame in frames) and added is not None


def test_equations_that_no_result_needs_are_removed() -> None:
    jaxpr = traced(lambda x: (x + 1, jnp.sin(x)), (3,))
    needed, _ = dce_jaxpr(jaxpr, [True, False])
    assert names_in(needed) == {"add"}


# Others


@pytest.mark.parametrize("metric", [metrics.Chrf, metrics.Ter])
def test_sacrebleu_computes_scores_by_the_method_that_is_replaced(
    monkeypatch: pytest.MonkeyPatch, metric: type[Any]
) -> None:
    class CalledError(Exception):
        pass

    def called(self: Any, stats: Any) -> None:
        raise CalledError

    monkeypatch.setattr(metric, "_compute_score_from_stats", called)
    with pytest.raises(CalledError):
        metric().corpus_score(["a b"], [["a b"]])


def test_gin_reads_tokens_by_the_method_that_is_replaced() -> None:
    read = config_parser.ConfigParser
    source = inspect.getsource(read)
    assert "self._advance_one_token()" in source and isinstance(read.current_token, property)


def test_connections_of_uvicorn_have_what_the_server_reads() -> None:
    source = inspect.getsource(H11Protocol)
    for name in ("cycle", "flow", "conn", "transport"):
        assert re.search(rf"self\.{name}\b", source), name


# Bugs that are worked around


def test_ppermute_counts_devices_in_the_order_of_the_mesh() -> None:
    """Since jax 0.12 it refuses another order: `layouts.shards.ppermute` renumbers the shards."""
    onward = [(shard, (shard + 1) % 4) for shard in range(4)]
    with jax.set_mesh(make_mesh(Layout(mesh="a:2,b:2"))):
        x = jax.sharding.reshard(jnp.arange(4), jax.P(("b", "a")))
        sent = jax.shard_map(
            lambda shard: jax.lax.ppermute(shard, ("b", "a"), onward),
            in_specs=jax.P(("b", "a")), out_specs=jax.P(("b", "a")),
        )  # fmt: skip
        try:
            received = sent(x).tolist()
        except RuntimeError as error:
            assert "in the same order" in str(error)
            return
    assert received != [3, 0, 1, 2]


def test_take_along_axis_refuses_axes_of_size_1() -> None:
    """`Layout.take_along_axis` maps `take` over the first axis instead."""
    with jax.set_mesh(make_mesh(Layout(mesh="a:1"))):
        x = jax.sharding.reshard(jnp.ones((1, 3)), jax.P(None, None))
        index = jax.sharding.reshard(jnp.zeros((1, 1), int), jax.P("a", None))
        with pytest.raises(jax._src.core.ShardingTypeError, match="gather"):
            jnp.take_along_axis(x, index, axis=1)


def test_a_lookup_of_tokens_that_are_split_where_the_table_is_not_reduced_is_wrong() -> None:
    """`Layout.take` and products align both (`layouts.reduction.reduced_over`)."""
    with jax.set_mesh(make_mesh(Layout(mesh="x:4,y:2"))):
        table = jax.sharding.reshard(jnp.ones((6, 3)), jax.P("y", None))
        ids = jax.sharding.reshard(jnp.arange(8).reshape(4, 2) % 6, jax.P("x", "y"))

        def total(table: jax.Array) -> jax.Array:
            reduced = jax.sharding.reshard(table, jax.P("y", None, reduced={"x"}))
            return jnp.sum(reduced.at[ids].get(out_sharding=jax.P("x", "y", None)))

        gradient = np.asarray(jax.jit(jax.grad(total))(table))
    assert gradient[:, 0].tolist() != [2, 2, 1, 1, 1, 1]


# The table


def test_every_private_import_is_in_the_table() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text()
    folders = ("configs", "layouts", "models", "trainer", "data", "scripts")
    used = {
        str(path.relative_to(ROOT))
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if re.search(r"^\s*(from|import) .*\._src\b", path.read_text(), re.M)
    }
    assert used and [path for path in sorted(used) if f"`{path}`" not in table] == []
