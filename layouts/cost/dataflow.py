"""Where the values of a trace come from and go to, on one device of a mesh."""

import math
from collections.abc import Mapping
from typing import Any

from jax.extend.core import Jaxpr, Literal

from layouts.layout import Entry, mesh_axes

# The same numbers, looked at another way.
VIEWS = ("reshape", "transpose", "convert_element_type", "squeeze", "broadcast_in_dim")
# JAX makes operands of these whole before and places the result after, and every compiler sees
# through that.
FRAMED = ("gather", "scatter-add", "random_bits")
KEY_BYTES = 8  # of a random key, whose type has no size


class Flow:
    """The makers and users of the values of one jaxpr."""

    def __init__(self, jaxpr: Jaxpr) -> None:
        self.makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        self.users: dict[Any, list[Any]] = {}
        for eqn in jaxpr.eqns:
            for v in eqn.invars:
                if not isinstance(v, Literal):
                    self.users.setdefault(v, []).append(eqn)

    def maker(self, v: Any) -> Any | None:
        """The equation that makes a value; none makes arguments and constants."""
        return None if isinstance(v, Literal) else self.makers.get(v)

    def root(self, v: Any) -> Any:
        """The value that this one only looks at another way."""
        while (eqn := self.maker(v)) is not None and eqn.primitive.name in VIEWS:
            v = eqn.invars[0]
        return v

    def user(self, v: Any) -> Any | None:
        """The one equation that uses a value, views of it apart."""
        while len(users := self.users.get(v, [])) == 1 and users[0].primitive.name in VIEWS:
            v = users[0].outvars[0]
        return users[0] if len(users) == 1 else None

    def frames(self, eqn: Any) -> bool:
        """Whether a placement only surrounds a look-up or a draw."""
        if eqn is None or eqn.primitive.name != "reshard":
            return False
        around = (self.maker(self.root(eqn.invars[0])), self.user(eqn.outvars[0]))
        return any(own is not None and own.primitive.name in FRAMED for own in around)

    def before(self, v: Any) -> Any:
        """An operand of a look-up as it was placed before."""
        maker: Any = self.maker(self.root(v))
        return maker.invars[0] if self.frames(maker) else v

    def after(self, v: Any) -> Any:
        """The result of a look-up as it is placed after."""
        user: Any = self.user(v)
        return user.outvars[0] if self.frames(user) else v

    def last_summand(self, eqn: Any) -> Any | None:
        """Of the sums that are added to this one, the latest; None where nothing is added."""
        last = None
        while (user := self.user(eqn.outvars[0])) is not None:
            if user.primitive.name != "add_any":
                break
            eqn, last = user, self.maker(self.root(user.invars[1]))
        return last


def places(aval: Any) -> tuple[Entry, ...]:
    """The placement in a type, an entry for each axis; whole where there is none."""
    sharding = getattr(aval, "sharding", None)
    found = tuple(sharding.spec) if sharding is not None else ()
    return found + (None,) * (len(getattr(aval, "shape", ())) - len(found))


def local_bytes(aval: Any, mesh: Mapping[str, int]) -> int:
    """Bytes of a tensor on one device."""
    if not hasattr(aval, "shape"):
        return 0
    return local_size(aval, mesh) * getattr(aval.dtype, "itemsize", KEY_BYTES)


def local_size(aval: Any, mesh: Mapping[str, int]) -> int:
    """Elements of a tensor on one device."""
    shape = getattr(aval, "shape", ())
    ways = (math.prod(mesh[name] for name in mesh_axes(entry)) for entry in places(aval))
    return math.prod(-(-n // k) for n, k in zip(shape, ways, strict=True))
