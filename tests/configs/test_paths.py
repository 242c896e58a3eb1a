"""Paths of this machine and of remote storage."""

from pathlib import Path

import pytest

from configs.errors import UserError
from configs.paths import STORAGES, absolute, in_bucket, is_remote, local_path, path_of


@pytest.mark.parametrize("name", ["runs/mine", "/runs/mine", "gs", "a:b", "odd:name/x"])
def test_a_name_without_a_scheme_is_of_this_machine(name: str) -> None:
    assert path_of(name) == Path(name) and not is_remote(path_of(name))
    assert absolute(path_of(name)) == Path.cwd() / name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "az://bucket/run",
            r"az://bucket/run: az:// is not supported.  Legal: .* gs://bucket/name, s3://buc",
        ),
        ("gs:/bucket/run", "gs:/bucket/run: gs:/ is not supported"),
        ("gs://bucket", "gs://bucket: names no object in a bucket.  Legal: gs://bucket/name"),
        ("gs:///run", "names no object in a bucket"),
        ("s3://bucket/", "names no object in a bucket"),
        ("s3://two words/run", "names no object in a bucket"),
        ("~no-such-user/run", "~no-such-user/run: no such user.  Legal: ~/name, or an abs"),
    ],
)
def test_what_pathlib_would_take_for_a_folder_is_refused(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        path_of(name)


@pytest.mark.parametrize("folder", ["gs://bucket/runs", "s3://bucket/runs", "hf://datasets/o/n/a"])
def test_a_remote_path_keeps_its_name(folder: str) -> None:
    scheme, _, rest = folder.partition("://")
    pytest.importorskip(STORAGES[scheme].package)
    path, name = path_of(folder) / "mine", f"{folder}/mine"
    assert str(path) == name and is_remote(path) and absolute(path) == path
    assert in_bucket(path) == (rest.split("/")[0], f"{rest.partition('/')[2]}/mine")
    with pytest.raises(UserError, match=f"--input = {name}: it cannot be remote"):
        local_path(path, "--input")
