"""Every use of a private PyTorch or transformers name, by subject, each with its purpose.

When a new release moves something, this is the folder to mend. Other folders write `private.NAME`.
"""

from memplan.torch_private.autograd import (
    also_arrives_otherwise, backward_in_progress, backward_keeps_graph, engine_reaches, formulas_of_op,
    function_that_failed, functions_applied_by, run_backward, versions_kept, without_accumulators,
)  # fmt: skip
from memplan.torch_private.devices import (
    BlockRecord, MemoryPool, MemoryRecord, attention_order, blas_workspace_bytes, can_expand_segments, expand_segments,
    float32_precisions, is_captured, is_out_of_memory, keep_busy, kept_by_blas, pytorch_allocates, requested_bytes,
    reserved_before, segments_expand, unallocated_bytes, user_records_blocks, wait_for_scaler_copies,
)  # fmt: skip
from memplan.torch_private.distributed import (
    as_returned, completed, gloo_group, is_hook_of_dtensors, is_of_dtensors, is_sharded, is_timeout, is_wait,
    parallel_contexts, part_here, ranks_of, reduces_on_cpu, spec_of, wait_for, waits_end_within, with_spec,
)  # fmt: skip
from memplan.torch_private.exchanged import exchanged, made_errors
from memplan.torch_private.fsdp import FsdpUnit, is_hook_of_unit, tracing_units, units_of
from memplan.torch_private.hooks import (
    HOOK_TABLES, SwitchedOff, called, called_module, calls_instead, collects, collects_outputs, compiled_call,
    everything_saved, exchanges_saved_tensors, foreign_hooks, global_hook_tables, hooks_on,
    parametrizations_are_cached, step_without_hooks, waits_for_others, without_checkpoints, without_saved_tensor_hooks,
)  # fmt: skip
from memplan.torch_private.inductor import (
    CompiledCall, MemoryLayout, compiled_backward_repeats, compiled_graph, deterministic_options, functional_trace,
    inductor_cache_dir, keeps_to_seed, missing_compiler, seed_ops,
)  # fmt: skip
from memplan.torch_private.modes import (
    HigherOrderOperator, InPlaceOf, RealOps, TorchDispatchMode, autocast_knows, function_modes, run_in_mode,
    with_function_modes, without_autocast, without_function_modes, without_modes,
)  # fmt: skip
from memplan.torch_private.symbols import (
    FixedSize, Symbols, evaluator, fake_like, is_symbolic, key_of_size, meta_memory, meta_within, named_anew,
    number_here, text_of_node, varies,
)  # fmt: skip
from memplan.torch_private.tensors import (
    FakeTensor, FakeTensorMode, OpOverload, alike, are_ordinary, attributes_set_on, batch_norm_reserve_elements,
    changes_ops, ctc_loss, depends_on_data, has_shape_of_data, has_symbolic_shape, is_allocated,
    is_held_elsewhere, is_ordinary, is_same_generator, is_transformed, known_storage, nn_functions, plain, pytree,
    stepped_as_real, suggest_memory_format, sum_of_weights,
)  # fmt: skip
from memplan.torch_private.tracing import (
    DATA_DEPENDENT_ERRORS, READ_DEVICE, READ_SCALAR, TRACING, Recording, beneath_compiled, boxed, compiled_aside,
    higher_order_ops_refused, is_call_of_compiled_code, is_compiled, leave_out, not_tracing_for_transformers,
    numbers_read_by_ops, outside_of_tracing, runs_compiled, seeding_refused, someone_traces, trace_with_fakes,
    tracer_constants, tracer_graph, tracer_node, uncompiled, with_layout,
)  # fmt: skip
