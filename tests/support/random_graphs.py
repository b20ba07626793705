"""Training steps made up: random ones through hypothesis, and one that looks like a Llama.

`StepBuilder` takes forward ops and writes the backward pass as autograd would: in reverse order, one op a gradient,
an addition where a value has several readers.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import strategies as st

from memplan.problem.data import Costs, Effect, Graph, Op, Problem, Value


@dataclass
class _Forward:
    op: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    saved: tuple[int, ...]
    parameter: int | None
    differentiable: bool


@dataclass
class StepBuilder:
    """Collects ops; `finish` adds the backward pass."""

    values: list[Value] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    time_s: list[float] = field(default_factory=list)
    scratch_bytes: list[int] = field(default_factory=list)
    forwards: list[_Forward] = field(default_factory=list)

    def value(self, size_bytes: int, role: str = "activation", **rest: object) -> int:
        self.values.append(Value(f"v{len(self.values)}", size_bytes, role, **rest))  # type: ignore[arg-type]
        return len(self.values) - 1

    def op(self, kind: str, inputs: tuple[int, ...], outputs: tuple[int, ...], *, phase: str = "forward",
           time_s: float = 1.0, scratch_bytes: int = 0, **rest: object) -> int:  # fmt: skip
        key = f"{kind} {[self.values[v].size_bytes for v in (*inputs, *outputs)]}"
        name = f"{kind}{len(self.ops)}"
        self.ops.append(Op(name, kind, phase, inputs, outputs, key=key, **rest))  # type: ignore[arg-type]
        self.time_s.append(time_s)
        self.scratch_bytes.append(scratch_bytes)
        return len(self.ops) - 1

    def forward(self, kind: str, inputs: tuple[int, ...], sizes: tuple[int, ...], *, saved: tuple[int, ...] = (),
                save_outputs: bool = False, parameter: int | None = None, in_place: int | None = None,
                differentiable: bool = True, **rest: object) -> tuple[int, ...]:  # fmt: skip
        """An op. saved: inputs that its backward reads; in_place: the input that the first output takes over."""
        outputs = tuple(
            self.value(self.values[in_place].size_bytes if k == 0 and in_place is not None else size,
                       reuses=in_place if k == 0 else None)
            for k, size in enumerate(sizes)
        )  # fmt: skip
        read = inputs if parameter is None else (*inputs, parameter)
        index = self.op(kind, read, outputs, **rest)  # type: ignore[arg-type]
        kept = (*saved, *outputs) if save_outputs else saved
        self.forwards.append(_Forward(index, inputs, outputs, kept, parameter, differentiable))
        return outputs

    def finish(
        self, output: int, *, tangent: bool = False, rng_state_bytes: int = 0, time_factor: float = 1.0
    ) -> Problem:
        """The step whose model output is `output`."""
        self.values[output] = replace(self.values[output], held=True)
        boundary = len(self.ops)
        gradient = {output: self.value(self.values[output].size_bytes, "tangent" if tangent else "activation")}
        if not tangent:
            self.op("ones", (), (gradient[output],), phase="backward", time_s=0.1)
        for forward in reversed(self.forwards):
            grads = [gradient.pop(v) for v in forward.outputs if v in gradient]
            if not grads or not forward.differentiable:
                continue
            self._backward(forward, tuple(grads), gradient, time_factor)
        graph = Graph(tuple(self.values), tuple(self.ops), boundary, rng_state_bytes)
        return Problem(graph, Costs(tuple(self.time_s), tuple(self.scratch_bytes)))

    def _backward(self, forward: _Forward, grads: tuple[int, ...], gradient: dict[int, int], factor: float) -> None:
        source = self.ops[forward.op]
        time_s = self.time_s[forward.op] * factor
        read = tuple(dict.fromkeys((*grads, *forward.saved)))
        if forward.parameter is not None:
            parameter = self.values[forward.parameter]
            made = self.value(parameter.size_bytes, "gradient", held=True)
            name = f"gradient of parameter {parameter.name}"
            self.values[made] = replace(self.values[made], name=name, parameters=(forward.parameter,))
            self.op(source.kind + " weight", read, (made,), phase="backward", time_s=time_s)
        for v in dict.fromkeys(forward.inputs):
            if self.values[v].role != "activation":
                continue
            made = self.value(self.values[v].size_bytes)
            reads = read if forward.parameter is None else (*grads, forward.parameter)
            scratch = self.scratch_bytes[forward.op]
            self.op(source.kind + " backward", reads, (made,), phase="backward", time_s=time_s, scratch_bytes=scratch)
            if v in gradient:
                total = self.value(self.values[v].size_bytes, reuses=gradient[v])
                self.op("add_", (gradient[v], made), (total,), phase="backward", time_s=0.1 * time_s)
                made = total
            gradient[v] = made


def llama_like(layers: int, *, tokens: int = 4096, width: int = 2048, dropout: bool = False) -> Problem:
    """About 25 forward ops a layer; sizes in bytes of 16-bit floats, times from a roofline."""
    b = StepBuilder()
    row = 2 * tokens * width
    matmul_s = 2 * tokens * width * width / 2e14
    move_s = row / 1e12

    def linear(x: int, wide: int = 1) -> int:
        weight = b.value(2 * width * width * wide, "parameter")
        size = row * wide if b.values[x].size_bytes == row else row
        return b.forward("mm", (x,), (size,), saved=(x,), parameter=weight, time_s=matmul_s * wide)[0]

    def point(kind: str, *inputs: int, saved: bool = True, size: int | None = None) -> int:
        size = b.values[inputs[0]].size_bytes if size is None else size
        return b.forward(kind, inputs, (size,), saved=inputs if saved else (), time_s=move_s * len(inputs))[0]

    def norm(x: int) -> int:
        wide = point("to32", x, saved=False, size=2 * row)
        square = point("pow", wide)
        mean = b.forward("mean", (square,), (4 * tokens,), time_s=move_s)[0]
        scale = b.forward("rsqrt", (mean,), (4 * tokens,), save_outputs=True, time_s=1e-5)[0]
        scaled = b.forward("mul", (wide, scale), (2 * row,), saved=(wide, scale), time_s=3 * move_s)[0]
        narrow = point("to16", scaled, saved=False, size=row)
        weight = b.value(2 * width, "parameter")
        return b.forward("mul", (narrow,), (row,), saved=(narrow,), parameter=weight, time_s=move_s)[0]

    tokens_in = b.value(8 * tokens, "input")
    table = b.value(2 * width * 32000, "parameter")
    x = b.forward("embedding", (tokens_in,), (row,), parameter=table, time_s=move_s)[0]
    angles = b.forward("angles", (tokens_in,), (4 * tokens * 128,), time_s=1e-5, differentiable=False)[0]
    cosine = b.forward("cos", (angles,), (2 * tokens * 128,), time_s=1e-5, differentiable=False)[0]
    sine = b.forward("sin", (angles,), (2 * tokens * 128,), time_s=1e-5, differentiable=False)[0]
    for _ in range(layers):
        h = norm(x)
        q, k, v = linear(h), linear(h), linear(h)
        turned = []
        for z in (q, k):
            direct = b.forward("rope", (z, cosine), (row,), saved=(cosine,), time_s=move_s)[0]
            swapped = b.forward("swap", (z, sine), (row,), saved=(sine,), time_s=move_s)[0]
            turned.append(point("add", direct, swapped, saved=False))
        attended, _ = b.forward("attention", (*turned, v), (row, 4 * tokens * 16), saved=(*turned, v),
                                save_outputs=True, time_s=2 * matmul_s)  # fmt: skip
        out = linear(attended)
        if dropout:
            out, _ = b.forward("dropout", (out,), (row, row // 2), save_outputs=True, time_s=move_s, random=True)
        x = point("add", x, out, saved=False)
        h = norm(x)
        gate, up = linear(h, 3), linear(h, 3)
        x = point("add", x, linear(point("mul", point("silu", gate), up), 3), saved=False)
    logits = b.forward("mm", (norm(x),), (2 * tokens * 32000,), parameter=b.value(2 * width * 32000, "parameter"),
                       saved=(), time_s=16 * matmul_s)[0]  # fmt: skip
    loss = b.forward("loss", (logits,), (512, 2 * tokens * 32000), save_outputs=True, time_s=1e-3)[0]
    return b.finish(loss, rng_state_bytes=16)


@st.composite
def random_problems(draw: st.DrawFn, most_ops: int = 12, most_size: int = 6) -> Problem:
    """A legal step of at most `most_ops` forward ops, with everything that a real one can have in it."""
    b = StepBuilder()
    size = st.integers(1, most_size).map(lambda n: 8 * n)
    b.value(draw(size), "input")
    buffer = b.value(8, "buffer")
    gone: set[int] = set()
    current: list[int] = []
    for _ in range(draw(st.integers(2, most_ops))):
        _draw_op(draw, b, current, gone, size)
        if draw(st.integers(0, 9)) == 0:
            new = b.value(8, "buffer", reuses=buffer)
            index = len(b.ops) - 1
            if draw(st.booleans()):
                b.ops[index] = replace(b.ops[index], effects=(Effect(buffer, new),))
            else:
                b.op("count", (buffer,), (new,), time_s=0.5, recomputable=False)
            buffer = new
    outputs = [v for v in current if v not in gone]
    if len(outputs) > 1 and draw(st.integers(0, 3)) == 0:
        held = draw(st.sampled_from(outputs[:-1]))
        b.values[held] = replace(b.values[held], held=True)
    loss = b.forward("loss", tuple(outputs[-2:]), (8,), saved=tuple(outputs[-1:]), time_s=1.0)[0]
    step = b.finish(loss, tangent=draw(st.booleans()), rng_state_bytes=16, time_factor=2.0)
    if draw(st.integers(0, 2)) == 0:
        step = _fused(draw, step)
    accumulate, takes = draw(st.sampled_from([(False, False), (True, False), (False, True)]))
    update_bytes = draw(st.sampled_from([0, 0, 8, 200]))
    return replace(step, accumulate=accumulate, takes_gradients=takes, update_bytes=update_bytes)


def _fused(draw: st.DrawFn, step: Problem) -> Problem:
    """The step as fused groups have it: backward ops with several results, some written over forward values."""
    ops, times, scratch = list(step.graph.ops), list(step.costs.time_s), list(step.costs.scratch_bytes)
    index = step.graph.boundary
    while index + 1 < len(ops):
        first, second = ops[index : index + 2]
        apart = not {*first.outputs} & {*second.inputs} and all(
            step.graph.values[v].reuses is None for v in second.outputs
        )
        if apart and draw(st.booleans()):
            inputs = tuple(dict.fromkeys((*first.inputs, *second.inputs)))
            kind, outputs = f"{first.kind}+{second.kind}", (*first.outputs, *second.outputs)
            ops[index : index + 2] = [replace(first, kind=kind, inputs=inputs, outputs=outputs, key=kind + first.key)]
            times[index : index + 2] = [times[index] + times[index + 1]]
            scratch[index : index + 2] = [max(scratch[index : index + 2])]
        index += 1
    graph = replace(step.graph, ops=tuple(ops))
    for index in range(graph.boundary, len(ops)):
        pairs = [
            (v, old) for v in ops[index].outputs for old in ops[index].inputs if _may_overwrite(graph, index, v, old)
        ]
        if pairs and draw(st.booleans()):
            value, old = draw(st.sampled_from(pairs))
            values = list(graph.values)
            values[value] = replace(values[value], reuses=old)
            graph = replace(graph, values=tuple(values))
    return replace(step, graph=graph, costs=Costs(tuple(times), tuple(scratch)))


def _may_overwrite(graph: Graph, index: int, value: int, old: int) -> bool:
    """Whether a backward op may write a result over a forward value: nobody needs that later, to run again either."""
    new, before = graph.values[value], graph.values[old]
    made = {v for op in graph.ops[: graph.boundary] for v in op.outputs}
    if new.reuses is not None or new.size_bytes != before.size_bytes or old not in made or new.role != "activation":
        return False
    if before.held or before.role != "activation" or any(v.reuses == old for v in graph.values):
        return False
    from_it = {old}
    for op in graph.ops[: graph.boundary]:
        if from_it & {*op.inputs}:
            from_it |= {*op.outputs}
    return not any(from_it & {*op.inputs} for op in graph.ops[index + 1 :])


def _draw_op(draw: st.DrawFn, b: StepBuilder, current: list[int], gone: set[int],
             size: st.SearchStrategy[int]) -> None:  # fmt: skip
    there = [v for v in current if v not in gone]
    near = there[-3:] if draw(st.integers(0, 4)) else there
    inputs = tuple(draw(st.lists(st.sampled_from(near), min_size=1, max_size=2, unique=True))) if near else (0,)
    sizes = tuple(draw(st.lists(size, min_size=1, max_size=2)))
    saved = tuple(v for v in inputs if b.values[v].role == "activation" and draw(st.booleans()))
    parameter = b.value(draw(size), "parameter") if draw(st.booleans()) else None
    target = inputs[-1]
    kept = {v for f in b.forwards for v in f.saved}
    free = b.values[target].role == "activation" and target not in kept and target not in saved
    in_place = target if free and draw(st.integers(0, 3)) == 0 else None
    outputs = b.forward(
        "op", inputs, sizes, saved=saved, save_outputs=draw(st.booleans()), parameter=parameter, in_place=in_place,
        time_s=float(draw(st.integers(1, 5))), scratch_bytes=8 * draw(st.integers(0, 2)),
        random=draw(st.integers(0, 5)) == 0, recomputable=draw(st.integers(0, 12)) != 0,
    )  # fmt: skip
    if in_place is not None:
        gone.add(in_place)
    current.extend(outputs)


def _conv(b: StepBuilder, x: int, size: int, *, relu: bool = True, time_s: float | None = None) -> int:
    """Convolution, batch norm, and a ReLU in place."""
    buffer = b.value(256, "buffer")
    weight = b.value(max(512, (1 << 40) // (size * 1024)), "parameter")
    time_s = size / 2e11 if time_s is None else time_s
    y = b.forward("conv", (x,), (size,), saved=(x,), parameter=weight, time_s=time_s, scratch_bytes=size // 4)[0]
    new = b.value(256, "buffer", reuses=buffer)
    out, _, _ = b.forward("norm", (y,), (size, 512, 512), saved=(y,), parameter=b.value(512, "parameter"),
                          time_s=2 * size / 1e12, effects=(Effect(buffer, new),))  # fmt: skip
    return _relu(b, out) if relu else out


def _relu(b: StepBuilder, x: int) -> int:
    return b.forward("relu_", (x,), (0,), in_place=x, save_outputs=True, time_s=b.values[x].size_bytes / 1e12)[0]


def resnet_like(stages: tuple[int, ...] = (3, 4, 6, 3), size: int = 1 << 26) -> Problem:
    """Bottleneck blocks with additions and ReLUs in place."""
    b = StepBuilder()
    x = _conv(b, b.value(size // 4, "input"), size)
    for stage, blocks in enumerate(stages):
        wide, narrow = (4 * size) >> stage, size >> stage
        for block in range(blocks):
            y = _conv(b, _conv(b, _conv(b, x, narrow), narrow), wide, relu=False)
            skip = _conv(b, x, wide, relu=False) if block == 0 else x
            total = b.forward("add_", (y, skip), (0,), in_place=y, time_s=2 * wide / 1e12)[0]
            x = _relu(b, total)
    pooled = b.forward("mean", (x,), (8192,), time_s=1e-5)[0]
    loss = b.forward("loss", (pooled,), (512, 8192), save_outputs=True, time_s=1e-5)[0]
    return b.finish(loss, time_factor=1.2)


def unet_like(depth: int = 5, size: int = 1 << 27) -> Problem:
    """Two convolutions a level on the way down and on the way up; each level's result crosses all below it."""
    b = StepBuilder()
    x = b.value(size // 16, "input")
    skips = []
    for level in range(depth):
        x = _conv(b, _conv(b, x, size >> level), size >> level)
        skips.append(x)
        x = b.forward("pool", (x,), ((size >> level) // 4,), saved=(x,), time_s=1e-4)[0]
    x = _conv(b, x, size >> depth)
    for level in reversed(range(depth)):
        up = b.forward("up", (x,), (size >> level,), time_s=2e-4)[0]
        both = b.forward("cat", (up, skips[level]), (2 * (size >> level),), time_s=4e-4)[0]
        x = _conv(b, _conv(b, both, size >> level), size >> level)
    loss = b.forward("loss", (x,), (512, size // 16), save_outputs=True, time_s=1e-4)[0]
    return b.finish(loss, time_factor=1.2)


def encoder_decoder_like(layers: int = 6, size: int = 1 << 24) -> Problem:
    """An encoder whose output and a decoder whose mask every decoder layer reads; dropout everywhere."""
    b = StepBuilder()
    tokens = b.value(4096, "input")

    def linear(x: int, wide: int = 1) -> int:
        weight = b.value(wide * (1 << 22), "parameter")
        return b.forward("mm", (x,), (wide * size,), saved=(x,), parameter=weight, time_s=wide * 2e-4)[0]

    def dropout(x: int) -> int:
        whole = b.values[x].size_bytes
        noise = b.forward("empty", (tokens,), (whole,), time_s=1e-6, differentiable=False)[0]
        drawn = b.forward("bernoulli_", (noise,), (0,), in_place=noise, random=True, time_s=2e-5,
                          differentiable=False)[0]  # fmt: skip
        mask = b.forward("div_", (drawn,), (0,), in_place=drawn, time_s=2e-5, differentiable=False)[0]
        return b.forward("mul", (x, mask), (whole,), saved=(mask,), time_s=3e-5)[0]

    def norm(x: int) -> int:
        weight = b.value(4096, "parameter")
        return b.forward("norm", (x,), (size, 8192), saved=(x,), parameter=weight, save_outputs=True, time_s=4e-5)[0]

    def attend(x: int, memory: int, bias: int) -> int:
        h = norm(x)
        q, k, v = linear(h), linear(memory if memory >= 0 else h), linear(memory if memory >= 0 else h)
        scores = b.forward("bmm", (q, k), (2 * size,), saved=(q, k), time_s=1e-4)[0]
        total = b.forward("add_", (scores, bias), (0,), in_place=scores, time_s=4e-5)[0]
        soft = b.forward("softmax", (total,), (2 * size,), save_outputs=True, time_s=6e-5)[0]
        kept = dropout(soft)
        mixed = b.forward("bmm", (kept, v), (size,), saved=(kept, v), time_s=1e-4)[0]
        return b.forward("add", (x, dropout(linear(mixed))), (size,), time_s=3e-5)[0]

    def feed(x: int) -> int:
        hidden = linear(norm(x), 4)
        act = b.forward("relu", (hidden,), (4 * size,), save_outputs=True, time_s=8e-5)[0]
        weight = b.value(1 << 24, "parameter")
        back = b.forward("mm", (dropout(act),), (size,), parameter=weight, time_s=8e-4)[0]
        return b.forward("add", (x, dropout(back)), (size,), time_s=3e-5)[0]

    def bias() -> int:
        table = b.value(4096, "parameter")
        return b.forward("bias", (tokens,), (2 * size // 8,), parameter=table, time_s=5e-5)[0]

    def stack(memory: int) -> int:
        x = dropout(b.forward("embedding", (tokens,), (size,), parameter=b.value(1 << 24, "parameter"), time_s=2e-5)[0])
        mask = bias()
        for _ in range(layers):
            x = attend(x, -1, mask)
            x = feed(attend(x, memory, mask) if memory >= 0 else x)
        return norm(x)

    decoded = stack(stack(-1))
    logits = b.forward("mm", (decoded,), (8 * size,), saved=(decoded,), parameter=b.value(1 << 26, "parameter"),
                       time_s=1e-3)[0]  # fmt: skip
    loss = b.forward("loss", (logits,), (512, 8 * size), save_outputs=True, time_s=2e-4)[0]
    return b.finish(loss, rng_state_bytes=16, time_factor=1.0)


def fsdp_like(
    layers: int, *, unit_bytes: int = 400, act_bytes: int = 160, layer_s: float = 4.0, network_s: float = 3.0,
    parameters: int = 2, casts: bool = True, replicas: bool = False,
) -> Problem:  # fmt: skip
    """A step of layers that are units of `fully_shard` on four ranks. replicas: as HSDP has them."""
    b = StepBuilder()
    part, whole = unit_bytes // 4, unit_bytes

    def gathered(index: int) -> tuple[int, ...]:
        held = [b.value(part // parameters, "parameter") for _ in range(parameters)]
        casted = [b.forward("to", (p,), (part // parameters,), time_s=0.01, differentiable=False)[0] for p in held]
        flat = b.forward("cat", tuple(casted), (part,), time_s=0.02, differentiable=False)[0]
        kind = "_c10d_functional.all_gather_into_tensor.default"
        all_parts = b.forward(kind, (flat,), (whole,), time_s=network_s, differentiable=False)[0]
        return tuple(
            b.forward("unpack", (all_parts,), (whole // parameters,), time_s=0.02, differentiable=False)[0]
            for _ in range(parameters)
        )

    x, saved = b.value(act_bytes, "input"), []
    for index in range(layers):
        weights = gathered(index)
        hidden = b.forward("up", (x, *weights), (4 * act_bytes,), time_s=layer_s / 2, differentiable=False)[0]
        out = b.forward("down", (hidden, *weights), (act_bytes,), time_s=layer_s / 2, differentiable=False)[0]
        saved.append((x, hidden, weights))
        x = out
    loss = b.forward("loss", (x,), (8,), time_s=0.1, differentiable=False)[0]
    b.values[loss] = replace(b.values[loss], held=True)
    boundary = len(b.ops)
    grad = b.value(act_bytes)
    b.op("loss backward", (x,), (grad,), phase="backward", time_s=0.1)
    for x, hidden, weights in reversed(saved):
        inner, below = b.value(4 * act_bytes), b.value(act_bytes)
        wholes = [b.value(whole // parameters) for _ in weights]
        b.op("down backward", (grad, hidden, *weights), (inner, wholes[0]), phase="backward", time_s=layer_s)
        b.op("up backward", (inner, x, *weights), (below, *wholes[1:]), phase="backward", time_s=layer_s)
        flat, reduced = b.value(whole), b.value(part)
        b.op("chunk_cat", tuple(wholes), (flat,), phase="backward", time_s=0.02)
        kind = "_c10d_functional.reduce_scatter_tensor.default"
        b.op(kind, (flat,), (reduced,), phase="backward", time_s=network_s)
        if replicas:
            kind, part_of_all = "_c10d_functional.all_reduce.default", reduced
            reduced = b.value(part)
            b.op(kind, (part_of_all,), (reduced,), phase="backward", time_s=network_s / 4)
        made = reduced
        if casts:
            made = b.value(part)
            b.op("to", (reduced,), (made,), phase="backward", time_s=0.01)
        b.values[made] = replace(b.values[made], role="gradient", held=True)
        grad = below
    return Problem(Graph(tuple(b.values), tuple(b.ops), boundary), Costs(tuple(b.time_s), tuple(b.scratch_bytes)))
