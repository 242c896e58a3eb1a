"""Makes Orbax write to S3: TensorStore has a driver for S3, but Orbax 0.12 does not use it."""

import functools
import os
import re
from typing import Any

from orbax.checkpoint._src.serialization import tensorstore_utils

from data.storage.remote import file_system

SCHEME = "s3://"
_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


@functools.cache
def add_s3() -> None:
    """Gives S3 paths the settings of Google Cloud Storage paths, but with another driver."""
    build = tensorstore_utils.build_kvstore_tspec

    @functools.wraps(build)
    def build_for_both(directory: str, *args: Any, **kwargs: Any) -> Any:
        spec = build(directory.replace(SCHEME, "gs://"), *args, **kwargs)
        return _on_s3(spec) if directory.startswith(SCHEME) else spec

    tensorstore_utils.build_kvstore_tspec = build_for_both


def _on_s3(spec: Any) -> Any:
    if not isinstance(spec, dict):
        return spec
    driver = _driver() if spec.get("driver") in ("gcs", "gcs_grpc") else {}
    return {name: _on_s3(value) for name, value in spec.items()} | driver


@functools.cache
def _driver() -> dict[str, Any]:
    """Returns the driver with s3fs's endpoint, which TensorStore does not look up itself."""
    from botocore import credentials, session

    driver: dict[str, Any] = {"driver": "s3"}
    s3 = file_system(SCHEME).connect().meta
    if not re.match(r"https://s3\..*amazonaws\.com", s3.endpoint_url):  # it finds Amazon's itself
        driver |= {"endpoint": s3.endpoint_url, "aws_region": s3.region_name}
    keys = session.Session().get_credentials()
    # TensorStore fails to read some files of ~/.aws, but gets a role's changing keys itself.
    if keys and not isinstance(keys, credentials.RefreshableCredentials):
        frozen = keys.get_frozen_credentials()
        os.environ |= {name: key for name, key in zip(_KEYS, frozen[:3], strict=True) if key}
        driver |= {"aws_credentials": {"type": "environment"}}
    return driver
