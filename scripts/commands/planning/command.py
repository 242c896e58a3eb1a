"""`meshloom plan` and `meshloom layouts`: choose which plan to make by the flags."""

import dataclasses
from typing import Any

from configs.errors import UserError
from scripts.command_line import is_given
from scripts.commands.flags.plan import DecodePlanFlags, LayoutsFlags, PlanFlags
from scripts.commands.planning import layouts as searching
from scripts.commands.planning import plan as training
from scripts.commands.planning import plan_decode


def plan(flags: PlanFlags) -> None:
    """Plans training or decoding of a run, or its training under several layouts."""
    shared: dict[str, Any] = {
        "gin_file": flags.settings.gin_file,
        "gin_param": flags.settings.gin_param,
        "json_file": flags.json_file,
        "topology": flags.topology,
        "analytic": flags.analytic,
    }
    if flags.decode:
        if flags.compare or flags.layouts:
            raise UserError("--decode plans one layout: no --compare.")
        decoding = dataclasses.asdict(flags.decoding)
        plan_decode.plan_decoding(html=flags.html, **decoding, **shared)
        return
    for field in dataclasses.fields(DecodePlanFlags):
        if is_given(field.name):
            raise UserError(f"--{field.name} is about decoding.  Give --decode as well.")
    if flags.compare != bool(flags.layouts):
        raise UserError("--compare and layout files go together: --compare a.gin b.gin")
    if flags.compare and flags.html is not None:
        raise UserError("--html is the page of one plan.  Leave --compare out, or take --json.")
    if flags.compare:
        searching.compare(flags.layouts, **shared)
    else:
        training.plan_run(html=flags.html, **shared)


def layouts(flags: LayoutsFlags) -> None:
    """Ranks the layouts of a run."""
    searching.search(
        gin_file=flags.settings.gin_file,
        gin_param=flags.settings.gin_param,
        json_file=flags.json_file,
        topology=flags.topology,
        verify=flags.verify,
        output=flags.output,
    )
