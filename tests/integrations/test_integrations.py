"""The Trainer of transformers with MemplanCallback: a planned run is the plain run, bit for bit."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from tests.support.parameters import quickly
from tests.support.zoo import assert_same_bits, copied

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from memplan.integrations.huggingface import MemplanCallback  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
BUDGET = 0.6
TIMES = ("runtime", "per_second", "total_flos")


class Texts(torch.utils.data.Dataset[Any]):
    def __init__(self, count: int) -> None:
        self.ids = torch.randint(0, 50, (count, 24), generator=torch.Generator().manual_seed(count))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


class Watch(transformers.TrainerCallback):
    """Notes the plan of the model after each optimizer step."""

    def __init__(self) -> None:
        self.plans: list[Any] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.plans.append(memplan.plan_of(kwargs["model"]))


def language_model() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None
    )
    net = transformers.GPT2LMHeadModel(config)
    net.loss_type = "ForCausalLM"
    return net


def arguments(folder: Path, **changes: Any) -> Any:
    """Two epochs of 30 texts in batches of 8: the last one is short, and so is the last accumulation."""
    options: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "learning_rate": 1e-3,
        "warmup_steps": 2,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_steps": 2,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": 3,
    }
    return transformers.TrainingArguments(**options | changes)


def trainer_for(net: nn.Module, args: Any, *callbacks: Any) -> Any:
    trainer = transformers.Trainer(net, args, train_dataset=Texts(30), eval_dataset=Texts(5), callbacks=[*callbacks])
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def outcome(trainer: Any) -> dict[str, Any]:
    """What must be equal: every logged number that is not a time, the weights, and the generator."""
    history = [dict(sorted((k, v) for k, v in e.items() if not k.endswith(TIMES))) for e in trainer.state.log_history]
    weights = {name: copied(tensor) for name, tensor in trainer.model.state_dict().items()}
    return {"history": history, "weights": weights, "rng": torch.get_rng_state()}


def checkpoints(folder: Path) -> dict[str, Any]:
    """Weights as bytes, optimizers and schedules loaded."""
    found: dict[str, Any] = {}
    for path in sorted(folder.glob("checkpoint-*/*")):
        name = str(path.relative_to(folder))
        if path.name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
            found[name] = torch.load(path, weights_only=False)
        elif path.name in ("model.safetensors", "config.json"):
            found[name] = path.read_bytes()
    assert len(found) >= 10
    for name, content in found.items():
        if name.endswith("rng_state.pth"):
            found[name] = content["cpu"]
    return found


KINDS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"bf16": True},
    "loss-outside": {"label_smoothing_factor": 0.1},
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Any]]:
    """(outcome, checkpoints) of the plain run of a kind."""
    known: dict[str, tuple[Any, Any]] = {}

    def run(kind: str) -> tuple[Any, Any]:
        if kind not in known:
            folder = tmp_path_factory.mktemp(kind)
            trainer = trainer_for(language_model(), arguments(folder, **KINDS[kind]))
            trainer.train()
            known[kind] = outcome(trainer), checkpoints(folder)
        return known[kind]

    return run


@pytest.mark.parametrize("kind", quickly(KINDS, "bfloat16"))
def test_a_planned_run_is_the_plain_run(kind: str, plain: Any, tmp_path: Path) -> None:
    """Accumulation, short last batches, evaluation and checkpoints on the way."""
    expected = plain(kind)
    callback, watch = MemplanCallback(BUDGET, costs="estimate"), Watch()
    trainer = trainer_for(language_model(), arguments(tmp_path, **KINDS[kind]), callback, watch)
    trainer.train()
    assert_same_bits(expected, (outcome(trainer), checkpoints(tmp_path)))
    assert len(watch.plans) == 4
    for plan in watch.plans:
        assert plan is not None
        assert plan.peak_bytes <= plan.problem.budget_bytes
        assert plan.problem.accumulate
    assert watch.plans[0].recomputed
    assert callback.plan is watch.plans[-1]
    assert memplan.plan_of(trainer.model) is None, "the plan is taken off when training ends"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_resuming_from_a_checkpoint(kind: str, plain: Any, tmp_path: Path) -> None:
    """Stopped in the middle and resumed on a fresh model, both parts planned."""

    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 3

    first = trainer_for(
        language_model(), arguments(tmp_path, **KINDS[kind]), MemplanCallback(BUDGET, costs="estimate"), Stop()
    )
    first.train()
    watch = Watch()
    net = language_model()
    second = trainer_for(net, arguments(tmp_path, **KINDS[kind]), MemplanCallback(BUDGET, costs="estimate"), watch)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert len(watch.plans) == 2
    assert watch.plans[0].recomputed
    expected, result = dict(plain(kind)[0]), outcome(second)
    for each in (expected, result):  # the last entry has the mean loss of the steps that this run made
        each["history"] = each["history"][:-1]
    assert_same_bits(expected, result)


def test_training_again_and_after_an_interruption(tmp_path: Path) -> None:
    class Interrupt(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                raise KeyboardInterrupt

    results = []
    for callbacks in ([], [MemplanCallback(BUDGET, costs="estimate")]):
        args = arguments(tmp_path, bf16=True, eval_strategy="no", save_strategy="no", num_train_epochs=1)
        trainer = trainer_for(language_model(), args, *callbacks)
        interrupt = Interrupt()
        trainer.add_callback(interrupt)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        trainer.remove_callback(interrupt)
        for _ in range(2):
            trainer.train()
            results.append(outcome(trainer))
    assert_same_bits(results[:2], results[2:])
    assert memplan.plan_of(trainer.model) is None


def test_one_line_of_the_plan_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "memplan")
    args = arguments(tmp_path, max_steps=2, eval_strategy="no", save_strategy="no")
    trainer = trainer_for(language_model(), args, MemplanCallback(BUDGET, costs="estimate", on_mismatch="replan"))
    assert trainer.train().global_step == 2
    (line,) = [r.message for r in caplog.records if "planned in" in r.message]
    assert line.startswith("peak ")


def test_gradient_checkpointing_is_switched_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also where the model has it on already, with what that had made its inputs require."""
    results = []
    for planned in (False, True):
        args = arguments(
            tmp_path, max_steps=2, eval_strategy="no", save_strategy="no", gradient_accumulation_steps=1,
            activation_checkpointing=True,
        )  # fmt: skip
        net: Any = language_model()
        net.activation_checkpointing_enable()
        net.enable_input_require_grads()
        trainer = trainer_for(net, args, *([MemplanCallback(BUDGET, costs="estimate")] if planned else []))
        trainer.train()
        results.append(outcome(trainer))
    assert_same_bits(*results)
    assert not any(getattr(m, "gradient_checkpointing", False) for m in net.modules())
    told = [r.message for r in caplog.records if "gradient checkpointing is switched off" in r.message]
    assert len(told) == 1


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # of PEFT itself
@pytest.mark.parametrize("checkpointing", quickly((False, True), True))
def test_adapters(checkpointing: bool, tmp_path: Path) -> None:
    """Of PEFT, with which gradient checkpointing has inputs require grad."""
    peft = pytest.importorskip("peft")
    results = []
    for planned in (False, True):
        config = peft.LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True)
        torch.manual_seed(0)
        net: Any = peft.get_peft_model(language_model(), config)
        args = arguments(
            tmp_path, max_steps=4, eval_strategy="no", save_strategy="no", activation_checkpointing=checkpointing
        )
        callback = MemplanCallback(BUDGET, costs="estimate")
        trainer = trainer_for(net, args, *([callback] if planned else []))
        trainer.train()
        results.append(outcome(trainer))
    assert_same_bits(*results)
    assert isinstance(callback.plan, memplan.Plan)


