"""FLOPs, traffic and memory of a traced step on one device, from the placements in its types.

Under explicit axes every tensor of a trace says how it is split.  What must be exchanged follows
from that alone, so nothing needs to be compiled: the costs of Table 1 of Shazeer et al. 2018
(Mesh-TensorFlow), for any layout and model.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxprs_in_params

from layouts.layout import Entry, mesh_axes
from layouts.traffic import Collective, model_file

REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "argmax")
VIEWS = ("reshape", "transpose", "convert_element_type", "squeeze", "broadcast_in_dim")
KEY_BYTES = 8  # of a random key, whose type has no size
MANUAL = {"psum": "all-reduce", "psum_invariant": "all-reduce", "pmax": "all-reduce",
          "all_gather": "all-gather", "all_to_all": "all-to-all"}  # fmt: skip


@dataclasses.dataclass
class Cost:
    """What one device does in a step."""

    flops: int = 0
    """Of matrix products."""
    collectives: list[Collective] = dataclasses.field(default_factory=list)
    peak_bytes: int = 0
    """The most that is held at once beside the arguments, if nothing is fused."""


def cost_of(jaxpr: ClosedJaxpr, mesh: Mapping[str, int]) -> Cost:
    """The cost of a traced function on a mesh."""
    counter = Counter(mesh)
    counter.walk(jaxpr.jaxpr, 1)
    counter.cost.peak_bytes = counter.peak(jaxpr.jaxpr)
    return counter.cost


class Part(NamedTuple):
    """An operand or a result of an operation, on one device."""

    bytes: int
    places: tuple[Entry, ...]
    value: Any = None

    def splits(self, mesh_axis: str) -> int | None:
        """Which axis of the tensor a mesh axis splits."""
        for i, entry in enumerate(self.places):
            if mesh_axis in mesh_axes(entry):
                return i
        return None


class Sent(NamedTuple):
    """What one mesh axis carries for one operand or result."""

    kind: str
    mesh_axis: str
    bytes: int
    """On one device: before it is gathered, after it is scattered."""
    value: Any = None
    """What is gathered, where it has a name."""


@dataclasses.dataclass(frozen=True)
class Letters:
    """The axes of the operands and the result of a product, each by a number."""

    left: tuple[int, ...]
    right: tuple[int, ...]
    out: tuple[int, ...]

    @classmethod
    def of(cls, numbers: Any, left_rank: int, right_rank: int) -> "Letters":
        """From dot_general's: pairs of summed axes, then pairs of batch axes."""
        (left_sum, right_sum), (left_batch, right_batch) = numbers
        left, right = dict[int, int](), dict[int, int]()
        pairs = zip((*left_batch, *left_sum), (*right_batch, *right_sum), strict=True)
        for letter, (a, b) in enumerate(pairs):
            left[a] = right[b] = letter
        used = len(left)
        for axis in range(left_rank):
            left.setdefault(axis, used + axis)
        for axis in range(right_rank):
            right.setdefault(axis, used + left_rank + axis)
        batch = tuple(range(len(left_batch)))
        kept = sorted(letter for letter in (*left.values(), *right.values()) if letter >= used)
        ordered = (tuple(own[i] for i in sorted(own)) for own in (left, right))
        return cls(*ordered, out=(*batch, *kept))


