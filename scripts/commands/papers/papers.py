"""Runs `meshloom papers`: lists what the papers publish, and our values.

Each function in `SOURCES` accepts the words of a row, and returns our figures by name.
"""

import math
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from configs.errors import UserError, did_you_mean
from configs.imports import CHECKOUT
from configs.load import load
from layouts.cost.collectives import Collective
from layouts.cost.interconnect import Topology
from layouts.cost.jaxpr_cost import cost_of
from layouts.cost.step_time import compute_s, coordinates, seconds
from layouts.layout import Layout
from layouts.lint.recorder import record
from layouts.mesh import abstract_mesh
from layouts.shards import num_shards
from scripts.commands.common import write_json
from scripts.commands.inspect.layout import model_of
from scripts.commands.papers import items
from scripts.commands.papers.flags import PapersFlags
from scripts.commands.planning.flags import DecodePlanFlags, PlanFlags
from scripts.commands.planning.inputs import PlanInputs, best_plan
from scripts.commands.planning.plan_decode import plan_batch
from scripts.devices import start_devices
from scripts.terminal import print_note, print_table
from trainer.planning.breakdown import seconds_of
from trainer.planning.report import as_json, decode_as_json

PAGE = CHECKOUT / "docs" / "papers.md"
LIST_HEAD = ["item", "shows", "published", "ours", "how", "where, or why not"]
MEGABYTE = 10**6

Figures = Mapping[str, Any]


def show_papers(flags: PapersFlags) -> None:
    """Prints the lists of docs/papers.md, or an item."""
    start_devices()
    if flags.table is not None:
        return show_item(flags, flags.table)
    rows = [
        {"name": items.key_of(name, item)} | row
        for name, paper in items.PAPERS.items()
        for item, row in zip(paper.items, rows_under(PAGE.read_text(), paper.title), strict=True)
    ]
    head = ["name", *LIST_HEAD[1:5]]
    print_table(head, [[row[column] for column in head] for row in rows])
    print_note("The same list as in docs/papers.md; --table=NAME recomputes one item.")
    write_json(flags.json_file, rows)


def show_item(flags: PapersFlags, name: str) -> None:
    """Computes an item, and prints its rows, the files that implement it, and its commands."""
    if name not in items.ITEMS_BY_KEY:
        raise UserError(
            f"--table={name}: no such item.{did_you_mean(name, items.ITEMS_BY_KEY)}  "
            "Legal: the names that `meshloom papers` lists, such as gshard_table_3."
        )
    item = items.ITEMS_BY_KEY[name]
    head, rows = table_of(item)
    print(f"{item.shows}.  {item.note}".strip())
    if rows:
        print_table(head, rows)
    for line in (item.published, *item.files, item.reason, *commands_of(item)):
        if line:
            print(line)
    write_json(flags.json_file, {"head": head, "rows": rows, "commands": commands_of(item)})


def published(row: items.Row, name: str) -> str:
    """Writes the published value for a column of a row."""
    value = row.published.get(name, "")
    return value if isinstance(value, str) else items.COLUMNS[name].format.format(value)


def ours(row: items.Row, name: str) -> str:
    """Writes our value for a column of a row; empty if there is none."""
    column = items.COLUMNS[name]
    if name in row.records:
        return read_record(row.records[name])
    if column.by == "record" and row.of:
        return read_record(tuple(word.replace("ROW", row.of[0]) for word in column.of))
    if column.by and row.of and column.ratio == bool(row.over):
        return compared(column, value_of(column, row), row.published.get(name))
    return ""


def value_of(column: items.Column, row: items.Row) -> float | str:
    """Returns a row's figure in the unit of its column, or its ratio to the figure of `over`."""
    values = [SOURCES[column.by](*words)[column.figure] for words in (row.of, row.over) if words]
    if isinstance(values[0], str):
        return values[0]
    value, *over = (column.scale / v if column.inverse else column.scale * v for v in values)
    return value / over[0] if over and over[0] else value


def compared(column: items.Column, value: float | str, published: float | str | None) -> str:
    """Writes a value, and its relative difference from a published number."""
    if isinstance(value, str) or value == 0:
        return str(value or "0")
    text = column.format.format(value)
    if isinstance(published, str | None) or text == column.format.format(published):
        return text
    difference = f"{value / published - 1:+.0%}"
    return text if difference in ("+0%", "-0%") else f"{text} ({difference})"


