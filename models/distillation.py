"""Trains a model to match the predictions of another one (word-level distillation).

Hinton et al. 2015; Kim and Rush 2016 for translation.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Any

import jax
from pydantic import Field

from configs.spec import spec
from models.api import Batch, Frozen, Params, WeightInfo
from models.dropout import Key
from models.loss import Criterion, LogitOperands, LossSums
from models.spec import TransformerSpec
from models.transformer import TransformerModel, join_microbatches

TEACHER = "teacher"
"""The path of a teacher's weights among those of the model that it teaches."""


@spec
class Teacher(Frozen):
    """Adds the divergence from another model's predictions to the objective (distillation)."""

    weight: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Weight of the divergence in the objective; the rest is the weight of cross entropy."""
    temperature: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    """Divides the logits of both models; above 1, unlikely tokens count for more."""

    def criterion_fields(self) -> dict[str, Any]:
        return {"teacher_weight": self.weight, "temperature": self.temperature}


def without_teacher(params: Params) -> Params:
    return {name: tree for name, tree in params.items() if name != TEACHER}


@dataclasses.dataclass(frozen=True)
class DistilledModel(TransformerModel):
    """Extends a Transformer with its teacher, whose weights training does not change.

    The teacher runs under the same layout, without stages.
    """

    teacher_spec: TransformerSpec

    @property
    def teacher(self) -> TransformerModel:
        return TransformerModel(self.teacher_spec, self.layout.without("layers"))

    @property
    def groups(self) -> dict[str, int]:
        of_both = self.spec.groups, self.teacher_spec.groups
        names = {name for of in of_both for name in of}
        return {name: math.lcm(*(of.get(name, 1) for of in of_both)) for name in names}

    def init(self, key: jax.Array) -> Params:
        return {**super().init(key), TEACHER: self.teacher.init(key)}

    def weights(self) -> Mapping[str, WeightInfo]:
        of_teacher = self.teacher.weights().items()
        return {**super().weights(), **{f"{TEACHER}/{path}": info for path, info in of_teacher}}

    def trains(self, path: str) -> bool:
        return path.split("/")[0] != TEACHER and super().trains(path)

    def adapted(self, params: Params) -> Params:
        return super().adapted(without_teacher(params))

    def teacher_output(self, params: Params, batch: Batch) -> LogitOperands:
        teacher, weights = self.teacher, params[TEACHER]
        bias_V = teacher.logit_bias(weights)
        if not self.runs_stages:
            return LogitOperands(*teacher.hidden(weights, batch)[2:], bias_V)
        x_ABLD = jax.lax.map(lambda batch: teacher.hidden(weights, batch)[2], batch)
        x_BLD = join_microbatches(teacher.layout, x_ABLD, "BLD")
        return LogitOperands(x_BLD, teacher.network(weights).output_weights(), bias_V)

    def loss(self, params: Params, batch: Batch, criterion: Criterion, key: Key = None) -> LossSums:
        criterion = dataclasses.replace(criterion, teacher_cap=self.teacher_spec.logit_cap)
        return super().loss(params, batch, criterion, key)
