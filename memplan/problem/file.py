"""Problems as JSON, gzipped where large, never pickle: in plan files."""

from __future__ import annotations

import functools
import gzip
import io
import json
import math
import zlib
from collections.abc import Callable
from typing import Any, TypeVar, get_type_hints

from memplan.errors import IllegalSchedule, InvalidPlanFile
from memplan.problem.data import (
    RESIDENT_ROLES,
    Blocks,
    Costs,
    Effect,
    GatherSpeed,
    Graph,
    Link,
    Op,
    Problem,
    Requests,
    Value,
)

_GZIP_OVER_BYTES = 4 << 20
_MOST_BYTES = 1 << 30  # a plan of a million steps is far smaller
_UNSOUND = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError, EOFError)
_T = TypeVar("_T")
_type_hints = functools.cache(get_type_hints)


def problem_from_json(content: dict[str, Any]) -> Problem:
    """The problem in what `asdict` gives of one. Raises InvalidPlanFile, or what `read_checked` turns into it."""
    graph, in_flight = _read_graph(Reader.typed(content, "graph", dict)), content["in_flight"]
    if type(in_flight) is not int or in_flight < 1:
        raise InvalidPlanFile(f"'in_flight' is {in_flight!r}, expected an integer of 1 or more")
    link = None if content["link"] is None else Reader.filled(Link, content["link"])
    gather = None if content["gather"] is None else Reader.filled(GatherSpeed, content["gather"])
    if link is not None and not (link.to_host_bytes_per_s and link.to_device_bytes_per_s):
        raise InvalidPlanFile("a link of no bytes per second")
    if gather is not None and not gather.bytes_per_s:
        raise InvalidPlanFile("gathers of no bytes per second")
    return Reader.filled(
        Problem, {"knows_optimizer": False} | content,  # older files do not say
        graph=graph, costs=_read_costs(Reader.typed(content, "costs", dict), graph),
        budget_bytes=Reader.optional(content, "budget_bytes", int), link=link, in_flight=in_flight, gather=gather,
        requests=_read_requests(content.get("requests")),  # older files have none
    )  # fmt: skip


def pack(content: dict[str, Any], gzipped: bool = False) -> bytes:
    """JSON as bytes, gzipped where asked for or large."""
    data = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
    return gzip.compress(data, mtime=0) if gzipped or len(data) > _GZIP_OVER_BYTES else data


def unpack(data: bytes) -> Any:
    """What `pack` packed. Raises InvalidPlanFile, or what `read_checked` turns into it."""
    if data[:2] == b"\x1f\x8b":
        try:
            with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
                data = file.read(_MOST_BYTES + 1)
        except zlib.error as error:
            raise InvalidPlanFile(f"the file is damaged: {error}") from error
        if len(data) > _MOST_BYTES:
            raise InvalidPlanFile("the file unpacks to more than 1 GiB")
    return json.loads(data)


def read_checked(what: str, read: Callable[[], _T]) -> _T | InvalidPlanFile:
    """What `read` gives, or what is wrong with the content. An unreadable file stays an OSError."""
    try:
        return read()
    except (InvalidPlanFile, IllegalSchedule) as error:
        unsound = InvalidPlanFile(f"the {what} file's schedule is not legal: {error}")
        return error if isinstance(error, InvalidPlanFile) else unsound
    except (*_UNSOUND, gzip.BadGzipFile) as error:
        return InvalidPlanFile(f"not a sound {what} file: {type(error).__name__}: {error}. Make it again")


class Reader:
    """Reads JSON of exactly the expected types."""

    @staticmethod
    def typed(content: dict[str, Any], key: str, kind: type[_T]) -> _T:
        value = content[key]
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise InvalidPlanFile(f"{key!r} is {type(value).__name__}, expected {kind.__name__}")
        if isinstance(value, float) and not (math.isfinite(value) and value >= 0):
            raise InvalidPlanFile(f"{key!r} is {value}, expected a number of 0 or more")
        if isinstance(value, int) and value < 0:
            raise InvalidPlanFile(f"{key!r} is {value}, expected 0 or more")
        return value

    @classmethod
    def optional(cls, content: dict[str, Any], key: str, kind: type[_T]) -> _T | None:
        return None if content[key] is None else cls.typed(content, key, kind)

    @staticmethod
    def indices(values: Any, limit: int, what: str) -> tuple[int, ...]:
        if not isinstance(values, list) or any(type(v) is not int or not 0 <= v < limit for v in values):
            raise InvalidPlanFile(f"{what} must be a list of indices below {limit}")
        return tuple(values)

    @classmethod
    def filled(cls, kind: Callable[..., _T], content: dict[str, Any], **read: Any) -> _T:
        """A dataclass. `read` has some of its fields, the content has the others."""
        others = {name: hint for name, hint in _type_hints(kind).items() if name not in read}
        return kind(**read, **{name: cls.typed(content, name, hint) for name, hint in others.items()})