class Body:
    """Where the values of a jaxpr come from, so that nothing is sent twice."""

    def __init__(self, jaxpr: Jaxpr) -> None:
        self.makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        self.users: dict[Any, list[Any]] = {}
        for eqn in jaxpr.eqns:
            for v in eqn.invars:
                if not isinstance(v, Literal):
                    self.users.setdefault(v, []).append(eqn)
        self.gathered: set[tuple[Any, str]] = set()
        self.added: set[Any] = set()

    def root(self, v: Any) -> Any:
        """The value that this one only looks at another way."""
        while (eqn := self.makers.get(v)) is not None and eqn.primitive.name in VIEWS:
            v = eqn.invars[0]
        return v

    def user(self, v: Any) -> Any | None:
        """The one equation that uses a value, views of it apart."""
        while len(users := self.users.get(v, [])) == 1 and users[0].primitive.name in VIEWS:
            v = users[0].outvars[0]
        return users[0] if len(users) == 1 else None

    def sends(self, sent: Sent, eqn: Any) -> bool:
        """Whether it is sent here, and not before or after.

        What several products gather is gathered once, and sums that are added go round as one.
        """
        if sent.kind == "all-gather" and sent.value is not None:
            key = (self.root(sent.value), sent.mesh_axis)
            is_first = key not in self.gathered
            self.gathered.add(key)
            return is_first
        if sent.kind in ("all-reduce", "reduce-scatter"):
            user = self.user(eqn.outvars[0])
            if user is not None and user.primitive.name == "add_any":
                return self.last_of(user) is eqn
        return True

    def feeds_table(self, eqn: Any) -> bool:
        """Whether this only gathers, for the gradient of a table, what nobody needs to gather."""
        makes, user = eqn.primitive.name == "reshard", self.user(eqn.outvars[0])
        return makes and user is not None and user.primitive.name == "scatter-add"

    def last_of(self, addition: Any) -> Any:
        """The latest sum that goes into a chain of additions."""
        while (user := self.user(addition.outvars[0])) is not None:
            if user.primitive.name != "add_any":
                break
            addition = user
        return self.makers.get(self.root(addition.invars[1]))