def test_the_trainers_optimizer_is_counted(tmp_path: Path) -> None:
    plans = []
    for count in (False, None):
        args = arguments(tmp_path, max_steps=1, eval_strategy="no", save_strategy="no")
        callback = MemplanCallback(1.0, costs="estimate", count_optimizer=count)
        trainer_for(language_model(), args, callback).train()
        plans.append(callback.plan)
    parameters_bytes = sum(p.numel() * p.element_size() for p in language_model().parameters())
    assert plans[1].problem.resident_bytes - plans[0].problem.resident_bytes >= 2 * parameters_bytes


def test_an_optimizer_that_nobody_knows_is_not_counted_unasked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step()

    net = language_model()
    args = arguments(tmp_path, max_steps=1, eval_strategy="no", save_strategy="no")
    optimizers = (Own(net.parameters(), lr=0.1, momentum=0.9), None)
    callback = MemplanCallback(1.0, costs="estimate")
    trainer = transformers.Trainer(net, args, train_dataset=Texts(30), callbacks=[callback], optimizers=optimizers)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    assert "the state of Own is not in the budget" in caplog.text
    assert callback.plan.problem.extra_resident_bytes == 0


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.filterwarnings("ignore")  # of what transformers sets up for compiling
def test_compiled_training_is_refused(late: bool, tmp_path: Path) -> None:
    args, callback = arguments(tmp_path, torch_compile=True), MemplanCallback(BUDGET)
    words = "Set torch_compile=False"
    if not late:
        with pytest.raises(ValueError, match=words):
            trainer_for(language_model(), args, callback)
        return
    trainer = trainer_for(language_model(), args)
    trainer.add_callback(callback)
    with pytest.raises(ValueError, match=words):
        trainer.train()
    assert memplan.plan_of(trainer.model) is None


