"""Specs that the tests of gin files bind, and the message of a failure."""

from typing import Any

import pytest

from configs.errors import UserError
from configs.load import load
from configs.spec import Count, Fraction, spec


@spec
class GinNorm:
    epsilon: float = 1e-6


@spec
class GinModel:
    layers: Count
    width: Count = 8
    norm: GinNorm = GinNorm()


@spec
class GinAdam:
    decay: Fraction = 0.25


@spec
class GinSgd:
    decay: Fraction = 0.5


@spec
class GinRun:
    steps: Count
    model: GinModel
    name: str = "toy"
    seed: int | None = None
    sizes: tuple[int, ...] = ()
    optimizer: GinAdam | GinSgd = GinAdam(decay=0.125)
    others: tuple[GinModel, ...] = ()

    def __post_init__(self) -> None:
        if self.name == "bad":
            raise UserError("GinRun.name = 'bad': legal: a good name.")


@spec
class GinStack:
    models: tuple[GinModel, ...] = ()
    norms: tuple[GinNorm, ...] = ()


MODEL = "GinModel.layers = 2\n"


RUN = MODEL + "GinRun.steps = 10\nGinRun.model = @GinModel()\n"


def message(*files: str, params: tuple[str, ...] = (), make: Any = None) -> str:
    with pytest.raises(UserError) as caught:
        config = load(files, params)
        config.make(make)
    return str(caught.value)
