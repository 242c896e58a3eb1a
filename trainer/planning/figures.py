"""Describes the figures of a plan: the keys of its JSON, their units and what they mean."""

from typing import NamedTuple

SCHEMA_VERSION = 2
"""Rises with each change of a key, a unit or a meaning; new keys leave it as it is."""


class Figure(NamedTuple):
    """Describes a figure of a plan."""

    label: str
    unit: str
    """One of bytes, s, hours, chip-hours, FLOPs, tokens/s, share; empty for counts and names."""
    meaning: str
    null: str = ""
    """What it means where there is none."""


FIGURES = {
    "schema_version": Figure("version of the keys", "", "rises when a key changes its meaning"),
    "topology": Figure("topology", "", "the slice", "the devices of this machine"),
    "devices": Figure("devices", "", "as JAX counts: a chip of v2, v3 has two"),
    "mesh": Figure("mesh", "", "sizes of the mesh axes"),
    "attention": Figure("attention", "", "what computes the attention of each part of the model"),
    "gradient_sums": Figure(
        "sums of gradients",
        "",
        "parameters whose gradients cross devices once a step, and once a microbatch",
        "one microbatch, stages, or all tokens on one device",
    ),
    "host_bytes": Figure(
        "on the host", "B", "activations of a device that wait in its host's memory"
    ),
    "microbatches": Figure("microbatches", "", "of a batch"),
    "stages": Figure("stages", "", "of layers, which microbatches go through; 1: no stages"),
    "pipeline_repeats": Figure("repeats", "", "how often each microbatch goes around the stages"),
    "bubble": Figure("bubble", "share", "of their time that stages idle"),
    "idle_s": Figure("idle time", "s", "the same of a step, at most", "unknown"),
    "compiled_for": Figure(
        "compiled for", "", "the platform of the compiled program", "by the trace alone"
    ),
    "compile_s": Figure("compile time", "s", "on this machine"),
    "fits": Figure("fits", "", "whether a device's memory is large enough", "unknown"),
    "bytes_per_device": Figure("memory needed", "bytes", "the largest sum at any time, per device"),
    "memory_bytes": Figure("memory available", "bytes", "of one device", "unknown"),
    "bytes_by_cause": Figure("memory by cause", "bytes", "the parts of the memory needed"),
    "cache_bytes": Figure("cache", "bytes", "keys and values of all rows, on all devices"),
    "parameters": Figure("parameters", "", "numbers in the weights of the model"),
    "model_flops": Figure(
        "model FLOPs",
        "FLOPs",
        "products that the model needs, none twice: of experts those chosen, of causal attention "
        "half",
    ),
    "executed_flops": Figure(
        "executed FLOPs", "FLOPs", "the same with what is recomputed or computed on several devices"
    ),
    "excess_flops": Figure(
        "excess FLOPs", "", "a sentence where the program executes 5 % more than its trace"
    ),
    "step_time_s": Figure("step time", "s", "of one training step", "unknown"),
    "step_time_range_s": Figure(
        "range of the step time",
        "s",
        "on GPUs: from all traffic overlapped to none and products at half of the peak",
        "not on GPUs",
    ),
    "step_time_parts_s": Figure("parts of the step time", "s", "by what takes them"),
    "step_time_by_part": Figure(
        "step time by part of the model",
        "s",
        "products, other compute, traffic, overlapped traffic, and products at the peak (least_s)",
    ),
    "longest_other": Figure("longest other compute", "s", "lines that are no products"),
    "start_latency_s": Figure(
        "time to the first token", "s", "sources and prompts of a batch are read at once"
    ),
    "start_parts_s": Figure("parts of that time", "s", "by what takes them"),
    "token_latency_s": Figure("time of a token", "s", "one step of decoding, for the whole batch"),
    "token_parts_s": Figure("parts of the time of a token", "s", "by what takes them"),
    "suffix_latency_s": Figure(
        "time of the suffix", "s", "read behind all samples of a batch at once", "no suffix"
    ),
    "suffix_parts_s": Figure("parts of the time of the suffix", "s", "by what takes them"),
    "output_latency_s": Figure(
        "time of an output", "s", "the start, all new tokens of a batch and the suffix"
    ),
    "unit": Figure("unit of the rates", "", "tokens; of a classifier of images, images"),
    "tokens_per_step": Figure("tokens per step", "", "target tokens, padding included"),
    "tokens_per_s": Figure(
        "tokens per second", "tokens/s", "on all devices; decoding counts one text a row"
    ),
    "utilisation": Figure(
        "utilisation", "share", "model FLOPs per second by the peak of all matrix units"
    ),
    "utilisation_full_attention": Figure(
        "utilisation with full attention",
        "share",
        "the same where masked pairs of tokens count as well, as in publications until 2025",
    ),
    "run_steps": Figure("steps", "", "of the whole run"),
    "run_hours": Figure("time of the run", "hours", "all steps; no evaluation, no checkpoints"),
    "chip_hours": Figure("chip-hours", "chip-hours", "the time of the run by the number of chips"),
    "batch_sequences": Figure("rows", "", "decoded together"),
    "source_tokens": Figure("source tokens", "", "of a row, as padded"),
    "prompt_tokens": Figure("prompt tokens", "", "of a row, as padded"),
    "new_tokens": Figure("new tokens", "", "of a row, at most"),
    "suffix_tokens": Figure("suffix tokens", "", "that rank the samples; 0: none do"),
    "hypotheses": Figure("hypotheses", "", "or samples of a row"),
    "flat": Figure("one cache for them", "", "true: one flat cache; false: one for each"),
    "draws": Figure("samples", "", "true: tokens are drawn; false: searched"),
    "read_bytes_per_token": Figure(
        "bytes read for a token", "bytes", "weights and cache, per device"
    ),
    "collectives": Figure(
        "collectives",
        "",
        "each with part (of decoding), kind, mesh_axes, count, bytes (of the tensor), "
        "received_bytes (of a device, in all), overlaps (with compute), source (line of the model) "
        "and seconds where known",
    ),
    "unexpected_collectives": Figure(
        "unexpected collectives", "", "sentences: what the compiler does beyond the layout"
    ),
    "weights": Figure("largest weights", "bytes", "path, axes, bytes, bytes_per_device"),
}
"""All figures of plans of training and of decoding, by their key in the JSON."""
