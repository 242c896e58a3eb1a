"""Plans decoding, for `meshloom plan --decode`."""

import dataclasses
import functools

from configs.errors import UserError
from layouts.mesh import make_mesh
from models.decoding.sampling import Sampling
from scripts.commands.common import refuse_dispatch
from scripts.commands.decoding.decode import BATCH, search_of
from scripts.commands.planning.flags import DecodePlanFlags, PlanFlags
from scripts.commands.planning.inputs import PlanInputs, can_compile
from scripts.commands.shared_flags import SearchFlags
from trainer.decoding.decoder import padded
from trainer.decoding.requests import DecodeOptions
from trainer.feed import whole_batch
from trainer.planning import decoding as plans
from trainer.planning.child import in_child
from trainer.planning.counts import slice_mesh
from trainer.run import Run
from trainer.traces import DecodeShape


def plan_batch(inputs: PlanInputs, flags: PlanFlags) -> plans.DecodePlan:
    """Plans the batch that the flags describe, as exactly as possible on this machine."""
    refuse_dispatch(flags.settings.gin_param)
    run, decoding = inputs.run, flags.decoding
    rows = whole_batch(run, inputs.layout, inputs.sizes, decoding.batch_sequences or BATCH)
    inputs.check(dataclasses.replace(run, batch_sequences=rows, microbatches=1))
    names = ("beam", "flat", "temperature", "top_k", "top_p", "min_p", "samples")
    given = SearchFlags(**{name: getattr(decoding, name) for name in names})
    search, suffix_tokens = search_of(given, run.task), decoding.suffix_tokens or 0
    if suffix_tokens and not (isinstance(search, Sampling) and search.width > 1):
        raise UserError(f"--suffix_tokens={suffix_tokens}: a suffix ranks samples.  Add --samples.")
    lengths = padded_lengths(run, decoding)
    shape = DecodeShape(search, rows, *lengths, suffix_tokens, decoding.weights)
    _, run, layout, topology, sizes = inputs
    compiles = not flags.analytic and can_compile(topology)
    with inputs.explained_errors(run, functools.partial(plans.trace_decode, shape=shape)):
        if compiles and topology is None:
            step = plans.trace_decode(run, layout, make_mesh(layout), shape)
            return plans.plan_decode(step, None, plans.compile_decode(step))
        counts = None
        if compiles and topology is not None:
            counts = in_child(plans.count_compiled_decode, run, layout, sizes, topology, shape)
        step = plans.trace_decode(run, layout, slice_mesh(sizes, topology), shape)
        return plans.plan_decode(step, topology, counts or plans.estimate_decode(step))


def padded_lengths(run: Run, decoding: DecodePlanFlags) -> tuple[int, int, int]:
    """Returns the tokens of source and prompt, padded as in `decode`, and the new tokens."""
    task, options, suffix_tokens = run.task, DecodeOptions(), decoding.suffix_tokens or 0
    source_tokens, prompt_tokens = decoding.source_tokens, decoding.prompt_tokens
    max_tokens = decoding.max_tokens
    if task.has_source:
        source = source_tokens or task.row_lengths["source_length"]
        prompt = prompt_tokens or 0
        new = max_tokens or int(source * options.length_factor) + options.length_extra
    elif source_tokens is not None:
        raise UserError(
            f"--source_tokens={source_tokens}: the model has no encoder.  Use --prompt_tokens."
        )
    else:
        source, prompt = 0, task.length // 2 if prompt_tokens is None else prompt_tokens
        new = max_tokens or task.length // 2
    positions = run.model.max_length
    if positions is not None and max_tokens is None:
        new = max(1, min(new, positions - 1 - prompt - suffix_tokens))
    if positions is not None and prompt + 1 + new + suffix_tokens > positions:
        of_suffix = f" and {suffix_tokens} of the suffix" if suffix_tokens else ""
        raise UserError(
            f"{prompt} prompt tokens and {new} new ones{of_suffix} do not fit in the model's "
            f"{positions} positions.  Lower --prompt_tokens or --max_tokens."
        )
    return padded(source) if source else 0, padded(prompt) if prompt else 0, new