class Counter:
    """Adds up the cost of equations."""

    def __init__(self, mesh: Mapping[str, int]) -> None:
        self.mesh = mesh
        self.cost = Cost()

    def walk(self, jaxpr: Jaxpr, times: int, backward: bool = False) -> None:
        rules = {
            "dot_general": self.product, "reshard": self.move, "gather": self.lookup,
            "scatter-add": self.lookup_backward, **dict.fromkeys(REDUCTIONS, self.reduction),
            **dict.fromkeys(MANUAL, self.manual),
        }  # fmt: skip
        body = Body(jaxpr)
        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            behind = backward or "transpose(" in str(eqn.source_info.name_stack)
            if name in rules:
                sent = [own for own in rules[name](eqn, times, body) if body.sends(own, eqn)]
                self.emit(sent, eqn, times, behind)
                continue
            turns = eqn.params["length"] if name == "scan" else 1
            for own in list(jaxprs_in_params(eqn.params))[: 1 if name == "cond" else None]:
                self.walk(own, times * turns, behind)

    def emit(self, sent: Iterable[Sent], eqn: Any, times: int, backward: bool) -> None:
        """Joins what goes over several mesh axes at once."""
        by_kind: dict[tuple[str, int], list[str]] = {}
        for own in sent:
            if own.bytes and self.mesh[own.mesh_axis] > 1:
                by_kind.setdefault((own.kind, own.bytes), []).append(own.mesh_axis)
        for (kind, own_bytes), names in by_kind.items():
            group = math.prod(self.mesh[name] for name in names)
            whole = own_bytes * (group if kind in ("all-gather", "reduce-scatter") else 1)
            source = origin(eqn) + " (backward)" * backward
            found = Collective(kind, tuple(names), group, whole, times, source)
            self.cost.collectives.append(found)

    def received(self, sent: Sent) -> float:
        group = self.mesh[sent.mesh_axis]
        whole = sent.bytes * (group if sent.kind in ("all-gather", "reduce-scatter") else 1)
        return Collective(sent.kind, (sent.mesh_axis,), group, whole, 1, "").received_bytes

    def part(self, atom: Any) -> Part:
        return Part(self.local_bytes(atom.aval), spec_of(atom.aval), atom)

    def local_bytes(self, aval: Any) -> int:
        """Bytes of a tensor on one device."""
        places = spec_of(aval)
        sizes = (-(-n // self.ways(e)) for n, e in zip(aval.shape, places, strict=True))
        return math.prod(sizes) * getattr(aval.dtype, "itemsize", KEY_BYTES)

    def ways(self, entry: Entry) -> int:
        return math.prod(self.mesh[name] for name in mesh_axes(entry))

    def product(self, eqn: Any, times: int, body: Body) -> list[Sent]:
        """A product is split along one letter per mesh axis: the one that sends the least."""
        left, right, out = (self.part(v) for v in (*eqn.invars, *eqn.outvars))
        numbers = eqn.params["dimension_numbers"]
        letters = Letters.of(numbers, len(left.places), len(right.places))
        sent, split = [], 1
        for mesh_axis, size in self.mesh.items():
            sides = ((left, letters.left), (right, letters.right), (out, letters.out))
            held = [self.letter(mesh_axis, part, own) for part, own in sides]
            choices = [
                self.exchange(letter, mesh_axis, sides, held)
                for letter in dict.fromkeys(held)
                if letter is not None
            ]
            if choices:
                sent += min(choices, key=lambda found: sum(map(self.received, found)))
                split *= size
        (summed, _), _ = numbers
        inner = math.prod(eqn.invars[0].aval.shape[axis] for axis in summed)
        self.cost.flops += times * (2 * inner * math.prod(eqn.outvars[0].aval.shape) // split)
        return sent

    def letter(self, mesh_axis: str, part: Part, letters: tuple[int, ...]) -> int | None:
        axis = part.splits(mesh_axis)
        return None if axis is None else letters[axis]

    def exchange(
        self,
        letter: int,
        mesh_axis: str,
        sides: tuple[tuple[Part, tuple[int, ...]], ...],
        held: list[int | None],
    ) -> list[Sent]:
        """What must be sent for a mesh axis to split a product along one letter."""
        sent = []
        for (part, letters), own in zip(sides[:2], held[:2], strict=True):
            if own is not None and own != letter:
                kind = "all-to-all" if letter in letters else "all-gather"
                sent.append(Sent(kind, mesh_axis, part.bytes, part.value))
        (out, letters), own = sides[2], held[2]
        if letter not in letters:  # each device has a part of the sum
            sent.append(Sent("all-reduce" if own is None else "reduce-scatter", mesh_axis, out.bytes))
        elif own is None:
            sent.append(Sent("all-gather", mesh_axis, out.bytes // self.mesh[mesh_axis]))
        elif own != letter:
            sent.append(Sent("all-to-all", mesh_axis, out.bytes))
        return sent

    def reduction(self, eqn: Any, times: int, body: Body) -> list[Sent]:
        """Sums over a split axis are added up between devices."""
        places, out = spec_of(eqn.invars[0].aval), self.part(eqn.outvars[0])
        summed = [name for axis in eqn.params["axes"] for name in mesh_axes(places[axis])]
        return [self.sum_over(name, out) for name in summed]

    def sum_over(self, mesh_axis: str, out: Part) -> Sent:
        whole = out.splits(mesh_axis) is None
        return Sent("all-reduce" if whole else "reduce-scatter", mesh_axis, out.bytes)

    def move(self, eqn: Any, times: int, body: Body) -> list[Sent]:
        """A tensor that is placed anew; cutting what is whole sends nothing."""
        if body.feeds_table(eqn):
            return []  # each device adds up its own
        old, new = self.part(eqn.invars[0]), self.part(eqn.outvars[0])
        sent = []
        for name in self.mesh:
            before, after = old.splits(name), new.splits(name)
            if before is not None and before != after:
                kind = "all-gather" if after is None else "all-to-all"
                sent.append(Sent(kind, name, old.bytes, old.value))
        return sent

    def lookup(self, eqn: Any, times: int, body: Body) -> list[Sent]:
        """Rows of a table: of a split table each device finds its own, and they are added up."""
        table, out = self.part(eqn.invars[0]), self.part(eqn.outvars[0])
        numbers = eqn.params["dimension_numbers"]
        sent = []
        for name in self.mesh:
            axis, placed = table.splits(name), out.splits(name)
            if axis is None:
                continue
            if axis in numbers.start_index_map:
                sent.append(self.sum_over(name, out))
            elif placed is None or placed not in numbers.offset_dims:
                sent.append(Sent("all-gather", name, table.bytes))
        return sent

    def lookup_backward(self, eqn: Any, times: int, body: Body) -> list[Sent]:
        """Gradients of a table: sums over the tokens of all devices."""
        user = body.user(eqn.outvars[0])
        moves_on = user is not None and user.primitive.name == "reshard"
        table = self.part(user.outvars[0] if moves_on else eqn.outvars[0])
        maker = body.makers.get(body.root(eqn.invars[2]))
        moved = maker is not None and maker.primitive.name == "reshard"
        updates = self.part(maker.invars[0] if moved else eqn.invars[2])
        rows = eqn.params["dimension_numbers"].update_window_dims
        split = [name for name in self.mesh if updates.splits(name) not in (None, *rows)]
        return [self.sum_over(name, table) for name in split]

    def manual(self, eqn: Any, times: int, body: Body) -> list[Sent]:
        """What code inside a shard_map sends itself."""
        names = eqn.params.get("axes") or eqn.params["axis_name"]
        sent_bytes = sum(self.local_bytes(v.aval) for v in eqn.invars)
        return [
            Sent(MANUAL[eqn.primitive.name], name, sent_bytes)
            for name in ((names,) if isinstance(names, str) else names)
        ]

    def peak(self, jaxpr: Jaxpr) -> int:
        """The most bytes that live at once beside the arguments, equation by equation."""
        body, live, most = Body(jaxpr), 0, 0
        used = [*((i, v) for i, eqn in enumerate(jaxpr.eqns) for v in eqn.invars),
                *((len(jaxpr.eqns), v) for v in jaxpr.outvars)]  # fmt: skip
        last = {v: i for i, v in used if not isinstance(v, Literal) and v in body.makers}
        ends: dict[int, list[Any]] = {}
        for v, i in last.items():
            ends.setdefault(i, []).append(v)
        held = {}
        for v in last:
            maker = body.makers[v]
            kept = maker.invars[0] if body.feeds_table(maker) else v
            held[v] = self.local_bytes(kept.aval)
        for i, eqn in enumerate(jaxpr.eqns):
            inner = max((self.peak(own) for own in jaxprs_in_params(eqn.params)), default=0)
            live += sum(held[v] for v in eqn.outvars if v in last)
            most = max(most, live + inner)
            live -= sum(held[v] for v in ends.get(i, ()))
        return most


def spec_of(aval: Any) -> tuple[Entry, ...]:
    """The placement in a type, an entry for each axis; whole where there is none."""
    sharding = getattr(aval, "sharding", None)
    places = tuple(sharding.spec) if sharding is not None else ()
    return places + (None,) * (len(getattr(aval, "shape", ())) - len(places))


def origin(eqn: Any) -> str:
    """The line of the model that an equation stands for, and what it does."""
    frames = eqn.source_info.traceback.frames if eqn.source_info.traceback else ()
    lines = (f"{model_file(frame.file_name)}:{frame.line_num}" for frame in frames)
    line = next((line for line in lines if not line.startswith(":")), "")
    return f"{line} {eqn.primitive.name}".strip()


def heaviest(collectives: Iterable[Collective]) -> list[Collective]:
    """The collectives that send the most, those of one kind, place and size taken together."""
    key = lambda c: (c.kind, c.mesh_axes, c.group, c.bytes, c.source, c.overlaps)  # noqa: E731
    joined = []
    for _, same in itertools.groupby(sorted(collectives, key=key), key=key):
        own = list(same)
        joined.append(own[0]._replace(times=sum(c.times for c in own)))
    return sorted(joined, key=lambda c: -c.received_bytes)


