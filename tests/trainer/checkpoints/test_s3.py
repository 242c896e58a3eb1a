"""The settings by which TensorStore writes to S3; test_manager.py saves and restores there."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import tensorstore
from orbax.checkpoint._src.serialization import tensorstore_utils
from s3fs import S3FileSystem

from configs.paths import path_of
from tests.s3 import KEY
from trainer.checkpoints import s3

DRIVER = {"driver": "s3", "aws_credentials": {"type": "environment"}}


@pytest.mark.parametrize(
    ("environment", "driver"),
    [
        ({"AWS_DEFAULT_REGION": "eu-west-1"}, {}),
        (
            {"AWS_ENDPOINT_URL": "http://minio:9000"},
            {"endpoint": "http://minio:9000", "aws_region": "us-east-1"},
        ),
        (
            {"AWS_ENDPOINT_URL": "https://b.s3.x.vpce.amazonaws.com", "AWS_DEFAULT_REGION": "x"},
            {"endpoint": "https://b.s3.x.vpce.amazonaws.com", "aws_region": "x"},
        ),
    ],
)
def test_the_endpoint_is_that_of_s3fs(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], driver: dict[str, Any]
) -> None:
    path_of("s3://bucket/run")
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "none"}
    for name, value in {**keys, **environment}.items():
        monkeypatch.setenv(name, value)
    S3FileSystem.clear_instance_cache()
    assert s3._driver.__wrapped__() == DRIVER | driver
    S3FileSystem.clear_instance_cache()


@pytest.mark.parametrize("cloud", ["s3"], indirect=True)
@pytest.mark.parametrize("name", ["AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"])
def test_keys_may_be_in_one_of_the_files_alone(
    there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """TensorStore itself reads them if both files are there."""
    file = tmp_path / "keys"
    file.write_text(f"[default]\naws_access_key_id = {KEY}\naws_secret_access_key = none\n")
    for variable in s3._KEYS:
        monkeypatch.setenv(variable, "")  # so that it is as before afterwards
        monkeypatch.delenv(variable)
    for variable in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(variable, str(tmp_path / "none"))
    monkeypatch.setenv(name, str(file))
    S3FileSystem.clear_instance_cache()
    bucket, _, folder = str(there).removeprefix("s3://").partition("/")
    spec = s3._driver.__wrapped__() | {"bucket": bucket, "path": f"{folder}/"}
    tensorstore.KvStore.open(spec).result().write("array", b"numbers").result()
    assert (there / "array").read_bytes() == b"numbers"
    S3FileSystem.clear_instance_cache()


def test_settings_of_tensorstore_for_google_cloud_storage_become_those_of_s3(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    build = inspect.unwrap(tensorstore_utils.build_kvstore_tspec)  # as Orbax has it
    monkeypatch.setattr(tensorstore_utils, "build_kvstore_tspec", build)
    monkeypatch.setattr(s3, "_driver", lambda: {"driver": "s3", "endpoint": "http://here"})
    s3.add_s3.__wrapped__()
    driver = {"driver": "s3", "endpoint": "http://here"}
    spec = tensorstore_utils.build_kvstore_tspec("s3://bucket/run/state", name="a")
    assert spec["driver"] == "ocdbt" and "experimental_read_coalescing_interval" in spec
    assert spec["base"] == driver | {"bucket": "bucket", "path": "run/state"}
    plain = tensorstore_utils.build_kvstore_tspec("s3://bucket/run/state", use_ocdbt=False)
    assert plain == driver | {"bucket": "bucket", "path": "run/state"}
    for place in ("gs://bucket/run/state", "/run/state"):
        assert tensorstore_utils.build_kvstore_tspec(place) == build(place)
    with pytest.raises(ValueError, match="should be absolute"):  # else this module may go
        build("s3://bucket/run/state")
