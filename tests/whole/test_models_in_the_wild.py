"""Small models as people write them: three planned steps are the plain model's bits at the floor and at 0.6."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

import memplan
from tests.support.parameters import quickly
from tests.support.zoo import assert_same_bits, copied, loss_of, run_steps

Build = Callable[[], tuple[nn.Module, Any]]
WILD: dict[str, Build] = {}


def wild(build: Build) -> Build:
    WILD[build.__name__] = build
    return build


class Lambda(nn.Module):
    """A function of its submodules and inputs."""

    def __init__(self, function: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def square(x: torch.Tensor) -> torch.Tensor:
    return x.pow(2).mean()


def layer(width: int = 8) -> nn.Linear:
    return nn.Linear(width, width)


def lstm() -> tuple[nn.Module, Any]:
    net = nn.LSTM(8, 16, 2, dropout=0.2, batch_first=True)
    return Lambda(lambda s, x: square(s.head(s.body(x)[0])), body=net, head=nn.Linear(16, 3)), torch.randn(4, 10, 8)


@wild
def gru_both_ways() -> tuple[nn.Module, Any]:
    net = nn.GRU(8, 16, bidirectional=True)
    return Lambda(lambda s, x: square(s.head(s.body(x)[0])), body=net, head=nn.Linear(32, 3)), torch.randn(4, 4, 8)


@wild
def recurrent_cell() -> tuple[nn.Module, Any]:
    def run(s: Any, x: torch.Tensor) -> torch.Tensor:
        hidden = x.new_zeros(x.shape[0], 16)
        for step in range(x.shape[1]):
            hidden = s.cell(x[:, step], hidden)
        return square(s.head(hidden))

    return Lambda(run, cell=nn.GRUCell(8, 16), head=nn.Linear(16, 3)), torch.randn(4, 4, 8)


@wild
def empty_batch_in_another_layout_than_its_fake_kernels() -> tuple[nn.Module, Any]:
    def run(s: Any, boxes: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        turned, _ = torch.linalg.qr(
            s.boxes(boxes)
        )  # real kernels stride the empty result in columns, fake ones in rows
        return square(s.points(x)) + (turned * 2).tanh().sum()

    return Lambda(run, boxes=layer(), points=layer()), (torch.randn(0, 8, 8), torch.randn(64, 8))


@wild
def pseudo_inverse_of_complex_matrices() -> tuple[nn.Module, Any]:
    def run(s: Any, x: torch.Tensor) -> torch.Tensor:
        inverse = torch.linalg.pinv(torch.complex(s.real(x), s.imaginary(x)))  # its kernel makes lazy conjugates
        return square(torch.view_as_real(inverse).tanh())

    return Lambda(run, real=layer(), imaginary=layer()), torch.randn(3, 8, 8)


class PartlyEval(nn.Module):
    """Batch norm stays in eval mode, as in fine-tuning."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8)
        self.second, self.head = nn.Conv1d(8, 8, 3), nn.Linear(96, 4)

    def train(self, mode: bool = True) -> PartlyEval:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.norm(self.first(x)), inplace=True)
        return square(self.head(F.relu_(self.second(hidden)).flatten(1)))


@wild
def conv_with_frozen_statistics() -> tuple[nn.Module, Any]:
    return PartlyEval(), torch.randn(4, 3, 16)


