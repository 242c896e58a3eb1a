"""`meshloom plan --decode`: what decoding will cost, as tables, JSON and one page."""

import dataclasses
from typing import Any

from configs.errors import UserError
from layouts.layout import Layout
from layouts.lint.warnings import size_text
from layouts.mesh import batch_shards
from models.decoding.sampling import Sampling
from scripts.commands.common import (
    Strings,
    rounded,
    rows_of_group,
    settings,
    warn_unused,
    write_json,
)
from scripts.commands.decode import BATCH, Wishes
from scripts.commands.plan import (
    Asked,
    causes,
    mesh_for,
    print_collectives,
    print_times,
    slice_named,
)
from scripts.commands.plan_page import write_page
from scripts.terminal import print_table
from trainer.decoding.decoder import padded
from trainer.decoding.requests import Options
from trainer.planning.decoding import DecodePlan, Wanted, compiled, plan, planned, traced
from trainer.planning.report import collectives
from trainer.run import Run


def plan_decoding(
    gin_file: Strings,
    gin_param: Strings,
    json_file: str | None,
    html: str | None,
    topology: str | None,
    analytic: bool,
    batch_sequences: int | None,
    source_tokens: int | None,
    prompt_tokens: int | None,
    max_tokens: int | None,
    **wished: Any,
) -> None:
    """Plans the decoding of one batch under one layout."""
    asked = Asked.read(settings(None, gin_file, gin_param), slice_named(topology))
    warn_unused(asked.config, Run, Layout)
    _, run, layout, slice, sizes = asked
    rows = rounded(batch_sequences or BATCH, batch_shards(layout, sizes) * rows_of_group(run))
    asked.check(dataclasses.replace(run, batch_sequences=rows, microbatches=1))
    tokens = lengths(run, source_tokens, prompt_tokens, max_tokens)
    wanted = Wanted(Wishes(**wished).search(run.task), rows, *tokens)
    mesh = None if analytic else mesh_for(asked)
    if mesh is None:
        found = planned(run, layout, sizes, slice, wanted)
    else:
        step = traced(run, layout, mesh, wanted)
        found = plan(step, slice, compiled(step))
    facts = as_json(found)
    show(found, facts, asked.title)
    write_json(json_file, facts)
    if html is not None:
        write_page(html, f"Decoding: {asked.title}", facts)


def lengths(
    run: Run, source_tokens: int | None, prompt_tokens: int | None, max_tokens: int | None
) -> tuple[int, int, int]:
    """Tokens of a source, of a prompt and new ones, as `decode` would have them, in its shapes."""
    task, options = run.task, Options()
    if task.has_source:
        source = source_tokens or task.row_lengths["source_length"]
        prompt = prompt_tokens or 0
        most = max_tokens or int(source * options.length_factor) + options.length_extra
    elif source_tokens is not None:
        raise UserError(
            f"--source_tokens={source_tokens}: the model translates nothing.  "
            "Its texts begin with --prompt_tokens."
        )
    else:
        source, prompt = 0, task.length // 2 if prompt_tokens is None else prompt_tokens
        most = max_tokens or task.length // 2
    places = run.model.most_places
    if places is not None and max_tokens is None:
        most = max(1, min(most, places - 1 - prompt))
    if places is not None and prompt + 1 + most > places:
        raise UserError(
            f"{prompt} prompt tokens and {most} new ones do not fit in the model's {places} "
            "learned positions.  Lower --prompt_tokens or --max_tokens."
        )
    return padded(source) if source else 0, padded(prompt) if prompt else 0, padded(most)


