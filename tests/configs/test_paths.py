"""Paths of this machine and of Google Cloud Storage."""

from pathlib import Path

import pytest

from configs.errors import UserError
from configs.paths import absolute, is_remote, local_path, path_of


@pytest.mark.parametrize("name", ["runs/mine", "/runs/mine", "gs", "a:b", "odd:name/x"])
def test_a_name_without_a_scheme_is_of_this_machine(name: str) -> None:
    assert path_of(name) == Path(name) and not is_remote(path_of(name))
    assert absolute(path_of(name)) == Path.cwd() / name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "s3://bucket/run",
            r"s3://bucket/run: s3:// is not supported.  Legal: .* gs://bucket/name",
        ),
        ("gs:/bucket/run", "gs:/bucket/run: gs:/ is not supported"),
        ("gs://bucket", "gs://bucket: no name in a bucket.  Legal: gs://bucket/name"),
        ("gs:///run", "no name in a bucket"),
    ],
)
def test_what_pathlib_would_take_for_a_folder_is_refused(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        path_of(name)


def test_a_remote_path_keeps_its_name() -> None:
    pytest.importorskip("gcsfs")
    path = path_of("gs://bucket/runs") / "mine"
    assert str(path) == "gs://bucket/runs/mine" and is_remote(path) and absolute(path) == path
    with pytest.raises(UserError, match="--input = gs://bucket/runs/mine: it cannot be remote"):
        local_path(path, "--input")
