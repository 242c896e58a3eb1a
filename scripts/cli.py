"""Defines the commands of `meshloom`: their flags, and the functions that run them."""

import click

from scripts.command_line import LazyGroup


def work(folder: str, flags: str, function: str) -> tuple[str, str]:
    """Returns the paths of a command's flags and of the function that runs it.

    They are in separate modules, so that --help does not import the libraries of the work.
    """
    return f"commands.{folder}.flags:{flags}", f"commands.{folder}.{function}"


WORK = {
    "train": work("training", "TrainFlags", "train:train"),
    "prepare": work("training", "PrepareFlags", "prepare:prepare_task"),
    "evaluate": work("evaluation", "EvaluateFlags", "evaluate:evaluate_model"),
    "decode": work("decoding", "DecodeFlags", "decode:decode_file"),
    "serve": work("serving", "ServeFlags", "serve:serve"),
    "score": work("decoding", "ScoreFlags", "score:score_file"),
    "gains": work("evaluation", "GainsFlags", "gains:gains"),
    "report": work("training", "ReportFlags", "report:report"),
    "supervise": work("training", "SuperviseFlags", "supervise:supervise"),
    "doctor": work("doctor", "DoctorFlags", "doctor:doctor"),
    "plan": work("planning", "PlanFlags", "plan:plan"),
    "tune": work("planning", "TuneFlags", "tune:tune"),
    "papers": work("papers", "PapersFlags", "papers:show_papers"),
}
INSPECT_WORK = {
    "config": work("inspect", "InspectConfigFlags", "settings:config"),
    "data": work("inspect", "InspectDataFlags", "data:data"),
    "params": work("inspect", "InspectParamsFlags", "layout:params"),
    "checkpoint": work("inspect", "InspectCheckpointFlags", "run:checkpoint"),
    "layout": work("inspect", "InspectLayoutFlags", "layout:layout"),
    "settings": work("inspect", "InspectSettingsFlags", "settings:inspect_settings"),
}
IMPORT_WORK = {
    "hf": work("conversion", "ImportHfFlags", "hf:import_hf"),
    "peft": work("conversion", "ImportPeftFlags", "hf:import_peft"),
}
EXPORT_WORK = {
    "hf": work("conversion", "ExportHfFlags", "hf:export_hf"),
    "peft": work("conversion", "ExportPeftFlags", "hf:export_peft"),
}
BENCHMARKS = {
    name: (f"benchmarks.{name}:Flags", f"benchmarks.{name}:benchmark")
    for name in ("train", "translate", "decode", "generate", "serve", "moe")
}


@click.group(
    cls=LazyGroup,
    work=WORK,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="meshloom", prog_name="meshloom")
def cli() -> None:
    """Trains, evaluates and decodes Transformers from gin files, under any layout."""


for name, commands, text in (
    ("inspect", INSPECT_WORK, "Shows settings, data, parameters, a checkpoint or a layout."),
    ("import", IMPORT_WORK, "Imports a model that another library trained."),
    ("export", EXPORT_WORK, "Exports a model for another library."),
    ("bench", BENCHMARKS, "Measures speed, and compares it with other libraries if installed."),
):
    cli.add_command(LazyGroup(name, work=commands, help=text, short_help=text))
