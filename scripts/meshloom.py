"""The `meshloom` command: the flags of each of its commands, and the function that takes them."""

import click

from scripts.command_line import LazyGroup, exits, open_standard_streams

WORK = {
    "train": ("flags.train:TrainFlags", "train:train"),
    "prepare": ("flags.prepare:PrepareFlags", "prepare:prepare_task"),
    "evaluate": ("flags.evaluate:EvaluateFlags", "evaluate:evaluate_model"),
    "decode": ("flags.decode:DecodeFlags", "decode:decode_file"),
    "score": ("flags.decode:ScoreFlags", "score:score_file"),
    "rescore": ("flags.decode:RescoreFlags", "rescore:rescore_file"),
    "compare": ("flags.compare:CompareFlags", "compare:compare"),
    "gains": ("flags.compare:GainsFlags", "gains:gains"),
    "report": ("flags.report:ReportFlags", "report:report"),
    "plan": ("flags.plan:PlanFlags", "planning.command:plan"),
    "layouts": ("flags.plan:LayoutsFlags", "planning.command:layouts"),
}
INSPECT_WORK = {
    "config": ("flags.inspect:InspectConfigFlags", "inspect.config:config"),
    "data": ("flags.inspect:InspectDataFlags", "inspect.data:data"),
    "params": ("flags.inspect:InspectParamsFlags", "inspect.params:params"),
    "checkpoint": ("flags.inspect:InspectCheckpointFlags", "inspect.checkpoint:checkpoint"),
    "layout": ("flags.inspect:InspectLayoutFlags", "inspect.layout:layout"),
    "settings": ("flags.inspect:InspectSettingsFlags", "inspect.settings:inspect_settings"),
}
IMPORT_WORK = {"t5": ("flags.t5:ImportT5Flags", "t5:import_t5")}
EXPORT_WORK = {"t5": ("flags.t5:ExportT5Flags", "t5:export_t5")}


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
    """Makes a model directory of a model that another library trained."""


@cli.group("export", cls=LazyGroup, work=EXPORT_WORK)
def export_group() -> None:
    """Writes a model for another library."""


def main() -> None:
    open_standard_streams()
    exits(lambda: cli.main(standalone_mode=False))


if __name__ == "__main__":
    main()
