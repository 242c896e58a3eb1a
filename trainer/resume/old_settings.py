"""Reads settings that versions before the tree of parts saved, when a Transformer was flat."""

import ast
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from models.spec import TransformerSpec

SETTING = re.compile(
    r"^(?P<scope>(?:\w+/)*)Transformer\.(?P<name>\w+)[ \t]*=[ \t]*(?P<value>.*)$", re.MULTILINE
)
IMPORT = re.compile(r"^import[ \t]+(?P<module>models\.\S+)", re.MULTILINE)
MODULES = {
    "models.architectures": "models.transformer",
    "models.attention.layer": "models.attention.multi_head",
    "models.moe": "models.feed_forward.moe",
    "models.rope": "models.positions.rope_scaling",
}
POSITIONS = {
    "learned": "Learned",
    "sinusoidal": "Sinusoidal",
    "relative": "Relative",
    "rotary": "Rotary",
}
PATTERNS = ("pattern", "encoder_pattern")
DENSE = "Transformer.feed_forward = @Mlp()"


def upgraded(text: str) -> str:
    """Returns the text with today's names; a text without former names is unchanged.

    A setting stays on its line, so that messages about a line hold for both texts.  The line of a
    setting of a part that the model does not have becomes empty.

    >>> print(upgraded("Transformer.positions = 'rotary'\\nTransformer.rope_theta = 5e5"))
    Transformer.positions = @Rotary()
    Rotary.theta = 5e5
    """
    models: dict[str, dict[str, Any]] = {}
    for setting in SETTING.finditer(text):
        models.setdefault(setting["scope"], {})[setting["name"]] = _read(setting["value"])

    def renamed(setting: re.Match[str]) -> str:
        model = _OldModel(setting["scope"], models[setting["scope"]])
        new = model.upgraded(setting["name"], setting["value"])
        return setting[0] if new is None else new

    return IMPORT.sub(_imported, SETTING.sub(renamed, text))


class _OldModel(NamedTuple):
    """Holds the settings of a flat Transformer, and the scope that their names have."""

    scope: str
    values: Mapping[str, Any]

    def upgraded(self, name: str, text: str) -> str | None:
        """Returns the line of a setting; None if it is not a former one."""
        value, scope = _read(text), self.scope
        is_list = isinstance(value, tuple | list)
        if name in PATTERNS and is_list and all(kind in ("dense", "moe") for kind in value):
            return self._pattern(name, value)
        if name == "moe":
            return f"{scope}{DENSE}" if value is None else self._experts(text)
        if name == "positions" and value in POSITIONS:
            return f"{scope}Transformer.positions = @{POSITIONS[value]}()"
        if name == "attention" and isinstance(value, str) and not value.startswith(("@", "%")):
            return f"{scope}MultiHead.implementation = {text}"
        new = TransformerSpec.renamed.get(name)
        if new is None or name in ("attention", "positions"):
            return None
        part, positions = (
            new.partition(".")[0],
            POSITIONS.get(self.values.get("positions", "learned")),
        )
        has_part = positions is None or part not in POSITIONS.values() or part == positions
        return f"{scope}{new} = {text}" if has_part else ""

    def _pattern(self, name: str, kinds: tuple[str, ...]) -> str:
        if name == "encoder_pattern" and not self.values.get("encoder_layers"):
            return f"{self.scope}Transformer.encoder_pattern = None"
        experts = f"@{self.scope}experts/Block()" if self._mixes_kinds() else "@Block()"
        blocks = [experts if kind == "moe" else "@Block()" for kind in kinds]
        return f"{self.scope}Transformer.{name} = ({', '.join(blocks)},)"

    def _mixes_kinds(self) -> bool:
        """Returns whether only some of the layers have experts."""
        encoder = self.values.get("encoder_layers") and self.values.get("encoder_pattern")
        return len({*self.values.get("pattern", ("dense",)), *(encoder or ())}) > 1

    def _experts(self, reference: str) -> str:
        """Returns what puts experts into their layers."""
        is_mixed, more = self._mixes_kinds(), ""
        if self.scope and is_mixed:  # so that it has no feed-forward layer without the scope
            more += f"\n{self.scope}{DENSE}"
        scope = reference.rpartition("/")[0]
        if self.scope and scope:  # a scope of the experts hides the model's
            reference = f"{scope}/{self.scope}Moe()"
            more += f"\n{scope[1:]}/{self.scope}Moe.expert = @{self.scope}Mlp()"
        holder = "experts/Block" if is_mixed else "Transformer"
        return f"{self.scope}{holder}.feed_forward = {reference}{more}"


def _read(text: str) -> Any:
    """Returns a value as Python has it; a reference as its text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _imported(line: re.Match[str]) -> str:
    module = line["module"]
    for old, new in MODULES.items():
        if f"{module}.".startswith(f"{old}."):
            module = new + module.removeprefix(old)
    return f"import {module}"
