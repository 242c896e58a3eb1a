"""The figures of a plan: their numbers, and their list in the documentation."""

import dataclasses

import pytest

from layouts.cost.interconnect import Topology
from layouts.mesh import mesh_sizes
from models.attention.multi_head import MultiHead
from tests.toys import ROOT, SPLITTABLE, optax_promotion
from tests.trainer.planning.runs import layout_named, toy_run
from trainer.planning.report import FIGURES, Figure, as_json
from trainer.planning.training import plan_from_trace


def test_the_whole_run_takes_its_steps() -> None:
    run = toy_run(dataclasses.replace(SPLITTABLE, dropout=0.0, attention=MultiHead()))
    layout, topology = layout_named("fsdp"), Topology.named("v5e:2x2")
    with optax_promotion():
        plan = plan_from_trace(run, layout, mesh_sizes(layout.mesh, topology.devices), topology)
    figures, step_s = as_json(plan), plan.step_s
    assert step_s is not None and figures["step_time_s"] == step_s
    assert figures["run_hours"] * 3600 == pytest.approx(run.steps * step_s)
    assert figures["chip_hours"] == pytest.approx(4 * figures["run_hours"])
    assert figures["tokens_per_s"] * step_s == pytest.approx(plan.tokens_per_step)


def row(key: str, figure: Figure) -> str:
    null = f"; `null`: {figure.null}" if figure.null else ""
    return f"| `{key}` | {figure.unit} | {figure.meaning}{null} |"


def test_the_documentation_lists_every_figure() -> None:
    text = (ROOT / "docs" / "planning.md").read_text()
    table = text.partition("| key | unit | meaning |")[2].partition("\n\n")[0].splitlines()
    assert table[2:] == [row(key, figure) for key, figure in FIGURES.items()]
