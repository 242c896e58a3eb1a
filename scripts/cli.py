"""Defines the commands of `meshloom`: the flags of each, and the function that takes them."""

import click

from scripts.command_line import BenchmarkGroup, LazyGroup

# The dataclass of each command's flags and the function that takes it, in a module each, so that
# --help imports no library of the work.
WORK = {
    "train": ("training.flags:TrainFlags", "training.train:train"),
    "prepare": ("training.flags:PrepareFlags", "training.prepare:prepare_task"),
    "evaluate": ("evaluation.flags:EvaluateFlags", "evaluation.evaluate:evaluate_model"),
    "decode": ("decoding.flags:DecodeFlags", "decoding.decode:decode_file"),
    "serve": ("serving.flags:ServeFlags", "serving.serve:serve"),
    "score": ("decoding.flags:ScoreFlags", "decoding.score:score_file"),
    "rescore": ("decoding.flags:RescoreFlags", "decoding.rescore:rescore_file"),
    "compare": ("evaluation.flags:CompareFlags", "evaluation.compare:compare"),
    "gains": ("evaluation.flags:GainsFlags", "evaluation.gains:gains"),
    "report": ("training.flags:ReportFlags", "training.report:report"),
    "supervise": ("training.flags:SuperviseFlags", "training.supervise:supervise"),
    "doctor": ("doctor.flags:DoctorFlags", "doctor.doctor:doctor"),
    "plan": ("planning.flags:PlanFlags", "planning.plan:plan"),
    "layouts": ("planning.flags:LayoutsFlags", "planning.layouts:search"),
}
INSPECT_WORK = {
    "config": ("inspect.flags:InspectConfigFlags", "inspect.config:config"),
    "data": ("inspect.flags:InspectDataFlags", "inspect.data:data"),
    "params": ("inspect.flags:InspectParamsFlags", "inspect.params:params"),
    "checkpoint": ("inspect.flags:InspectCheckpointFlags", "inspect.checkpoint:checkpoint"),
    "layout": ("inspect.flags:InspectLayoutFlags", "inspect.layout:layout"),
    "settings": ("inspect.flags:InspectSettingsFlags", "inspect.settings:inspect_settings"),
}
IMPORT_WORK = {
    "hf": ("conversion.flags:ImportHfFlags", "conversion.hf:import_hf"),
    "t5": ("conversion.flags:ImportT5Flags", "conversion.t5:import_t5"),
}
EXPORT_WORK = {
    "hf": ("conversion.flags:ExportHfFlags", "conversion.hf:export_hf"),
    "t5": ("conversion.flags:ExportT5Flags", "conversion.t5:export_t5"),
}

BENCHMARKS = ("train", "translate", "decode", "generate", "serve", "moe", "input", "start",
              "collectives", "gpu")  # fmt: skip


@click.group(
    cls=LazyGroup,
    work=WORK,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="meshloom", prog_name="meshloom")
def cli() -> None:
    """Trains, evaluates and decodes Transformers from gin files, under any layout."""


@cli.group("inspect", cls=LazyGroup, work=INSPECT_WORK)
def inspect_group() -> None:
    """Shows settings, data, parameters, a checkpoint or a layout."""


@cli.group("import", cls=LazyGroup, work=IMPORT_WORK)
def import_group() -> None:
    """Imports a model that another library trained."""


@cli.group("export", cls=LazyGroup, work=EXPORT_WORK)
def export_group() -> None:
    """Exports a model for another library."""


@cli.group("bench", cls=BenchmarkGroup, benchmarks=BENCHMARKS)
def bench_group() -> None:
    """Measures speed, and compares it with other libraries if they are installed."""
