"""Allows only editable installs of Meshloom."""

import sys
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CheckoutOnly(BuildHookInterface[Any]):
    """Refuses to build an ordinary wheel, which would lack the folders that Meshloom runs from."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "standard":
            # Not an exception: pip would show its traceback.
            sys.exit(
                "Meshloom runs from its checkout: clone the repository and run `pip install -e .` "
                "in it."
            )
