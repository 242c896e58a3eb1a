"""What the tests of the trainer share: types as optax wants them, and one real run."""

from collections.abc import Iterator

import pytest

from tests.toys import optax_promotion
from tests.trainer.command import Command


@pytest.fixture(scope="module", autouse=True)
def optax_types() -> Iterator[None]:
    with optax_promotion():
        yield


@pytest.fixture(scope="session")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Command:
    """A run of the command line from start to end, on one device, never disturbed."""
    command = Command.on_new_text(tmp_path_factory.mktemp("straight"))
    command.train().finish()
    return command
