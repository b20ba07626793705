"""Functions of PyTorch, each with what it is called with: most that a model may use, where a branch may hide."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel


class Draw:
    """Makes tensors; those that require grad are noted."""

    def __init__(self) -> None:
        self.leaves: list[torch.Tensor] = []

    def __call__(self, *shape: int, dtype: torch.dtype = torch.float32, turned: bool = False) -> torch.Tensor:
        """turned: the last two dimensions lie the other way round."""
        made = self.fixed(*shape, dtype=dtype)
        return self.leaf(made.mT.contiguous().mT if turned else made)

    def fixed(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype)

    def tied(self, *shape: int) -> torch.Tensor:
        """With zeros and elements that are equal."""
        made = torch.randn(shape)
        return self.leaf(torch.where(torch.rand(shape) < 0.5, made.round(), made))

    def leaf(self, tensor: torch.Tensor) -> torch.Tensor:
        self.leaves.append(tensor.requires_grad_())
        return tensor

    def of(self, module: nn.Module, *inputs: torch.Tensor) -> Any:
        self.leaves += list(module.parameters())
        return module(*inputs)

    def indices(self, limit: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, limit, shape)

    def mask(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape) < 0.4

    def symmetric(self, *shape: int) -> torch.Tensor:
        made = self.fixed(*shape)
        return self.leaf(made @ made.mT + torch.eye(shape[-1]))


Case = Callable[[Draw], Any]


def in_place(tensor: torch.Tensor, write: Callable[[torch.Tensor], object]) -> torch.Tensor:
    tensor = tensor * 1
    write(tensor)
    return tensor


def ignoring(target: torch.Tensor) -> torch.Tensor:
    return target.masked_fill(torch.rand(target.shape) < 0.3, -100)


def attention(draw: Draw, mask: str = "", backend: SDPBackend | None = None, **options: Any) -> torch.Tensor:
    dtype = options.pop("dtype", torch.float32)
    query, key, value = (draw(2, 4, 24, 8, dtype=dtype) for _ in range(3))
    masks = {"bool": draw.mask(24, 24), "float": draw.fixed(24, 24, dtype=dtype), "": None}
    with sdpa_kernel(backend) if backend else contextlib.nullcontext():
        return F.scaled_dot_product_attention(query, key, value, masks[mask], **options)


PRODUCTS: dict[str, Case] = {
    "mm": lambda d: d(17, 64) @ d(64, 33),
    "vectors": lambda d: (d(33) @ d(33, 5)) @ d(5),
    "matrix and batch": lambda d: d(5, 33) @ d(3, 33, 17),
    "batch and matrix": lambda d: d(3, 17, 33) @ d(33, 5),
    "turned batch and matrix": lambda d: d(3, 17, 33, turned=True) @ d.fixed(33, 5),
    "batch and one": lambda d: d(3, 64, 100, dtype=torch.float64) @ d.fixed(1, 100, 64, dtype=torch.float64),
    "one and batch": lambda d: d.fixed(1, 17, 64) @ d(17, 64, 1, turned=True),
    "one that requires grad and batch": lambda d: d(1, 5, 33) @ d(9, 33, 100),
    "batch and row": lambda d: d(17, 1, 17) @ d.fixed(1, 17, 17),
    "batches": lambda d: d(3, 17, 33) @ d(3, 33, 5),
    "broadcast batches": lambda d: d(2, 1, 17, 33) @ d(3, 33, 5),
    "einsum": lambda d: torch.einsum("bij,bjk,k->bi", d(3, 5, 7), d(3, 7, 9), d(9)),
    "tensordot": lambda d: torch.tensordot(d(3, 5, 7), d(5, 7, 9)),
    "linear": lambda d: F.linear(d(17, 33), d(9, 33), d(9)),
    "linear, three": lambda d: F.linear(d(3, 17, 33), d(9, 33), d(9)),
    "linear, turned": lambda d: F.linear(d(3, 17, 33, turned=True), d(9, 33), d(9)),
    "linear, four, turned": lambda d: F.linear(d(2, 3, 17, 33, turned=True), d(9, 33), d(9)),
    "linear, no bias": lambda d: F.linear(d(3, 17, 33), d(9, 33)),
    "linear, bfloat16": lambda d: F.linear(*(d(*s, dtype=torch.bfloat16) for s in ((2, 3, 17, 33), (9, 33), (9,)))),
    "bilinear": lambda d: F.bilinear(d(17, 9), d(17, 7), d(5, 9, 7), d(5)),
    "baddbmm": lambda d: torch.baddbmm(d(3, 5, 9), d(3, 5, 7), d(3, 7, 9)),
    "vmap": lambda d: torch.vmap(lambda x, a: x.view(2, 3, 4) @ a, (0, None))(d(33, 24), d.fixed(1, 4, 4)),
    "attention": attention,
    "attention, math": lambda d: attention(d, "float", SDPBackend.MATH),
    "attention, bfloat16": lambda d: attention(d, "float", SDPBackend.MATH, dtype=torch.bfloat16),
    "attention, bool": lambda d: attention(d, "bool", dropout_p=0.2),
    "attention, causal": lambda d: attention(d, is_causal=True),
    "attention, causal, dropout": lambda d: attention(d, is_causal=True, dropout_p=0.2),
    "multihead": lambda d: d.of(nn.MultiheadAttention(16, 4, dropout=0.1), *[d(9, 3, 16)] * 3),
    "encoder layer": lambda d: d.of(nn.TransformerEncoderLayer(16, 4, 32), d(9, 3, 16)),
    "lstm": lambda d: d.of(nn.LSTM(9, 7, 2, dropout=0.2, bidirectional=True), d(5, 3, 9)),
    "gru": lambda d: d.of(nn.GRU(9, 7, 2, dropout=0.2), d(5, 3, 9)),
    "rnn": lambda d: d.of(nn.RNN(9, 7), d(5, 3, 9)),
    "lstm cell": lambda d: d.of(nn.LSTMCell(9, 7), d(3, 9)),
    "conv1d": lambda d: F.conv1d(d(3, 4, 33), d(6, 4, 5), d(6)),
    "conv2d": lambda d: F.conv2d(d(3, 4, 17, 17), d(6, 2, 3, 3), d(6), padding="same", groups=2),
    "conv2d, channels last": lambda d: F.conv2d(d(3, 4, 9, 9).to(memory_format=torch.channels_last), d(6, 4, 3, 3)),
    "conv3d": lambda d: F.conv3d(d(2, 3, 7, 7, 7), d(5, 3, 3, 3, 3), stride=2),
    "conv_transpose2d": lambda d: F.conv_transpose2d(d(3, 4, 9, 9), d(4, 6, 3, 3), d(6), stride=2),
}

LOSSES: dict[str, Case] = {
    "cross entropy": lambda d: F.cross_entropy(d(333, 50), ignoring(d.indices(50, 333))),
    "smoothed": lambda d: F.cross_entropy(d(333, 50), ignoring(d.indices(50, 333)), label_smoothing=0.1),
    "weighted": lambda d: F.cross_entropy(d(333, 50), ignoring(d.indices(50, 333)), torch.rand(50)),
    "weighted and smoothed": lambda d: [
        F.cross_entropy(d(333, 50), ignoring(d.indices(50, 333)), torch.rand(50), label_smoothing=0.1) for _ in range(6)
    ],
    "weighted and smoothed, of pixels": lambda d: F.cross_entropy(
        d(2, 50, 9, 9), ignoring(d.indices(50, 2, 9, 9)), torch.rand(50), label_smoothing=0.1
    ),
    "weighted and smoothed sum": lambda d: F.cross_entropy(
        d(333, 50), ignoring(d.indices(50, 333)), torch.rand(50), label_smoothing=0.1, reduction="sum"
    ),
    "probabilities": lambda d: F.cross_entropy(
        d(33, 50), d.fixed(33, 50).softmax(1), torch.rand(50), label_smoothing=0.1
    ),
    "nll": lambda d: F.nll_loss(d(33, 50), d.indices(50, 33), torch.rand(50)),
    "bce": lambda d: F.binary_cross_entropy(d(333).sigmoid(), torch.rand(333), torch.rand(333)),
    "bce with logits": lambda d: F.binary_cross_entropy_with_logits(
        d(33, 9), torch.rand(33, 9), pos_weight=torch.rand(9)
    ),
    "bce of two dtypes": lambda d: F.binary_cross_entropy_with_logits(d(333), torch.rand(333, dtype=torch.float64)),
    "bce of two dtypes, weighted": lambda d: F.binary_cross_entropy_with_logits(
        d(33, 9), torch.rand(33, 9, dtype=torch.float64), torch.rand(33, 9), pos_weight=torch.rand(9)
    ),
    "bce to targets": lambda d: F.binary_cross_entropy_with_logits(d(333), d(333), reduction="none"),
    "hinge": lambda d: F.hinge_embedding_loss(d(333), d.fixed(333).sign()),
    "ranking": lambda d: F.margin_ranking_loss(d(333), d(333), d.fixed(333).sign()),
    "cosine": lambda d: F.cosine_embedding_loss(d(33, 9), d(33, 9), d.fixed(33).sign()),
    "triplet": lambda d: F.triplet_margin_loss(d(33, 9), d(33, 9), d(33, 9), swap=True),
    "multi margin": lambda d: F.multi_margin_loss(d(33, 9), d.indices(9, 33)),
    "kl": lambda d: F.kl_div(d(33, 9), d.fixed(33, 9).softmax(1), reduction="batchmean"),
    "gaussian": lambda d: F.gaussian_nll_loss(d(33, 9), d.fixed(33, 9), torch.rand(33, 9)),
    "poisson": lambda d: F.poisson_nll_loss(d(333), torch.rand(333), full=True),
    "smooth l1": lambda d: F.smooth_l1_loss(d(333), d(333)),
    "huber": lambda d: F.huber_loss(d(333), d(333), reduction="sum"),
    "soft margin": lambda d: F.soft_margin_loss(d(333), d.fixed(333).sign()),
    "mse": lambda d: F.mse_loss(d(33, 9), d(33, 9)),
    "ctc": lambda d: F.ctc_loss(
        d(20, 3, 9).log_softmax(2), d.indices(8, 3, 5) + 1, torch.full((3,), 20), torch.tensor([3, 4, 5])
    ),
}

AMINMAX = ("aminmax",) if torch.torch_version.TorchVersion(torch.__version__) >= "2.13" else ()  # it has no gradient

REDUCTIONS: dict[str, Case] = {
    **{
        f"{name} of all": (lambda d, name=name: -getattr(torch, name)(d.tied(17, 33)))
        for name in (
            "max",
            "min",
            "median",
            "nanmedian",
            "amax",
            "amin",
            "aminmax",
            "logsumexp0",
            "mean",
            "norm",
            "std",
        )
        if hasattr(torch, name) and name != "aminmax"
    },
    "max of all, turned": lambda d: -d(17, 33, turned=True).max(),
    **{
        f"{name} of a dimension": (lambda d, name=name: getattr(d.tied(17, 33), name)(dim=1))
        for name in ("max", "min", "median", "nanmedian", "mode", "amax", "amin", *AMINMAX, "cummax", "cummin")
    },
    **{
        f"{name} along a dimension": (lambda d, name=name: getattr(d(17, 33), name)(1))
        for name in ("cumsum", "logcumsumexp", "logsumexp", "var", "std", "sum", "nansum", "softmax", "sort", "argsort")
    },
    "kthvalue": lambda d: d.tied(17, 33).kthvalue(5),
    "topk": lambda d: d.tied(17, 33).topk(5),
    "quantile": lambda d: d(17, 33).quantile(torch.tensor([0.2, 0.7]), dim=1),
    "nanquantile": lambda d: d(17, 33).nanquantile(0.3),
    **{f"norm {p}": (lambda d, p=p: d.tied(17, 33).norm(p, dim=1)) for p in (0, 1, 1.5, 2, 3, math.inf, -math.inf)},
    "trace": lambda d: d(17, 17).trace(),
    "cdist": lambda d: torch.cdist(d(17, 9), d(13, 9)),
    "pdist": lambda d: F.pdist(d(17, 9)),
    "pairwise": lambda d: F.pairwise_distance(d(17, 9), d(17, 9)),
    "cosine similarity": lambda d: F.cosine_similarity(d(17, 9), d(17, 9)),
    "layer norm": lambda d: F.layer_norm(d(3, 17, 33), (33,), d(33), d(33)),
    "rms norm": lambda d: F.rms_norm(d(3, 17, 33), (33,), d(33)),
    "group norm": lambda d: F.group_norm(d(3, 8, 9), 2, d(8), d(8)),
    "batch norm": lambda d: F.batch_norm(d(3, 8, 9), torch.zeros(8), torch.ones(8), d(8), d(8), training=True),
    "instance norm": lambda d: F.instance_norm(d(3, 8, 9)),
    "renorm": lambda d: d(17, 9).renorm(2, 0, 1.0),
    "weight norm": lambda d: torch._weight_norm(d(17, 9), d(17, 1), 0),
}

SELECTIONS: dict[str, Case] = {
    "index": lambda d: d(17, 33)[d.indices(17, 40), d.indices(33, 40)],
    "index by mask": lambda d: d(17, 33)[d.mask(17, 33)],
    "index_put": lambda d: in_place(d(17, 3), lambda x: x.index_put_((d.indices(17, 9),), d(9, 3), accumulate=True)),
    "index_add": lambda d: d(17, 9).index_add(0, d.indices(17, 40), d(40, 9)),
    "index_select": lambda d: d(17, 9).index_select(0, d.indices(17, 40)),
    "index_fill": lambda d: d(17, 9).index_fill(0, d.indices(17, 5), d()),
    "gather": lambda d: d(17, 9).gather(0, d.indices(17, 40, 9)),
    "expanded gather": lambda d: d(40, 64).gather(0, d.indices(40, 99, 1).expand(99, 64)),
    "take": lambda d: d(17, 9).take(d.indices(17 * 9, 300)),
    "take_along_dim": lambda d: d(17, 9).take_along_dim(d.indices(17, 40, 9), 0),
    "scatter_add": lambda d: d(17, 9).scatter_add(0, d.indices(17, 40, 9), d(40, 9)),
    "scatter_reduce": lambda d: d(17, 9).scatter_reduce(0, d.indices(17, 40, 9), d.tied(40, 9), "amax"),
    "scatter": lambda d: d(17, 9).scatter(0, torch.arange(9).unsqueeze(0), d(1, 9)),
    "masked_fill": lambda d: d(17, 9).masked_fill(d.mask(17, 9), -1.0),
    "masked_fill of a tensor": lambda d: d(17, 9).masked_fill(d.mask(17, 9), torch.tensor(2.0)),
    "masked_fill of a view": lambda d: in_place(
        d(17, 9), lambda x: x[:, 0].masked_fill_(d.mask(17), torch.tensor(2.0))
    ),
    "masked_select": lambda d: d(17, 9).masked_select(d.mask(17, 9)),
    "masked_scatter": lambda d: d(17, 9).masked_scatter(d.mask(17, 9), d(17, 9)),
    "where": lambda d: torch.where(d.mask(17, 9), d(), d(17, 9)),
    "embedding": lambda d: F.embedding(d.indices(17, 99), d(17, 9), padding_idx=3, scale_grad_by_freq=True),
    **{
        f"embedding bag {mode}": (lambda d, mode=mode: F.embedding_bag(d.indices(17, 9, 11), d(17, 9), mode=mode))
        for mode in ("sum", "mean", "max")
    },
    "embedding bag, weighted": lambda d: F.embedding_bag(
        d.indices(17, 99), d(17, 9), torch.tensor([0, 9, 50]), mode="sum", per_sample_weights=d(99)
    ),
    "clamp": lambda d: d(17, 9).clamp(d.fixed(9), d(17, 9)),
    "maximum": lambda d: torch.maximum(d.tied(17, 9), d.tied(17, 9)),
    "atan2": lambda d: torch.atan2(d.tied(17, 9), d.tied(17, 9)),
    "isclose": lambda d: torch.isclose(d(17, 9), d(17, 9)),
    "repeat_interleave": lambda d: d(17, 9).repeat_interleave(3, 0),
    "unfold": lambda d: F.fold(F.unfold(d(2, 3, 9, 9), 3), (9, 9), 3),
    "reshape": lambda d: d(17, 33, turned=True).reshape(-1, 3),
    "max_pool1d": lambda d: F.max_pool1d(d.tied(3, 4, 33), 3),
    "max_pool1d of an input": lambda d: F.max_pool1d(d.fixed(3, 4, 33), 3),
    "max_pool2d": lambda d: F.max_pool2d(d.tied(3, 4, 9, 9), 3, 1),
    "avg_pool2d": lambda d: F.avg_pool2d(d(3, 4, 9, 9), 3, 2, 1),
    "adaptive_max_pool2d": lambda d: F.adaptive_max_pool2d(d.tied(3, 4, 9, 9), 2),
    "interpolate": lambda d: F.interpolate(d(2, 3, 9, 9), scale_factor=1.7, mode="bicubic", align_corners=True),
    "grid_sample": lambda d: F.grid_sample(d(2, 3, 9, 9), d(2, 5, 5, 2), align_corners=False),
    "pad": lambda d: F.pad(d(2, 3, 9, 9), (1, 2, 2, 1), mode="reflect"),
    "prelu": lambda d: F.prelu(d(17, 9), d(9)),
    "rrelu": lambda d: F.rrelu(d(17, 9), training=True),
    "glu": lambda d: F.glu(d(17, 10)),
    "gelu": lambda d: F.gelu(d(17, 10), approximate="tanh"),
    "dropout": lambda d: F.dropout(d(17, 9), 0.3),
    "dropout, bfloat16": lambda d: F.dropout(d(17, 9, dtype=torch.bfloat16), 0.3),
    "alpha_dropout": lambda d: F.alpha_dropout(d(17, 9), 0.3, training=True),
    "feature dropout": lambda d: F.dropout2d(d(3, 9, 5, 5), 0.3),
}

LINALG: dict[str, Case] = {
    **{
        name: (lambda d, name=name: getattr(torch.linalg, name)(d(3, 9, 9)))
        for name in ("inv", "pinv", "det", "slogdet", "matrix_exp", "qr", "lu_factor", "svdvals", "cond")
    },
    "solve": lambda d: torch.linalg.solve(d(3, 9, 9), d(3, 9, 5)),
    "solve_triangular": lambda d: torch.linalg.solve_triangular(
        d(3, 9, 9).triu() + torch.eye(9), d(3, 9, 5), upper=True
    ),
    "cholesky": lambda d: torch.linalg.cholesky(d.symmetric(3, 9, 9)),
    "svd": lambda d: torch.linalg.svd(d(3, 9, 5), full_matrices=False)[1],
    "eigh": lambda d: torch.linalg.eigh(d.symmetric(3, 9, 9))[0],
    "eigvalsh": lambda d: torch.linalg.eigvalsh(d.symmetric(3, 9, 9)),
    "eigvalsh of an input": lambda d: torch.linalg.eigvalsh(d.fixed(3, 20, 20)),
    "svdvals of an input": lambda d: torch.linalg.svdvals(d.fixed(3, 20, 20)),
    "eigvals of an input": lambda d: torch.linalg.eigvals(d.fixed(3, 20, 20)),
    "norm of an input": lambda d: torch.linalg.matrix_norm(d.fixed(3, 20, 20), "nuc"),
    "matrix_norm": lambda d: torch.linalg.matrix_norm(d(3, 9, 9), 2),
    "matrix_rank": lambda d: torch.linalg.matrix_rank(d(3, 9, 5)),
    "matrix_power": lambda d: torch.linalg.matrix_power(d(3, 9, 9), 3),
    "householder": lambda d: torch.linalg.householder_product(d(3, 9, 5, turned=True), d(3, 5)),
    "ormqr": lambda d: torch.ormqr(d(2, 5, 5, turned=True), d(2, 5), d(2, 5, 5), transpose=True),
    "cross": lambda d: torch.linalg.cross(d(9, 3), d(9, 3)),
}


def autocast(case: Case) -> Case:
    def run(draw: Draw) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return case(draw)

    return run


AUTOCAST: dict[str, Case] = {
    f"{name}, autocast": autocast(cases[name])
    for cases, names in (
        (PRODUCTS, ("mm", "one and batch", "linear", "linear, four, turned", "attention", "multihead", "conv2d")),
        (LOSSES, ("weighted and smoothed", "smoothed", "bce with logits")),
        (LINALG, ("svdvals of an input", "eigvalsh of an input", "eigvals of an input")),
        (REDUCTIONS, ("max of all", "layer norm", "batch norm")),
        (SELECTIONS, ("dropout",)),
    )
    for name in names
}

CASES = {**PRODUCTS, **LOSSES, **REDUCTIONS, **SELECTIONS, **LINALG, **AUTOCAST}

# Eager's way depends on data.
REFUSED: dict[str, Case] = {
    "prod of all": lambda d: d.tied(3, 3).prod(),
    "prod": lambda d: d(17, 9).prod(1),
    "cumprod": lambda d: d(17, 9).cumprod(1),
    "cumprod_": lambda d: in_place(d(17, 9), lambda x: x.cumprod_(1)),
    "cumprod_ of a view": lambda d: in_place(d(17, 9), lambda x: x[:, :4].cumprod_(1)),
    "vander": lambda d: torch.linalg.vander(d(17), N=4),
    "masked_fill of a value": lambda d: d(17, 9).masked_fill(d.mask(17, 9), d()),
    "masked_fill_ of a value": lambda d: in_place(d(17, 9), lambda x: x.masked_fill_(d.mask(17, 9), d())),
    "masked_fill_ of a value in a view": lambda d: in_place(d(17, 9), lambda x: x[:, 0].masked_fill_(d.mask(17), d())),
    "linear of two dtypes": lambda d: F.linear(
        d(2, 3, 17, 9, dtype=torch.bfloat16, turned=True), d(5, 9, dtype=torch.bfloat16), d(5)
    ),
}
