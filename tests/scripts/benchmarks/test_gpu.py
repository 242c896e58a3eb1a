"""What `meshloom bench gpu` says where there is no GPU, and reads from results."""

import json
from pathlib import Path

import click
import pytest

from configs.errors import UserError
from scripts import cli
from scripts.benchmarks.gpu import Flags, benchmark, shares_of


def test_no_gpu_is_an_error_that_says_what_to_install() -> None:
    with pytest.raises(UserError, match=r"JAX computes on cpu.*make cuda"):
        benchmark(Flags())


def test_an_unknown_part_is_an_error() -> None:
    with pytest.raises(click.UsageError, match=r"'train_2b' is not one of 'tests', 'train_1\.3b',"):
        cli.cli.main(["bench", "gpu", "--parts=train_2b"], standalone_mode=False)


def test_shares_are_read_by_system_or_batch_size(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    file.write_text(json.dumps({"meshloom": {"share_of_matrix_rate": 0.5}, "rounds": 3}))
    assert shares_of(file) == {"meshloom": 0.5}
    file.write_text(json.dumps({"batch_sizes": {"1": {"share_of_bandwidth": 0.25}}}))
    assert shares_of(file) == {"1": 0.25}