class EvalInForward(nn.Module):
    """Forward itself puts a submodule in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.drop = layer(), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.drop.eval()
        return square(self.drop(torch.tanh(self.body(x))))


@wild
def eval_mode_set_by_forward() -> tuple[nn.Module, Any]:
    return EvalInForward(), torch.randn(4, 8)


@wild
def group_norm_images() -> tuple[nn.Module, Any]:
    blocks = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU()) for _ in range(2)]
    return Lambda(lambda s, x: square(s.body(x)), body=nn.Sequential(*blocks)), torch.randn(2, 8, 8, 8)


@wild
def attention_with_weights() -> tuple[nn.Module, Any]:
    def run(s: Any, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        out, weights = s.attend(x, x, x, key_padding_mask=padding)
        return square(out) + square(weights)

    padding = torch.zeros(2, 12, dtype=torch.bool)
    padding[1, 9:] = True
    return Lambda(run, attend=nn.MultiheadAttention(16, 4, dropout=0.1, batch_first=True)), (
        torch.randn(2, 12, 16),
        padding,
    )


@wild
def parametrized_weights() -> tuple[nn.Module, Any]:
    body = nn.Sequential(weight_norm(layer()), nn.Tanh(), spectral_norm(layer()), nn.Tanh(), orthogonal(layer()))
    return Lambda(lambda s, x: square(s.body(x)), body=body), torch.randn(64, 8)


@wild
def embedding_bag() -> tuple[nn.Module, Any]:
    net = Lambda(lambda s, i, o: square(s.head(torch.tanh(s.table(i, o)))), table=nn.EmbeddingBag(50, 8), head=layer())
    return net, (torch.randint(0, 50, (40,)), torch.arange(0, 40, 4))


class Averages(nn.Module):
    """A running average that forward updates in place, and reads before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = layer(), layer()
        self.register_buffer("average", torch.zeros(8))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.inner(x))
        before = hidden - self.average
        with torch.no_grad():
            self.average.mul_(0.9).add_(hidden.mean(0), alpha=0.1)
            self.count += 1
        after = torch.sigmoid(self.outer(hidden - self.average)) + self.count
        return square(after) + before.exp().mean()


@wild
def running_average() -> tuple[nn.Module, Any]:
    return Averages(), torch.randn(128, 8)


class Reassigns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = layer()
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.inner(x))
        self.average = 0.9 * self.average + 0.1 * hidden.detach().mean(0)
        return square(hidden - self.average)


@wild
def reassigned_buffer() -> tuple[nn.Module, Any]:
    return Reassigns(), torch.randn(64, 8)


@wild
def returns_its_input() -> tuple[nn.Module, Any]:
    return Lambda(lambda s, x: (square(s.one(torch.tanh(s.one(x)))), x), one=layer()), torch.randn(64, 8)


@wild
def nested_outputs() -> tuple[nn.Module, Any]:
    def run(s: Any, x: torch.Tensor, flag: bool, n: int = 3) -> dict[str, Any]:
        hidden = torch.tanh(s.one(x))
        return {"loss": square(s.one(hidden)), "rest": (n, None, [hidden.detach(), "text"], ()), "flag": flag}

    return Lambda(run, one=layer()), {"x": torch.randn(64, 8), "flag": False, "n": 4}


@wild
def tied_embedding() -> tuple[nn.Module, Any]:
    table, head = nn.Embedding(30, 8), nn.Linear(8, 30, bias=False)
    head.weight = table.weight
    net = Lambda(
        lambda s, i: F.cross_entropy(s.head(torch.tanh(s.table(i))).flatten(0, 1), i.flatten()), table=table, head=head
    )
    return net, torch.randint(0, 30, (4, 9))


@wild
def writes_into_slices() -> tuple[nn.Module, Any]:
    def run(s: Any, x: torch.Tensor) -> torch.Tensor:
        hidden = s.one(x) * 1.0
        hidden[:, :4].mul_(2)
        hidden[:, 4:] = torch.tanh(hidden[:, 4:])
        hidden[0].zero_()
        hidden[1:3, ::2] += 1
        other = s.one(hidden).clone()
        other[..., 0] = hidden.sum(-1)
        return square(other) + square(hidden.sin())

    return Lambda(run, one=layer()), torch.randn(32, 8)


