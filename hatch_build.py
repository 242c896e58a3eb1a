"""Builds Meshloom for an editable install only."""

import sys
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CheckoutOnly(BuildHookInterface[Any]):
    """Refuses an ordinary wheel, which would hold none of the folders that Meshloom runs from."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "standard":
            # No exception: pip would show its traceback.
            sys.exit(
                "Meshloom runs from its checkout: clone the repository and run `pip install -e .` "
                "in it."
            )
