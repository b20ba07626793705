"""Parameters of subclasses: packed 4-bit weights beside adapters that train, and classes that change what ops do."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan import torch_private as private
from memplan.installed.planned_forward import planned_forward
from tests.support.meter import LiveMeter, storage_bytes
from tests.support.parameters import quickly
from tests.support.zoo import assert_same_bits, call, loss_of, run_steps, tensors_of

LINK = memplan.Link(25e9, 25e9)


def packed(nested: bool = False, dtype: torch.dtype = torch.float32, bits: int = 4) -> tuple[nn.Module, dict[str, Any]]:
    """A Llama with packed weights and LoRA. nested: the scales of 4-bit weights are packed too."""
    bnb, peft = pytest.importorskip("bitsandbytes"), pytest.importorskip("peft")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    net = LlamaForCausalLM(config).to(dtype)
    for path, module in list(net.model.named_modules()):
        if isinstance(module, nn.Linear):
            home, _, name = path.rpartition(".")
            layer = _in_four_bits(bnb, module, nested, dtype) if bits == 4 else _in_eight_bits(bnb, module)
            setattr(net.model.get_submodule(home), name, layer.to("cpu"))  # which packs it
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, init_lora_weights=False)
    torch.manual_seed(1)
    ids = torch.randint(0, 100, (4, 64))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = peft.get_peft_model(net, lora).train()
    return net, {"input_ids": ids, "labels": ids, "use_cache": False}


def _in_four_bits(bnb: Any, linear: nn.Linear, nested: bool, dtype: torch.dtype) -> nn.Module:
    options = {"quant_type": "nf4", "compress_statistics": nested}
    layer: nn.Module = bnb.nn.Linear4bit(
        linear.in_features, linear.out_features, bias=False, compute_dtype=dtype, **options
    )
    weight = linear.weight.detach().clone()
    layer.weight = bnb.nn.Params4bit(weight, requires_grad=False, module=layer, **options)
    return layer


def _in_eight_bits(bnb: Any, linear: nn.Linear) -> nn.Module:
    layer: nn.Module = bnb.nn.Linear8bitLt(linear.in_features, linear.out_features, bias=False, has_fp16_weights=False)
    layer.weight = bnb.nn.Int8Params(linear.weight.detach().clone(), requires_grad=False, has_fp16_weights=False)
    return layer


@pytest.mark.parametrize(
    ("nested", "dtype"), quickly(((False, torch.float32), (True, torch.bfloat16)), (True, torch.bfloat16)), ids=str
)
def test_four_bits_with_adapters_are_planned_whole(nested: bool, dtype: torch.dtype) -> None:
    (plain, sample), (net, _) = packed(nested, dtype), packed(nested, dtype)
    expected = run_steps(plain, sample)
    front = memplan.explore(net, sample, costs="estimate")
    for plan in (front[0], front[len(front) // 2]):
        net, _ = packed(nested, dtype)
        memplan.apply(net, sample, plan=plan, costs="estimate")
        assert plan.recomputed
        assert_same_bits(expected, run_steps(net, sample))


def test_packed_weights_and_their_scales_are_counted() -> None:
    net, sample = packed()
    memplan.apply(net, sample, 0.6)
    plan, planned = memplan.plan_of(net), planned_forward(net)
    assert isinstance(plan, memplan.Plan)
    assert planned is not None
    loss_of(call(net, sample)).backward()
    net.zero_grad()
    meter, residents = LiveMeter(), [*net.parameters(), *net.buffers(), *tensors_of([sample])]
    meter.register([*residents, *planned.steps[0].capture.traced.constants.values()])
    with meter:
        output = call(net, sample)
        output.loss.backward()
    assert meter.peak_bytes == plan.live_peak_bytes
    packed_bytes = storage_bytes([p for p in net.parameters() if not private.is_ordinary(p)])
    assert packed_bytes == 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128) // 2


@pytest.mark.slow
def test_other_scales_are_another_step() -> None:
    """As after a merge of adapters."""
    (plain, sample), (net, _) = packed(), packed()
    memplan.apply(net, sample, 0.8)
    for model in (plain, net):
        run_steps(model, sample, 1)
        weight = model.base_model.model.model.layers[1].mlp.up_proj.weight
        weight.quant_state = copy.copy(weight.quant_state)
        weight.quant_state.absmax = weight.quant_state.absmax * 2
    assert_same_bits(run_steps(plain, sample), run_steps(net, sample))


@pytest.mark.slow
def test_packed_weights_stay_on_the_device() -> None:
    (plain, sample), (net, _) = packed(), packed()
    low = memplan.plan(net, sample, 1.0, costs="estimate").floor_bytes
    memplan.apply(net, sample, low * 6 // 10, costs="estimate", host_budget="1GiB", link=LINK)
    plan = memplan.plan_of(net)
    assert isinstance(plan, memplan.Plan)
    fetched = {v.name for v in plan.problem.graph.values if v.fetched}
    odd = {name for name, p in net.named_parameters() if not private.is_ordinary(p)}
    assert fetched
    assert not fetched & odd
    assert_same_bits(run_steps(plain, sample), run_steps(net, sample))


def test_eight_bits_run_unplanned() -> None:
    """Their first forward moves the scales from the weight to its module, and planning runs forwards."""
    (plain, sample), (net, _) = packed(bits=8), packed(bits=8)
    memplan.apply(net, sample, 1.0, costs="estimate")
    assert memplan.plan_of(net) is None
    assert_same_bits(run_steps(plain, sample), run_steps(net, sample))


# -- other subclasses -------------------------------------------------------------------------------------------------


class Marked(nn.Parameter):
    """Of no consequence."""


class Doubling(nn.Parameter):
    """Products with it count twice."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.matmul else result


class Product(nn.Module):
    def __init__(self, kind: type[nn.Parameter], trains: bool) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(8, 16), nn.Linear(16, 8)
        self.weight = kind(torch.randn(16, 16), requires_grad=trains)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(torch.tanh(torch.matmul(torch.tanh(self.before(x)), self.weight))).pow(2).mean()


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("kind", [Marked, Doubling])
def test_what_a_class_makes_of_ops_is_left_to_it(kind: type[nn.Parameter], trains: bool) -> None:
    """Parts of the model are planned, or nothing is where it has a say."""
    torch.manual_seed(0)
    net, sample = Product(kind, trains), torch.randn(32, 8)
    plain = copy.deepcopy(net)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        memplan.apply(net, sample, 1.0, costs="estimate")
    assert isinstance(memplan.plan_of(net), memplan.Plan) == (kind is Marked)
    assert_same_bits(run_steps(plain, sample), run_steps(net, sample))
