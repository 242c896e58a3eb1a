"""Encodes no positions."""

from configs.spec import spec
from models.parts import Positions


@spec
class NoPositions(Positions):
    """Leaves a causal decoder to infer positions from its mask.  Kazemnejad et al. 2023 (NoPE)."""
