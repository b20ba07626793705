"""Problems as JSON, gzipped where large, never pickle: in plan files."""

from __future__ import annotations

import functools
import gzip
import io
import itertools
import json
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from memplan.errors import IllegalSchedule, InvalidPlanFile
from memplan.problem.data import Effect, Graph, Problem

_GZIP_OVER_BYTES = 4 << 20
_MOST_BYTES = 1 << 30  # a plan of a million steps is far smaller
_UNSOUND = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError, EOFError)
_NEWER = {"knows_optimizer", "tensor", "requests", "arena", "before"}  # not in older files
_T = TypeVar("_T")
_type_hints = functools.cache(get_type_hints)


def problem_from_json(content: dict[str, Any]) -> Problem:
    """The problem in what `asdict` gives of one. Raises InvalidPlanFile, or what `read_checked` turns into it."""
    for value in content["graph"]["values"]:  # in older files `updates` has the parameters, of what updates them
        value.setdefault("parameters", value["updates"] or [])
        value["updates"] = bool(value["updates"])
    problem: Problem = decoded(Problem, content, "problem")
    for wrong in itertools.chain(_wrong_in_graph(problem.graph), _wrong_in_costs(problem)):
        raise InvalidPlanFile(wrong)
    return problem


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


def decoded(kind: Any, content: Any, what: str, signed: bool = False) -> Any:
    """JSON as an annotated type: dataclasses, tuples, literals, texts, flags, and numbers of 0 or more.

    - what: a name for messages.
    - signed: integers may be negative.

    Raises InvalidPlanFile, or what `read_checked` turns into it.
    """
    if kind is float and type(content) is int:
        content = float(content)
    if type(content) is kind:
        if kind in (int, float) and not (-math.inf if signed else 0) <= content < math.inf:
            raise InvalidPlanFile(f"{what!r} is {content}, expected a number of 0 or more")
        return content
    origin, inner = get_origin(kind), get_args(kind)
    if type(None) in inner:
        return None if content is None else decoded(inner[0], content, what)
    if is_dataclass(kind):
        return read_fields(cast(Any, kind), content)
    if origin is Literal and type(content) is str and content in inner:
        return content
    if type(content) is list and (origin is tuple or kind is Effect):
        kinds = inner[:1] * len(content) if inner[-1:] == (...,) else inner or (int, int)
        pairs = zip(kinds, content, strict=True)
        parts = [decoded(k, c, what, signed=inner == (int, int)) for k, c in pairs]  # blocks have signed names
        return Effect(*parts) if kind is Effect else tuple(parts)
    raise InvalidPlanFile(f"{what!r} is {content!r:.99}, expected {kind.__name__ if type(kind) is type else kind}")


def read_fields(kind: Callable[..., _T], content: dict[str, Any], **given: Any) -> _T:
    """A dataclass. `given` has some of its fields, the content has the others. Raises as `decoded` does."""
    hints = {n: h for n, h in _type_hints(kind).items() if n not in given and (n in content or n not in _NEWER)}
    return kind(**given, **{name: decoded(hint, content[name], name) for name, hint in hints.items()})


def _wrong_in_graph(graph: Graph) -> Iterator[str]:
    """What is wrong with values and ops, of the right types each."""
    values, ops = graph.values, graph.ops
    for index, value in enumerate(values):
        if value.reuses is not None and value.reuses >= index:
            yield f"value {index} reuses the memory of value {value.reuses}, which comes later"
        elif value.reuses is not None and value.size_bytes != values[value.reuses].size_bytes:
            yield "a value takes over memory of another size than its own"
        if value.home != "device" and value.role not in ("parameter", "gradient"):
            yield f"value {index}, a {value.role}, has its home on {value.home!r}"
        if any(parameter >= index for parameter in value.parameters):
            yield f"the parameters of value {index} must be indices below {index}"
    for op in ops:
        if any(v >= len(values) for v in (*op.inputs, *op.outputs, *itertools.chain(*op.effects))):
            yield f"inputs, outputs and effects of {op.name} must be indices below {len(values)}"
    boundary, phases = graph.boundary, [op.phase for op in ops]
    if boundary > len(ops) or phases != ["forward"] * boundary + ["backward"] * (len(ops) - boundary):
        yield "the boundary does not stand between forward and backward ops"
    written = [v for op in ops for v in (*op.outputs, *(e.new for e in op.effects))]
    if len(set(written)) != len(written):
        yield "a value is written by two ops"
    taken = [v.reuses for v in values if v.reuses is not None]
    if len(set(taken)) != len(taken):
        yield "two values take over the memory of one"


def _wrong_in_costs(problem: Problem) -> Iterator[str]:
    """What is wrong with figures, of the right types each, of a sound graph."""
    graph, costs, link = problem.graph, problem.costs, problem.link
    if problem.in_flight < 1:
        yield f"'in_flight' is {problem.in_flight}, expected an integer of 1 or more"
    if link is not None and not (link.to_host_bytes_per_s and link.to_device_bytes_per_s):
        yield "a link of no bytes per second"
    if problem.gather is not None and not problem.gather.bytes_per_s:
        yield "gathers of no bytes per second"
    counts = len(costs.time_s), len(costs.scratch_bytes), len(costs.requests) or len(graph.ops)
    if set(counts) != {len(graph.ops)}:
        yield f"costs of {counts[0]}, {counts[1]} and {counts[2]} ops for {len(graph.ops)} ops"
    end = 0
    for segment in sorted(problem.requests.before if problem.requests else (), key=lambda segment: segment.address):
        if segment.address < end or not all(size_bytes for size_bytes, *_ in segment.blocks):
            yield "segments of memory overlap, or have blocks of no bytes"
        end = segment.address + sum(size_bytes for size_bytes, *_ in segment.blocks)
    for op, blocks in zip(graph.ops, costs.requests, strict=False):
        new = sum(graph.values[v].reuses is None for v in op.outputs)
        if any(name >= new or (name >= 0 and not size_bytes) for name, size_bytes in blocks):
            yield f"requests of {op.name} are for outputs that it does not have, or free some"
    for blocks in (*costs.requests, problem.requests.update if problem.requests else ()):
        live = set[int]()
        for name, size_bytes in blocks:
            if size_bytes < 0 or (name in live) == bool(size_bytes):
                yield f"request {name} is made twice, or freed and not made"
            live ^= {name}
