"""What the tests of the trainer share: types as optax wants them."""

from collections.abc import Iterator

import pytest

from tests.toys import optax_promotion


@pytest.fixture(scope="module", autouse=True)
def optax_types() -> Iterator[None]:
    with optax_promotion():
        yield