def test_deepspeed_has_a_callback_of_its_own(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    args.deepspeed = {"zero_optimization": {"stage": 1}}
    with pytest.raises(ValueError, match="MemplanDeepSpeedCallback"):
        MemplanCallback(BUDGET).on_init_end(args, transformers.TrainerState(), transformers.TrainerControl())


@pytest.mark.parametrize("sharding", [{"version": 1}, {"version": 2, "xla": True}])
def test_sharding_by_other_engines_than_fsdp2_is_refused(sharding: dict[str, Any], tmp_path: Path) -> None:
    """tests/ranks/cells_fsdp_loops.py trains with FSDP2."""
    args = arguments(tmp_path)
    args.fsdp, args.fsdp_config = True, sharding
    with pytest.raises(ValueError, match="Set fsdp_config="):
        MemplanCallback(BUDGET).on_init_end(args, transformers.TrainerState(), transformers.TrainerControl())


@pytest.mark.parametrize("name", ["sample", "plan", "optimizer", "loss_fn"])
def test_keywords_that_the_trainer_answers_for_are_refused(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        MemplanCallback(BUDGET, **{name: None})


def test_a_model_that_does_not_fit_is_marked_until_it_trains(tmp_path: Path) -> None:
    """tests/runtime/test_offload_gpu.py trains with it."""
    with pytest.raises(ValueError, match="host_budget"):
        MemplanCallback(BUDGET, model=language_model())
    model, before = language_model(), {"": "cpu"}
    for model.hf_device_map in (None, before):
        callback = MemplanCallback(BUDGET, host_budget="1GiB", model=model, device="cuda:1")
        places = model.hf_device_map
        assert len(places) > 1 and set(places.values()) == {"cuda:1"}
        args, state = arguments(tmp_path), transformers.TrainerState()
        with pytest.raises(ValueError, match="no CUDA device here"):
            callback.on_train_begin(args, state, transformers.TrainerControl(), model=model)
    assert model.hf_device_map is before


@pytest.mark.slow
@pytest.mark.parametrize("name", ["finetune_hf.py", "offload_finetune.py"])
def test_the_examples(name: str) -> None:
    command = [sys.executable, str(ROOT / "examples" / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "same numbers" in done.stdout