def as_json(found: DecodePlan) -> dict[str, Any]:
    """Every figure of a plan by a stable name; None where it is not known."""
    step, counted, slice = found.step, found.counted, found.slice
    start, token = found.timings or (None, None)
    wanted, search = step.wanted, step.wanted.search
    return {
        "topology": None if slice is None else slice.name,
        "devices": found.devices,
        "mesh": step.sizes,
        "compiled_for": counted.compiled_for,
        "batch_sequences": wanted.rows,
        "source_tokens": wanted.source_tokens,
        "prompt_tokens": wanted.prompt_tokens,
        "new_tokens": wanted.new_tokens,
        "hypotheses": search.width,
        "flat": search.flat,
        "draws": isinstance(search, Sampling) and search.temperature > 0,
        "fits": found.fits,
        "bytes_per_device": counted.needed_bytes,
        "memory_bytes": None if slice is None else slice.chip.memory_bytes,
        "bytes_by_cause": dict(counted.bytes_by_cause),
        "cache_bytes": found.cache_bytes,
        "parameters": found.parameters,
        "model_flops": found.model_flops,
        "executed_flops": found.executed_flops,
        "collectives": [
            {"part": name, **row}
            for name, part in (("token", counted.token), ("start", counted.start))
            for row in collectives(part.collectives, slice, found.places, step.sizes)
        ],
        "unexpected_collectives": [str(unexpected) for unexpected in found.unexpected_collectives],
        "read_bytes_per_token": counted.token.read_bytes,
        "start_latency_s": None if start is None else start.step_s,
        "start_parts_s": None if start is None else start.parts,
        "token_latency_s": found.token_s,
        "token_parts_s": None if token is None else token.parts,
        "output_latency_s": found.output_s,
        "tokens_per_s": found.tokens_per_s,
        "compile_s": counted.compile_s,
    }


def show(found: DecodePlan, facts: dict[str, Any], place: str) -> None:
    """Prints a plan."""
    print(f"Plan of decoding: {place}, {found.devices:,} devices, {found.parameters:,} parameters")
    print(f"{described(facts)}.")
    print_table(["memory of a device", "bytes"], [(c, size_text(n)) for c, n in causes(facts)])
    print_collectives([c for c in facts["collectives"] if c["part"] == "token"], "a token")
    for name, timing in zip(("start", "token"), found.timings or (), strict=False):
        print_times(name, timing)
    for unexpected in found.unexpected_collectives:
        print(f"Unlike what the layout asks for: {unexpected}.")
    print(summary(facts))


def described(facts: dict[str, Any]) -> str:
    """What is decoded, in the lengths that it is padded to."""
    count, width = facts["batch_sequences"], facts["hypotheses"]
    parts = [f"{count:,} rows" if count > 1 else "1 row"]
    if facts["source_tokens"]:
        parts.append(f"of {facts['source_tokens']:,} source tokens")
    parts.append(f"{facts['prompt_tokens']:,} prompt tokens, {facts['new_tokens']:,} new ones")
    if width > 1:
        kind = "samples" if facts["draws"] else "hypotheses"
        parts.append(f"{width} {kind} a row in {'one cache' if facts['flat'] else 'caches apart'}")
    return ", ".join(parts)


def summary(facts: dict[str, Any]) -> str:
    """A plan in one line."""
    known = {True: "fits", False: "does not fit", None: "memory"}[facts["fits"]]
    cache, executed = facts["bytes_by_cause"]["cache"], facts["executed_flops"]
    parts = [
        f"{known}: {size_text(facts['bytes_per_device'])} a device",
        f"cache {size_text(cache)} a device, {size_text(facts['cache_bytes'])} in all",
        f"{facts['model_flops']:.3g} FLOPs for all outputs ({executed:.3g} executed)",
    ]
    if facts["token_latency_s"] is not None:
        parts += [
            f"{1e3 * facts['token_latency_s']:.3g} ms a token",
            f"{facts['output_latency_s']:.3g} s an output, of which "
            f"{facts['start_latency_s']:.3g} s before its first token",
            f"{facts['tokens_per_s']:,.1f} tokens/s, one text a row",
        ]
    if facts["compile_s"] is not None:
        parts.append(f"compiled in {facts['compile_s']:.0f} s")
    return "; ".join(parts) + "."
