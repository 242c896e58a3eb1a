"""Runs `meshloom inspect layout`: shows the problems and placements of a layout."""

from configs.errors import UserError
from layouts.layout import Layout
from layouts.lint.report import lint, report
from scripts.commands.common import setting_origins, settings_of, write_json
from scripts.commands.inspect.flags import InspectLayoutFlags
from scripts.commands.inspect.params import placed, planned_sizes
from scripts.terminal import print_table
from trainer.checks import find_untraceable, layout_name, record_loss, sources
from trainer.run import Run
from trainer.traces import trace_evaluate_step, trace_train_step


def layout(flags: InspectLayoutFlags) -> None:
    """Prints the problems of the layout, and where each kind of tensor of the model lives.

    Fails as `meshloom train` does if one of the problems is an error.
    """
    config = settings_of(flags.settings)
    run, layout = config.make(Run), config.make(Layout)
    sizes = planned_sizes(layout)
    record = record_loss(run)
    problems = lint(layout, sizes, record, sources(setting_origins(config)))
    if all(problem.severity == "warning" for problem in problems):
        untraceable = find_untraceable(
            run, layout, sizes, setting_origins(config), trace_train_step, trace_evaluate_step
        )
        problems = [*filter(None, [untraceable]), *problems]
    kinds = sorted({(t.axes, t.stored) for t in record.tensors})
    places = [
        (
            axes,
            "weight" if stored else "activation",
            placed(axes, layout.place(axes, stored=stored)),
        )
        for axes, stored in kinds
    ]
    print_table(["axes", "kind", "place"], places)
    write_json(
        flags.json_file,
        {
            "mesh": sizes,
            "problems": [str(problem) for problem in problems],
            "places": [dict(zip(("axes", "kind", "place"), row, strict=True)) for row in places],
        },
    )
    text = report(layout_name(setting_origins(config)), problems)
    if any(problem.severity == "error" for problem in problems):
        raise UserError(text)
    print(text)
