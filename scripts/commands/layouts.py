"""`meshloom layouts` and `meshloom plan --compare`: several layouts of one run."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from configs.errors import UserError
from layouts.candidates import as_gin
from layouts.cost.calibration import measure_host
from layouts.cost.interconnect import Slice
from layouts.lint.warnings import size_text
from layouts.mesh import has_tpu_compiler
from scripts.commands.common import Strings, open_output, settings, write_json
from scripts.commands.plan import NO_COMPILER, Asked, plan_of, slice_named
from scripts.terminal import print_table, tell
from trainer.checks import check_run
from trainer.planning.report import as_json
from trainer.planning.savings import smallest_slice
from trainer.planning.search import Ranked, named, ranked, rehearsed, verified
from trainer.run import Run

COMPILED = 3  # of the best by their traces
RUNNERS_UP = 4  # in the file
COLUMNS = [
    "fits",
    "bytes a device",
    "traffic a device",
    "step s",
    "tokens/s",
    "share of peak",
]


def compare(
    layouts: Strings,
    gin_file: Strings,
    gin_param: Strings,
    json_file: str | None,
    topology: str | None,
    analytic: bool,
) -> None:
    """Plans one run under several layout files, the fastest first."""
    slice, found = slice_named(topology), {}
    for name in layouts:
        asked = Asked.read(settings(None, (*gin_file, name), gin_param), slice)
        asked.check(asked.run)
        found[Path(name).stem] = as_json(plan_of(asked, analytic), asked.layout)
    names = sorted(found, key=lambda name: (found[name]["fits"] is False, seconds(found[name])))
    print_table(["layout", *COLUMNS], [[name, *row(found[name])] for name in names])
    write_json(json_file, {name: found[name] for name in names})


def search(
    gin_file: Strings,
    gin_param: Strings,
    json_file: str | None,
    topology: str | None,
    verify: bool,
    output: str | None,
) -> None:
    """Ranks all layouts of a run on a slice or on this machine; writes the best as a file."""
    run = settings(None, gin_file, gin_param).make(Run)
    slice = slice_named(topology)
    check_run(run)
    if verify and slice is not None and not has_tpu_compiler():
        raise UserError(f"--search compiles the best layouts.  {NO_COMPILER}")
    found = ranked(run, slice or measure_host(jax.devices()), tell)
    best, how = found, "by their traces"
    if slice is not None:
        refuse_what_fits_nowhere(found, slice)
    if verify:
        if slice is None:
            best = rehearsed(run, found[:COMPILED], tell)
        else:
            best = verified(run, slice, found, COMPILED, tell)
        how = f"the first {len(best)} by their {'steps' if slice is None else 'compiled programs'}"
        found = [*best, *found[len(best) :]]
    facts = {named(own.layout): facts_of(own) for own in found}
    print_table(["layout", "by", *COLUMNS], [[n, f["by"], *row(f)] for n, f in facts.items()])
    write_json(json_file, [{"layout": name, **own} for name, own in facts.items()])
    if output is not None:
        with open_output(output) as file:
            head = f"The fastest of {len(found)} layouts on {where_of(slice)}, {how}"
            file.write(as_gin(best[0].layout, [f"{head}:", *comments(best)]))
        tell(f"Wrote {output}.")


def refuse_what_fits_nowhere(found: Sequence[Ranked], slice: Slice) -> None:
    least = min((own.plan for own in found), key=lambda plan: plan.counted.needed_bytes)
    if not least.fits:
        raise UserError(
            f"--topology={slice.name}: none of {len(found)} layouts fits; the least needs "
            f"{size_text(least.counted.needed_bytes)} a device, and there are "
            f"{size_text(slice.chip.memory_bytes)}.  {smallest_slice(least)}"
        )


def where_of(slice: Slice | None) -> str:
    return f"{len(jax.devices())} devices of one machine" if slice is None else slice.name


def comments(found: Sequence[Ranked]) -> list[str]:
    """What a layout file says of itself and of those that it beat, all known in the same way."""
    best = found[0]
    held = size_text(best.plan.counted.needed_bytes)
    fits = ", which fits" * (best.plan.fits is True)
    return [
        f"{best.step_s:.4g} s a step, {held} a device{fits}.  Runners-up:",
        *(
            f"{own.step_s / best.step_s - 1:+.0%}{', does not fit' * (own.plan.fits is False)}:"
            f" {named(own.layout)}"
            for own in found[1 : 1 + RUNNERS_UP]
        ),
    ]


def seconds(facts: dict[str, Any]) -> float:
    return math.inf if facts["step_time_s"] is None else facts["step_time_s"]


def facts_of(own: Ranked) -> dict[str, Any]:
    """The plan's figures, and what the time of a step is known by."""
    facts = {"by": own.how, **as_json(own.plan, own.layout), "step_time_s": own.step_s}
    return facts | {"tokens_per_s": own.plan.tokens_per_step / own.step_s}


def row(facts: dict[str, Any]) -> list[str]:
    """A plan as a line of a table."""
    received = sum(own["received_bytes"] for own in facts["collectives"])
    known = {True: "yes", False: "no", None: "unknown"}[facts["fits"]]
    line = [known, size_text(facts["bytes_per_device"]), size_text(received)]
    if facts["step_time_s"] is None:
        return [*line, "unknown", "unknown", "unknown"]
    times = (f"{facts['step_time_s']:.4g}", f"{facts['tokens_per_s']:,.0f}")
    share = "unknown" if facts["utilisation"] is None else f"{facts['utilisation']:.1%}"
    return [*line, *times, share]