@wild
def masks_and_scans() -> tuple[nn.Module, Any]:
    def run(s: Any, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        hidden = torch.where(keep, s.one(x), 0.5)
        other = s.one(hidden.exp()).masked_fill_(~keep, -1e4)
        return square(F.softmax(other, -1) * hidden) + hidden.masked_fill(keep, 0.0).cumsum(0).cos().mean()

    return Lambda(run, one=layer()), (torch.randn(32, 8), torch.rand(32, 8) > 0.3)


@wild
def scatters_and_einsum() -> tuple[nn.Module, Any]:
    def run(s: Any, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(s.one(x))
        room = torch.zeros(40, 8)
        room.index_put_((places,), hidden, accumulate=True)
        room[places[:3]] = hidden[:3] * 2
        mixed = torch.einsum("ij,kj->ik", room, hidden)
        return (
            square(s.one(torch.einsum("ik,kj->ij", mixed, hidden)).sin())
            + room.index_add(0, places, hidden).cos().mean()
        )

    return Lambda(run, one=layer()), (torch.randn(32, 8), torch.randperm(40)[:32])


class Fourier(nn.Module):
    """A Fourier neural operator: complex parameters, rfft and its inverse."""

    def __init__(self) -> None:
        super().__init__()
        self.modes = nn.Parameter(torch.randn(4, 4, 5, dtype=torch.cfloat) * 0.1)
        self.lift, self.drop = nn.Conv1d(1, 4, 1), nn.Conv1d(4, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.lift(x)
        for _ in range(2):
            spectrum = torch.fft.rfft(hidden)
            out = torch.zeros_like(spectrum)
            out[..., :5] = torch.einsum("bix,iox->box", spectrum[..., :5], self.modes)
            hidden = F.gelu(torch.fft.irfft(out, n=hidden.shape[-1]) + hidden)
        return square(self.drop(hidden))


@wild
def fourier_operator() -> tuple[nn.Module, Any]:
    return Fourier(), torch.randn(4, 1, 16)


@wild
def layer_drop_by_argument() -> tuple[nn.Module, Any]:
    def run(s: Any, x: torch.Tensor, keep: list[bool]) -> torch.Tensor:
        for kept, one in zip(keep, s.layers):
            x = torch.tanh(one(x)) if kept else x
        return square(x)

    return Lambda(run, layers=nn.ModuleList(layer() for _ in range(4))), (torch.randn(64, 8), [True, False, True, True])


@wild
def frozen_backbone() -> tuple[nn.Module, Any]:
    body = nn.Sequential(layer(), nn.ReLU(), layer())
    body.requires_grad_(False)
    return Lambda(
        lambda s, x: square(s.head(torch.tanh(s.body(x)))), body=body, head=nn.Sequential(layer(), nn.GELU(), layer())
    ), torch.randn(64, 8)


@wild
def double_precision() -> tuple[nn.Module, Any]:
    body = nn.Sequential(layer(), nn.Tanh(), nn.Dropout(0.1), layer()).double()
    return Lambda(lambda s, x: square(s.body(x)), body=body), torch.randn(64, 8, dtype=torch.float64)


@wild
def channels_last() -> tuple[nn.Module, Any]:
    body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(1))
    net = Lambda(lambda s, x: square(s.body(x)), body=body).to(memory_format=torch.channels_last)
    return net, torch.randn(2, 3, 12, 12).to(memory_format=torch.channels_last)


@wild
def bfloat16_parameters() -> tuple[nn.Module, Any]:
    body = nn.Sequential(layer(), nn.LayerNorm(8), nn.GELU(), nn.Dropout(0.1), layer()).bfloat16()
    return Lambda(lambda s, x: square(s.body(x).float()), body=body), torch.randn(64, 8).bfloat16()


@wild
def mixed_precisions() -> tuple[nn.Module, Any]:
    def run(s: Any, x: torch.Tensor) -> torch.Tensor:
        return square(s.head(s.norm(s.body(x.bfloat16()).float()).double()))

    return Lambda(
        run, body=nn.Sequential(layer(), nn.GELU()).bfloat16(), norm=nn.LayerNorm(8), head=layer().double()
    ), torch.randn(64, 8)


@wild
def random_of_many_kinds() -> tuple[nn.Module, Any]:
    def run(s: Any, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(s.one(x))
        hidden = F.rrelu(s.one(hidden), training=True) * torch.rand_like(hidden) + torch.randn(64, 8)
        hidden = F.gumbel_softmax(s.one(hidden)) + torch.randperm(8) + torch.bernoulli(torch.full_like(x, 0.5))
        hidden = F.feature_alpha_dropout(s.one(hidden)[None], 0.3)[0] * torch.empty(8).exponential_()
        return square(F.dropout1d(torch.sin(hidden), 0.3))

    return Lambda(run, one=layer()), torch.randn(64, 8)


class Bare(nn.Module):
    """Parameters and no submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.also = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return square(torch.tanh(x + self.shift + self.also))


@wild
def only_parameters() -> tuple[nn.Module, Any]:
    return Bare(), torch.randn(64, 8)


@wild
def own_backward() -> tuple[nn.Module, Any]:
    class Straight(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x.round()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            return grad * torch.sigmoid(x)

    return Lambda(lambda s, x: square(s.one(Straight.apply(s.one(x) * 3))), one=layer()), torch.randn(64, 8)


@wild
def own_backward_under_vmap() -> tuple[nn.Module, Any]:
    """As transformers 4 makes attention masks, and with a gradient."""

    class Twice(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x: torch.Tensor) -> torch.Tensor:
            return x.sin() * 2

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            return grad * x.cos() * 2

    return Lambda(lambda s, x: square(s.one(torch.vmap(Twice.apply)(s.one(x)))), one=layer()), torch.randn(64, 8)


@wild
def one_module_under_several_names() -> tuple[nn.Module, Any]:
    """As encoders and decoders share an embedding, whose weight is that of the head besides."""

    def run(s: Any, ids: torch.Tensor) -> torch.Tensor:
        return square(s.head(torch.tanh(s.encoder(ids)) + s.decoder(ids.flip(0))))

    shared, head = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
    head.weight = shared.weight
    encoder, decoder = nn.Sequential(shared, layer(16), nn.GELU()), nn.Sequential(shared, layer(16), nn.GELU())
    return Lambda(run, shared=shared, encoder=encoder, decoder=decoder, head=head), torch.randint(0, 50, (16, 12))


@wild
def layers_that_are_never_left_out() -> tuple[nn.Module, Any]:
    """LayerDrop that is switched off: a number is drawn, and decides nothing."""

    def run(s: Any, x: torch.Tensor) -> torch.Tensor:
        for one in s.layers:
            if torch.rand([]) < 0.0 or torch.rand(()).ge(1.0):
                continue
            x = x + torch.tanh(one(x))
        return square(F.dropout(x))

    return Lambda(run, layers=nn.ModuleList(layer() for _ in range(4))), torch.randn(64, 8)


@wild
def queries_keys_and_values_of_one_product() -> tuple[nn.Module, Any]:
    def run(s: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for one in s.layers:
            query, key, value = one(x).view(4, 16, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
            heads = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=0.1)
            x = x + heads.transpose(1, 2).reshape(4, 16, 16)
            left, right = torch.tanh(x).chunk(2, -1)
            x = x + torch.cat([right.relu(), left.flip(1)], -1)
        return square(x)

    layers = nn.ModuleList(nn.Linear(16, 48) for _ in range(3))
    return Lambda(run, layers=layers), (torch.randn(4, 16, 16), torch.randn(16, 16))


@wild
def inner_gradient() -> tuple[nn.Module, Any]:
    """A gradient penalty: forward differentiates itself."""

    def run(s: Any, x: torch.Tensor) -> torch.Tensor:
        point = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(torch.tanh(s.one(point)).sum(), point, create_graph=True)
        return square(slope)

    return Lambda(run, one=layer()), torch.randn(64, 8)


@wild
def adapters_on_a_language_model() -> tuple[nn.Module, Any]:
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=50, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lora = LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True)
        net = get_peft_model(GPT2LMHeadModel(config), lora)
    ids = torch.randint(0, 50, (2, 16))
    return net, {"input_ids": ids, "labels": ids.clone(), "use_cache": False}


def at_its_floor(net: nn.Module, sample: Any, **options: Any) -> nn.Module:
    """Planned for the smallest budget."""
    floor_bytes = memplan.explore(net, sample, costs="estimate", **options)[0].floor_bytes
    return memplan.apply(net, sample, floor_bytes, costs="estimate", **options)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
class Encoded(nn.Module):
    """Returns a tensor that it keeps in a cache, and does nothing else with it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.cache = layer(), {8: torch.arange(8.0)}

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": square(self.body(x)), "positions": self.cache[x.shape[1]]}


@wild
def a_constant_that_is_only_returned() -> tuple[nn.Module, Any]:
    return Encoded(), torch.randn(4, 8)


@pytest.mark.parametrize("name", WILD)
def test_three_steps_are_the_plain_models_bits(name: str) -> None:
    torch.manual_seed(0)
    net, sample = WILD[name]()
    net.train()
    plain = run_steps(copy.deepcopy(net), sample, 3)
    points = memplan.explore(copy.deepcopy(net), copied(sample), costs="estimate")
    floor_bytes = points[0].floor_bytes
    for limit in (floor_bytes, max(floor_bytes, int(0.6 * points[-1].baseline_peak_bytes))):
        planned = memplan.apply(copy.deepcopy(net), copied(sample), limit, costs="estimate")
        assert_same_bits(plain, run_steps(planned, copied(sample), 3))


def test_inputs_that_require_grad_get_theirs() -> None:
    torch.manual_seed(0)
    net = Lambda(lambda s, x, y: square(s.one(torch.tanh(s.one(x) * y))), one=layer())
    sample = (torch.randn(64, 8, requires_grad=True), torch.randn(64, 8, requires_grad=True))
    results = []
    for each in (net, at_its_floor(copy.deepcopy(net), sample)):
        inputs = [t.detach().clone().requires_grad_() for t in sample]
        earlier = [t * 2 for t in inputs]  # not leaves: the step is the end of a longer graph
        each(*inputs).backward()
        each(*earlier).backward()
        results.append([t.grad for t in inputs] + [p.grad for p in each.parameters()])
    assert_same_bits(*results)


def test_several_losses_summed_by_loss_fn() -> None:
    torch.manual_seed(0)
    net = Lambda(lambda s, x: (s.one(torch.tanh(s.one(x))), s.one(x)), one=layer())
    sample = torch.randn(64, 8)

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return loss_of(model(x))

    results = []
    for each, run in (
        (net, lambda m: loss_fn(m, sample)),
        (at_its_floor(copy.deepcopy(net), sample, loss_fn=loss_fn), lambda m: m(sample)),
    ):
        loss = run(each)
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in each.parameters())])
    assert_same_bits(*results)


