"""Describes the figures of a plan: the keys of its JSON, their units and what they mean."""

import tomllib
from pathlib import Path
from typing import NamedTuple

SCHEMA_VERSION = 2
"""Rises with each change of a key, a unit or a meaning; new keys leave it as it is."""


class Figure(NamedTuple):
    """Describes a figure of a plan."""

    label: str
    meaning: str
    unit: str = ""
    """One of bytes, s, hours, chip-hours, FLOPs, tokens/s, share; empty for counts and names."""
    null: str = ""
    """What it means where there is none."""


FIGURES = {
    key: Figure(**figure)
    for key, figure in tomllib.loads(Path(__file__).with_suffix(".toml").read_text()).items()
}
