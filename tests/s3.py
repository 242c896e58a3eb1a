"""S3 on this machine."""

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from typing import Any, ClassVar

from tests.clouds import BUCKET, Cloud, proxy
from tests.launch_local import free_port

KEY = "key-of-the-tests"


@dataclasses.dataclass
class S3(Cloud):
    """Emulated by moto."""

    scheme: ClassVar[str] = "s3"
    key: str = KEY
    """The only access key that it knows."""

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.address,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": "none",
        }

    def answer(self, method: str, path: str, body: bytes, headers: Any) -> Any:
        """Adds what moto does not look at: the access key."""
        if f"Credential={self.key}/" in headers.get("Authorization", ""):
            return self.forward(method, path, body, headers)
        code, message = "InvalidAccessKeyId", "The access key is unknown."
        error = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
        return 403, [("Content-Type", "application/xml")], error.encode()


@contextlib.contextmanager
def running_s3() -> Iterator[S3]:
    """Runs the emulator and the proxy in threads."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    cloud = S3(free_port(), free_port())
    emulator = ThreadedMotoServer("127.0.0.1", cloud.emulator_port, verbose=False)
    emulator.start()
    cloud.forward("PUT", f"/{BUCKET}")
    with proxy(cloud):
        yield cloud
    emulator.stop()