def test_several_losses_that_are_all_returned() -> None:
    torch.manual_seed(0)
    net = Lambda(lambda s, x: (square(s.one(torch.tanh(s.one(x)))), s.one(x).abs().mean()), one=layer())
    sample = torch.randn(64, 8)
    results = []
    for each in (net, at_its_floor(copy.deepcopy(net), sample)):
        first, second = each(sample)
        (first + 0.5 * second).backward()
        results.append([first.detach(), second.detach(), *(p.grad for p in each.parameters())])
    assert_same_bits(*results)


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize("onednn", [False, True])
def test_an_lstm_is_planned_whole_with_and_without_onednn(onednn: bool) -> None:
    torch.manual_seed(0)
    net, sample = lstm()
    with torch.backends.mkldnn.flags(enabled=onednn):
        plain = run_steps(copy.deepcopy(net), sample, 3)
        planned = at_its_floor(copy.deepcopy(net), sample)
        assert isinstance(memplan.plan_of(planned), memplan.Plan)
        assert_same_bits(plain, run_steps(planned, sample, 3))


def library_models() -> dict[str, Callable[[], tuple[nn.Module, Any]]]:
    """Families beyond the zoo: what they brought up once is in their names."""
    import transformers as hf

    def convnext_with_size_one_strides() -> tuple[nn.Module, Any]:
        config = hf.ConvNextConfig(hidden_sizes=[8, 16, 32, 64], depths=[1, 1, 2, 1])
        sample = {"pixel_values": torch.randn(2, 3, 64, 64), "labels": torch.tensor([0, 1])}
        return hf.ConvNextForImageClassification(config), sample

    def segformer_with_hooks_of_its_own() -> tuple[nn.Module, Any]:
        config = hf.SegformerConfig(
            num_encoder_blocks=4,
            depths=[1, 1, 1, 1],
            hidden_sizes=[8, 16, 32, 64],
            decoder_hidden_size=32,
            num_labels=4,
        )
        sample = {"pixel_values": torch.randn(2, 3, 64, 64), "labels": torch.randint(0, 4, (2, 64, 64))}
        return hf.SegformerForSemanticSegmentation(config), sample

    def mamba() -> tuple[nn.Module, Any]:
        config = hf.MambaConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, state_size=4)
        ids = torch.randint(0, 100, (2, 20))
        return hf.MambaForCausalLM(config), {"input_ids": ids, "labels": ids.clone(), "use_cache": False}

    return {f.__name__: f for f in (convnext_with_size_one_strides, segformer_with_hooks_of_its_own, mamba)}


@pytest.mark.parametrize("name", quickly(library_models(), "convnext_with_size_one_strides"))
def test_library_models_beyond_the_zoo(name: str) -> None:
    torch.manual_seed(0)
    net, sample = library_models()[name]()
    net.train()
    plain = copy.deepcopy(net)
    planned = memplan.apply(net, sample, memplan.plan(net, sample, 1.0, costs="estimate").floor_bytes, costs="estimate")
    for steps in (2, 1):  # with an evaluation in between
        assert_same_bits(run_steps(plain, sample, steps), run_steps(planned, sample, steps))
        for model in (plain, planned):
            model.eval()
            with torch.no_grad():
                model(**sample)
            model.train()
