"""What `meshloom bench gpu` says where there is no GPU, and reads from results."""

import json
import re
from pathlib import Path

import click
import pytest

from configs.errors import UserError
from scripts import cli
from scripts.benchmarks.gpu import PARTS, Flags, benchmark, shares_of
from scripts.benchmarks.rounds import CHECKOUT


def test_no_gpu_is_an_error_that_says_what_to_install() -> None:
    with pytest.raises(UserError, match=r"JAX computes on cpu.*make cuda"):
        benchmark(Flags())


def test_an_unknown_part_is_an_error() -> None:
    with pytest.raises(click.UsageError, match=r"'train_2b' is not one of 'tests', 'train_1\.3b',"):
        cli.cli.main(["bench", "gpu", "--parts=train_2b"], standalone_mode=False)


def test_the_benchmarks_of_make_exist() -> None:
    makefile = (CHECKOUT / "Makefile").read_text()
    names = re.findall(r"for name in (.*); do", makefile)[0].split()
    lines = [[name] for name in names] + [line.split() for _, line in PARTS.values()]
    context = click.Context(cli.cli)
    bench = cli.cli.get_command(context, "bench")
    assert isinstance(bench, click.Group)
    for name, *arguments in lines:
        command = bench.get_command(context, name)
        assert command is not None, name
        command.make_context(name, arguments)


def test_shares_are_read_by_system_or_batch_size(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    file.write_text(json.dumps({"meshloom": {"share_of_matrix_rate": 0.5}, "rounds": 3}))
    assert shares_of(file) == {"meshloom": 0.5}
    file.write_text(json.dumps({"batch_sizes": {"1": {"share_of_bandwidth": 0.25}}}))
    assert shares_of(file) == {"1": 0.25}
