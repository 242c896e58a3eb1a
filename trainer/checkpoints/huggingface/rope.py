"""Converts rotary positions between Hugging Face's settings and Meshloom's."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from configs.spec import names
from models.positions.rotary import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    Rotary,
    YarnScaling,
)
from trainer.checkpoints.huggingface.families import Settings

LENGTH = "original_max_position_embeddings"
PLAIN, LONG, DYNAMIC = "default", "longrope", "dynamic"
SCALINGS: Mapping[str, type[RopeScaling]] = {
    "linear": LinearScaling, "llama3": Llama3Scaling, "yarn": YarnScaling,
    LONG: LongRopeScaling, DYNAMIC: DynamicScaling,
}  # fmt: skip
"""By Hugging Face's name."""
MSCALE, MSCALE_ALL = MSCALES = ("mscale", "mscale_all_dim")
"""Settings of DeepSeek's YaRN from which the magnitude is computed."""
FRACTION = "partial_rotary_factor"
KIND, OF_ALL_KINDS = ("rope_type", "type"), ("rope_theta", FRACTION)
COMMON = (*KIND, *OF_ALL_KINDS)
FULL, SLIDING = KINDS = ("full_attention", "sliding_attention")
"""Kinds of layers."""
LOCAL = "rope_local_base_freq"
"""The base of the wavelengths of sliding layers, if it differs."""
PLACES = ("rope_parameters", "rope_scaling")
"""Where new and old files have these settings.  Users add the old one to new files, too."""


def names_of(scaling: type[RopeScaling]) -> Mapping[str, str]:
    """Maps the fields of a scaling to Hugging Face's names."""
    called = {name: LENGTH if name == "original_length" else name for name in names(scaling)}
    return {name: there for name, there in called.items() if name not in ("long", "length")}


def of_layers(settings: Settings, kind: str) -> Settings:
    """Returns the settings for one kind of layers.  Gemma 3 and OLMo 3 have two."""
    if LOCAL not in settings:
        return settings
    by_kind = settings["rope_parameters"]
    new = by_kind.get(kind) if isinstance(by_kind, dict) else by_kind
    local = {"rope_theta": settings[LOCAL] or settings["rope_theta"], "rope_scaling": None}
    return {**settings, **(local if kind == SLIDING else {}), "rope_parameters": new}


def parameters(settings: Settings) -> Settings:
    """Returns the settings of rotary positions, from where old and new files have them."""
    new, old = (settings[place] or {} for place in PLACES)
    of_all_kinds = {name: new[name] for name in OF_ALL_KINDS if new.get(name) is not None}
    given = {name: value for name, value in (old or new).items() if value is not None}
    # Phi's files have this one in addition to the others, and Hugging Face reads it first.
    of_phi = {LENGTH: settings[LENGTH]} if settings.get(LENGTH) else {}
    return {name: settings.get(name) for name in OF_ALL_KINDS} | of_all_kinds | given | of_phi


def kind_of(rope: Settings) -> Any:
    """Returns the name of the scaling; early files of Phi-3 use an older name."""
    kind = rope.get("rope_type", rope.get("type", PLAIN))
    return LONG if kind == "su" else kind


def problems(settings: Settings) -> Iterator[str]:
    """Yields what is wrong with the settings of rotary positions."""
    by_kind = settings["rope_parameters"]
    if LOCAL in settings and isinstance(by_kind, dict) and not by_kind.keys() <= {*KINDS}:
        yield f"rope_parameters = {by_kind!r}: legal: settings of {FULL!r} and of {SLIDING!r}."
    yield from dict.fromkeys(row for kind in KINDS for row in _problems(of_layers(settings, kind)))