def rows_under(text: str, heading: str) -> Iterator[dict[str, str]]:
    """Yields the rows of the tables under a heading of a page, up to the next heading."""
    _, _, rest = text.partition(f"# {heading}\n")
    head: list[str] = []
    for line in re.split(r"^#+ ", rest, maxsplit=1, flags=re.MULTILINE)[0].splitlines():
        cells = [c.replace("**", "").strip() for c in re.split(r"(?<!\\)\|", line.strip())[1:-1]]
        if head and cells and not cells[0].startswith("---"):
            yield dict(zip(head, cells, strict=False))
        head = (head or cells) if cells else []


def read_record(words: tuple[str, ...]) -> str:
    """Reads a table cell of a page, given file, heading, first cell of the row and column head."""
    file, heading, row, column = words
    for cells in rows_under((CHECKOUT / file).read_text(), heading):
        if next(iter(cells.values())) == row and column in cells:
            return cells[column]
    raise UserError(f"{file}, {heading!r}: no table there has a row {row!r} and column {column!r}.")


def table_of(item: items.Item) -> tuple[list[str], list[list[str]]]:
    """Returns the header and the rows of an item: each column as published, next to ours."""
    head, rows = [item.row], [[row.name] for row in item.rows]
    for name in item.columns:
        for how, write in (("published", published), (items.COLUMNS[name].how, ours)):
            texts = [write(row, name) for row in item.rows]
            if any(texts):
                head.append(f"{items.COLUMNS[name].head}: {how}")
                rows = [[*row, text] for row, text in zip(rows, texts, strict=True)]
    return head, rows


def commands_of(item: items.Item) -> list[str]:
    """Returns the commands behind an item: the one for its records, and those for its runs."""
    names = dict.fromkeys(row.of[0] for row in item.rows if row.of and row.of[0] in items.RUNS)
    plans = any(items.COLUMNS[name].by == "plan" for name in item.columns)
    return [*filter(None, [item.command]), *(command_of(name, plans) for name in names)]


def command_of(name: str, plans: bool) -> str:
    """Returns the command that plans a run or counts its weights."""
    run = items.RUNS[name]
    files = [f"--gin_file={file}" for file in run.files]
    settings = [f'--gin_param="{setting}"' for setting in run.settings]
    flags = [f"--{flag}={number}" for flag, number in run.decoding.items()]
    work = ["plan", *["--decode"] * bool(flags), f"--topology={run.topology}", "--analytic"]
    words = [*work, *files, *settings, *flags] if plans else ["inspect", "params", *files]
    command = " ".join(["meshloom", *words])
    lines = textwrap.wrap(command, 116, break_long_words=False, break_on_hyphens=False)
    return " \\\n  ".join(lines)


def count(name: str) -> Figures:
    """Counts the weights of a run's model, and the experts of its layers."""
    spec = model_of(load(items.RUNS[name].files, items.RUNS[name].settings))
    weights = record(lambda layout: spec.model(layout).init(jax.random.key(0))).weights
    experts = (w for w in weights if w.axes == "NEDF" and w.path.endswith("wi_EDF"))
    return {
        "parameters": sum(math.prod(w.shape) for w in weights),
        "experts": sum(math.prod(w.shape[:2]) for w in experts),
    }


def inputs_of(name: str) -> PlanInputs:
    run = items.RUNS[name]
    return PlanInputs.read(load(run.files, run.settings), Topology.named(run.topology))


def plan(name: str) -> Figures:
    """Plans a run from its trace: the keys of `plan --json`, its parts by name and collective."""
    run, inputs = items.RUNS[name], inputs_of(name)
    if run.decoding:
        flags = PlanFlags(analytic=True, decoding=DecodePlanFlags(**run.decoding))
        return decode_as_json(plan_batch(inputs, flags))
    figures = as_json(best_plan(inputs, analytic=True))
    parts, kinds = figures["step_time_parts_s"], Counter[str]()
    for row in figures["collectives"]:
        kinds[row["kind"]] += row["seconds"]
    by_kind = {name: parts[name] for name in ("matrix products", "other compute")} | kinds
    by_part = {row["part"]: seconds_of(row) for row in figures["step_time_by_part"]}
    fits = "yes" if figures["fits"] else "no"
    return {**figures, **by_kind, **parts, **figures["bytes_by_cause"],
            "by_part": by_part, "fits": fits}  # fmt: skip


