"""Flags of `meshloom report`."""

from dataclasses import dataclass

from scripts.commands.flags.shared import ModelDir


@dataclass(frozen=True, kw_only=True)
class ReportFlags:
    """Draws the curves of a run and the load of its experts, as pictures and one page."""

    EXAMPLES = ("meshloom report --model_dir=runs/mine",)
    model_dir: ModelDir