def _problems(settings: Settings) -> Iterator[str]:
    for name in PLACES:
        if not isinstance(settings[name], dict | None):
            yield f"{name} = {settings[name]!r}: legal: an object or null."
            return
    new, old = (settings[place] or {} for place in PLACES)
    pairs = {name: (new[name], old[name]) for name in new if name in old and name not in KIND}
    if new and old and kind_of(new) != PLAIN:
        pairs["rope_type"] = kind_of(new), kind_of(old)
    for name, (here, there) in pairs.items():
        if None not in (here, there) and here != there:
            yield f"{name} = {here!r} in {PLACES[0]}, {there!r} in {PLACES[1]}: legal: one of them."

    rope = parameters(settings)
    kind, theta = kind_of(rope), rope["rope_theta"]
    if not isinstance(theta, int | float) or not 1 < theta < math.inf:
        yield f"rope_theta = {theta!r}: legal: a number above 1."
    if kind not in (PLAIN, *SCALINGS):
        yield f"rope_type = {kind!r}: legal: {', '.join(map(repr, (PLAIN, *SCALINGS)))}."
        return
    fraction = rope[FRACTION]
    if fraction not in (None, 1.0) and settings.get(FRACTION) in (None, 1.0):
        yield f"{FRACTION} = {fraction!r}: legal: 1.0 or null."
    elif fraction is not None and not (isinstance(fraction, int | float) and 0 < fraction <= 1):
        yield f"{FRACTION} = {fraction!r}: legal: a number above 0, and of at most 1."
    # Hugging Face keeps this length in files with a plain rotation.
    known = [*COMMON, LENGTH, *(names_of(SCALINGS[kind]).values() if kind in SCALINGS else ())]
    known += MSCALES * (kind == "yarn")
    known += ["factor"] * (kind == LONG)
    factor = rope.get("factor", 1 if kind in (PLAIN, LONG) else None)
    if not isinstance(factor, int | float) or not 0 < factor < math.inf:
        yield f"factor = {factor!r}: legal: a number above 0."
    if kind == LONG and not (isinstance(length := rope.get(LENGTH), int) and length > 1):
        yield f"{LENGTH} = {length!r}: legal: an integer from 2."
    for name in MSCALES:
        if not isinstance(value := rope.get(name, 0), int | float) or not 0 <= value < math.inf:
            yield f"{name} = {value!r}: legal: a number of at least 0."
    for name in rope:
        if name not in known:
            yield f"{name} of rope_type {kind!r}: Meshloom does not know it."


def rotary_of(settings: Settings) -> Rotary:
    """Makes the rotary positions."""
    rope = {LENGTH: settings["max_position_embeddings"], **parameters(settings)}
    theta, kind = float(rope["rope_theta"]), kind_of(rope)
    fraction = rope[FRACTION] or 1.0
    if kind == PLAIN:
        return Rotary(theta=theta, fraction=fraction)
    scaling = SCALINGS[kind]
    if kind == DYNAMIC:  # transformers ignores any other length
        rope[LENGTH] = settings["max_position_embeddings"]
    if rope.get(MSCALE) and rope.get(MSCALE_ALL):
        factor = magnitude(rope, MSCALE) / magnitude(rope, MSCALE_ALL)
        rope = {"attention_factor": factor, **rope}
    if kind == LONG and "attention_factor" not in rope:
        factor = rope.get("factor", settings["max_position_embeddings"] / rope[LENGTH])
        grown = 1 + math.log(max(factor, 1)) / math.log(rope[LENGTH])
        rope = {"attention_factor": math.sqrt(grown), **rope}
    values = {name: rope.get(there) for name, there in names_of(scaling).items()}
    given = {name: as_field(value) for name, value in values.items() if value is not None}
    return Rotary(theta=theta, scaling=scaling(**given), fraction=fraction)


def magnitude(rope: Settings, name: str) -> float:
    """Returns 0.1 m ln(factor) + 1, where m is one of MSCALES."""
    return 0.1 * rope[name] * math.log(rope["factor"]) + 1 if rope["factor"] > 1 else 1.0


def query_scale(rope: Settings) -> float:
    """Returns the factor of latent attention's queries in addition to the one for their width."""
    return magnitude(rope, MSCALE_ALL) ** 2 if rope.get(MSCALE_ALL) else 1.0


def of_query_scale(scale: float, rope: Settings) -> Settings:
    """Returns the settings that give this scale of queries."""
    if rope["rope_type"] != "yarn" or rope["factor"] <= 1:
        return {}
    return {MSCALE_ALL: round((math.sqrt(scale) - 1) / (0.1 * math.log(rope["factor"])), 6)}


def as_field(value: Any) -> Any:
    """Converts a value of a file for a field: a list to a tuple, an integral float to an int."""
    if isinstance(value, list):
        return tuple(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def settings_of(rotary: Rotary) -> Settings:
    """Returns the settings of rotary positions, in a form that old and new versions read."""
    theta, scaling = rotary.theta, rotary.scaling
    if scaling is None:
        return {"rope_theta": theta, "rope_scaling": None}
    kind = next(kind for kind, cls in SCALINGS.items() if isinstance(scaling, cls))
    values = {there: getattr(scaling, name) for name, there in names_of(type(scaling)).items()}
    given = {name: value for name, value in values.items() if value is not None}
    if kind == DYNAMIC:
        del given[LENGTH]
    of_phi = {LENGTH: given[LENGTH]} if LENGTH in given else {}
    return {"rope_theta": theta, "rope_scaling": {"rope_type": kind, **given}, **of_phi}