def collective(kind: str, topology: str, megabytes: str) -> Figures:
    """Predicts a collective over all devices of a slice, with an array of this size on each."""
    target, size = Topology.named(topology), int(megabytes) * MEGABYTE
    mesh = {"all": target.devices}
    coords = coordinates(target, mesh, None, "all:-1")
    call = Collective(kind, ("all",), target.devices, size, 1, "")
    time_s = seconds(target, coords[neighbours(coords)], mesh, call)
    return {"devices": target.devices, "megabytes": int(megabytes), "seconds": time_s}


def neighbours(coords: np.ndarray) -> np.ndarray:
    """Orders devices on a torus so that each is next to the one before it.

    A permutation sends along this order.  Between neighbours its cost is constant (GShard, section
    5.3).
    """
    keys, turns = [], np.zeros(len(coords), int)
    for axis in coords.T[::-1]:
        keys.append(np.where(turns % 2, -axis, axis))
        turns = turns + axis
    return np.lexsort(keys[::-1])


def operator(equation: str, split: str, grown: str, topology: str) -> Figures:
    """Predicts the cost of an operator on all devices of a slice, as in GShard's Table 4.

    `split` names the axis of each operand and of the result that is sharded over the devices.  Axes
    in `grown` grow with the number of devices; in Algorithm 2, G and E equal it, and C shrinks.
    """
    target = Topology.named(topology)
    count, mesh = target.devices, {"all": target.devices}
    sizes = {axis: 1024 * (count if axis in grown else 1) for axis in equation}
    sizes |= {"G": count, "E": count, "C": 4096 // count, "O": 3, "P": 3}
    *operands, result = equation.replace("->", ",").split(",")
    splits = zip((*operands, result), split.split(","), strict=True)
    places = [jax.P(*("all" if axis == over else None for axis in axes)) for axes, over in splits]

    def compute(*x: jax.Array) -> jax.Array:
        if "O" in equation:
            return Layout(mesh=f"all:{count}", rules="height:all").convolve(equation, *x)
        is_sum = operands == [result] * 2
        return x[0] + x[1] if is_sum else jnp.einsum(equation, *x, out_sharding=places[-1])

    with jax.sharding.use_abstract_mesh(devices := abstract_mesh(mesh)):
        arrays = []
        for axes, place in zip(operands, places[:-1], strict=True):
            shape, sharding = [sizes[axis] for axis in axes], jax.NamedSharding(devices, place)
            arrays.append(jax.ShapeDtypeStruct(shape, "float32", sharding=sharding))
        cost = cost_of(jax.jit(compute).trace(*arrays).jaxpr.jaxpr, mesh)
    coords = coordinates(target, mesh, None, "all:-1")
    coords = coords[neighbours(coords)]
    sent_s = sum(c.times * seconds(target, coords, mesh, c) for c in cost.collectives)
    kinds = ", ".join(sorted({c.kind for c in cost.collectives})) or "0"
    return {"compute_s": sum(compute_s(target.chip, cost.ops)), "traffic_s": sent_s, "kinds": kinds}


def tensor(name: str, axes: str, item_bytes: str, stored: str = "") -> Figures:
    """Computes the bytes of a run's tensor on each device; a lowercase axis is replicated."""
    inputs = inputs_of(name)
    model: Any = inputs.run.model
    sizes = {"B": inputs.run.batch_sequences, "L": inputs.run.task.length, "D": model.d_model,
             "F": model.d_ff}  # fmt: skip
    whole = int(item_bytes) * math.prod(sizes[axis] for axis in axes.upper())
    place = inputs.layout.place(axes, stored=bool(stored))
    with jax.sharding.use_abstract_mesh(abstract_mesh(inputs.sizes)):
        return {"bytes": whole, "bytes_per_device": whole / math.prod(map(num_shards, place))}


def order(text: str, topology: str) -> Figures:
    """Predicts an all-gather along each row of 2 x 4 partitions, placed in this order."""
    target, mesh = Topology.named(topology), {"rows": 2, "cols": 4}
    coords = coordinates(target, mesh, text)
    gather = Collective("all-gather", ("cols",), 4, 8 * MEGABYTE, 1, "")
    return {"seconds": seconds(target, coords, mesh, gather), "coordinates": coords}


SOURCES: Mapping[str, Callable[..., Figures]] = {
    function.__name__: cache(function)
    for function in (count, plan, collective, operator, tensor, order)
}