def _read_costs(content: dict[str, Any], graph: Graph) -> Costs:
    times, scratch = Reader.typed(content, "time_s", list), Reader.typed(content, "scratch_bytes", list)
    requests = [_read_blocks(blocks) for blocks in Reader.typed({"requests": []} | content, "requests", list)]
    op_count = len(graph.ops)
    if len(times) != op_count or len(scratch) != op_count or len(requests) not in (0, op_count):
        raise InvalidPlanFile(f"costs of {len(times)}, {len(scratch)} and {len(requests)} ops for {op_count} ops")
    for op, blocks in zip(graph.ops, requests, strict=False):
        new = sum(graph.values[v].reuses is None for v in op.outputs)
        if any(name >= new or (name >= 0 and not size_bytes) for name, size_bytes in blocks):
            raise InvalidPlanFile(f"requests of {op.name} are for outputs that it does not have, or free some")
    return Reader.filled(
        Costs, content,
        time_s=tuple(Reader.typed({"time_s": t}, "time_s", float) for t in times),
        scratch_bytes=tuple(Reader.typed({"scratch_bytes": s}, "scratch_bytes", int) for s in scratch),
        requests=tuple(requests),
    )  # fmt: skip


def _read_blocks(content: Any) -> Blocks:
    blocks = [tuple(pair) for pair in Reader.typed({"blocks": content}, "blocks", list)]
    if any(len(pair) != 2 or any(type(n) is not int for n in pair) or pair[1] < 0 for pair in blocks):
        raise InvalidPlanFile("a request is a name and a number of bytes")
    live = set[int]()
    for name, size_bytes in blocks:
        if (name in live) == bool(size_bytes):
            raise InvalidPlanFile(f"request {name} is made twice, or freed and not made")
        live ^= {name}
    return tuple(blocks)


def _read_graph(content: dict[str, Any]) -> Graph:
    values, ops = Reader.typed(content, "values", list), Reader.typed(content, "ops", list)
    boundary = Reader.typed(content, "boundary", int)
    graph = Graph(
        tuple(_read_value(v, i) for i, v in enumerate(values)), tuple(_read_op(op, len(values)) for op in ops),
        boundary, Reader.typed(content, "rng_state_bytes", int),
    )  # fmt: skip
    phases = [op.phase for op in graph.ops]
    if boundary > len(ops) or phases != ["forward"] * boundary + ["backward"] * (len(ops) - boundary):
        raise InvalidPlanFile("the boundary does not stand between forward and backward ops")
    written = [v for op in graph.ops for v in (*op.outputs, *(e.new for e in op.effects))]
    if len(set(written)) != len(written):
        raise InvalidPlanFile("a value is written by two ops")
    taken = [v.reuses for v in graph.values if v.reuses is not None]
    if len(set(taken)) != len(taken):
        raise InvalidPlanFile("two values take over the memory of one")
    if any(v.reuses is not None and v.size_bytes != graph.values[v.reuses].size_bytes for v in graph.values):
        raise InvalidPlanFile("a value takes over memory of another size than its own")
    return graph


def _read_requests(content: Any) -> Requests | None:
    if content is None:
        return None
    workspaces = Reader.typed(content, "workspaces", list)
    return Reader.filled(
        Requests, {"arena": True} | content,  # older files do not say
        workspaces=tuple(Reader.typed({"workspaces": n}, "workspaces", int) for n in workspaces),
        update=_read_blocks(Reader.typed(content, "update", list)),
    )  # fmt: skip


def _read_value(content: Any, index: int) -> Value:
    role = Reader.typed(content, "role", str)
    if role not in RESIDENT_ROLES | {"tangent", "activation", "gradient"}:
        raise InvalidPlanFile(f"value {index} has role {role!r}")
    reuses = Reader.optional(content, "reuses", int)
    if reuses is not None and reuses >= index:
        raise InvalidPlanFile(f"value {index} reuses the memory of value {reuses}, which comes later")
    home = Reader.typed(content, "home", str)
    if home not in ("device", "host", "sharded") or (home != "device" and role not in ("parameter", "gradient")):
        raise InvalidPlanFile(f"value {index}, a {role}, has its home on {home!r}")
    updates = content["updates"] or []  # older files have the parameters here, and only of what updates them
    return Reader.filled(
        Value, {"tensor": ""} | content,  # older files do not say
        role=role, reuses=reuses, home=home, updates=bool(updates),
        parameters=Reader.indices(content.get("parameters", updates), index, "parameters"),
    )  # fmt: skip


def _read_op(content: Any, value_count: int) -> Op:
    phase = Reader.typed(content, "phase", str)
    if phase not in ("forward", "backward"):
        raise InvalidPlanFile(f"an op has phase {phase!r}")
    effects = [Reader.indices(e, value_count, "an effect") for e in Reader.typed(content, "effects", list)]
    if any(len(e) != 2 for e in effects):
        raise InvalidPlanFile("an effect has two values")
    return Reader.filled(
        Op, content, phase=phase, effects=tuple(Effect(old, new) for old, new in effects),
        inputs=Reader.indices(content["inputs"], value_count, "inputs"),
        outputs=Reader.indices(content["outputs"], value_count, "outputs"),
    )  # fmt: skip
