"""Each family has a recorded model, and its table agrees with itself."""

import pytest

from tests.trainer.checkpoints.huggingface.test_decoder import CASES
from trainer.checkpoints.huggingface.families import DEFAULTS, FAMILIES, IGNORED, SIZES


def test_each_family_is_recorded() -> None:
    assert {name.split(",")[0] for name in CASES} == set(FAMILIES)


@pytest.mark.parametrize("kind", FAMILIES)
def test_no_setting_is_both_ignored_and_read(kind: str) -> None:
    family = FAMILIES[kind]
    read = {*DEFAULTS, *SIZES.values(), *family.defaults, *family.legal, *family.aliases.values()}
    assert not read & set(IGNORED)
    assert set(family.aliases.values()) <= set(family.defaults)
