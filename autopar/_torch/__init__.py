"""The only package that uses private APIs of torch and that distinguishes kinds of devices.

tests/_torch has a test of each.
"""

from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from autopar._torch.arithmetic import Float64Arithmetic, RandomLastBits, cast_in_any_arithmetic, widened_dtype
from autopar._torch.attention import (
    FLEX_DEVICES,
    LookupsByTensors,
    block_mask,
    blocks_agree,
    flex_attention,
    flex_attention_by,
    flex_attention_by_definition,
    fused_attention,
    fused_attention_backward,
    has_fused_attention,
)
from autopar._torch.autograd import (
    Apply,
    GradientFlags,
    alike_check,
    applying_functions_by,
    backward_hooks_of,
    below_autograd,
    call_before_accumulation,
    ending_transforms,
    forward_of_running_node,
    gradient_flags,
    handed_on,
    has_backward_hooks,
    in_functorch_transform,
    is_saved_by_autograd,
    noting_forward,
    outside_functorch_transforms,
    outside_of_traces,
    run_node,
    saved_tensor_hooks,
    traced_ops,
)
from autopar._torch.bindings import BINDINGS
from autopar._torch.checkpointing import is_checkpointed, plain_checkpoints, saving_nothing
from autopar._torch.compiling import (
    cached_calls,
    compile_graph,
    computes_complex,
    dynamo_source,
    guard_hooks,
    is_functional,
    missing_cpp_compiler,
    on_second_derivative,
    own_generators,
    quiet_fake_failures,
    trace_recurrent_layers,
    traced_code,
    traced_modules,
    uncompiled,
    watch_cached_calls,
)
from autopar._torch.contexts import quiet_torchao, replaced
from autopar._torch.devices import (
    CPU,
    accelerator_count,
    accelerator_kind,
    accelerator_of_rank,
    autocast_dtype,
    autocast_kinds,
    backend_in_use,
    backend_of,
    backends_of,
    catalogue_name,
    copy_to_host,
    current_device,
    device_copy,
    device_model,
    forked_random_state,
    has_used_accelerator,
    host_copies,
    host_copy,
    identity_of,
    is_accelerator,
    peak_allocated_bytes,
    random_states,
    synchronize,
    use_device,
    uses_nccl,
    uses_own_backend,
    without_autocast,
)
from autopar._torch.dicts import DictVersions
from autopar._torch.distributed.dtensors import (
    accumulate_gradient,
    differentiable_local,
    dtensor,
    lines_along,
    local_addresses,
    local_gradient,
    local_of,
    local_tensor,
    parameter_of,
    parts_of,
    ranks_of,
    replicates_implicitly,
    set_local_tensor,
    warn_once_of_redistribution,
)
from autopar._torch.distributed.elsewhere import Elsewhere, elsewhere, entries_here, is_elsewhere
from autopar._torch.distributed.groups import (
    all_gather,
    all_reduce,
    all_to_all,
    broke_in_communication,
    default_store,
    exchange_rows,
    flight_record,
    group_for,
    group_seconds,
    reduce_scatter,
    resolve_group,
    runs_at_once,
    set_group_timeout,
    start_all_gather,
    start_all_reduce,
    start_all_to_all,
    start_exchange_rows,
    start_reduce_scatter,
    store_host,
    store_seconds,
    wait_for_all,
    waiting_longer,
)
from autopar._torch.distributed.optimizers import cut_loaded_states, share_overflows, update_by_shards
from autopar._torch.distributed.owned import Owned, copied, cut_like, owned_as, whole_of
from autopar._torch.distributed.plain_ways import detect_anomalies, treat_as_plain
from autopar._torch.distributed.random_fills import draw_whole_on_processors
from autopar._torch.distributed.stage_meshes import StageMesh, is_of_stage
from autopar._torch.distributed.whole_operands import cut_whole_operands
from autopar._torch.exporting import (
    VALUES_READ,
    DependsOnValues,
    SizeDependsOnValues,
    as_if_compiling,
    call_with,
    fake_mode,
    is_transformed,
    quiet_export,
    stand_ins,
    user_line,
    validates_distribution,
    without_value_checks,
    without_values,
)
from autopar._torch.files import make_states_by, map_file
from autopar._torch.limits import AskedLimits
from autopar._torch.modules import BatchNormBase, DropoutBase, hooks_of_all_modules, is_computing, modes_above, switches
from autopar._torch.operators import (
    argument_names,
    autopar_op,
    decomposition_of,
    is_torchs_operator,
    multiplies_tiles,
    operator_named,
    product_of_tiles,
    required_arguments,
    schema,
)
from autopar._torch.parts import for_a_file, has_shards, is_part, refuse_parts, unchecked
from autopar._torch.product_nodes import operand_gradients
from autopar._torch.shortcuts import code_when_called, quick_decompositions, quick_examples, quick_notes
from autopar._torch.symbol_text import ReadSizes, write_size, write_sizes
from autopar._torch.symbols import SYMBOLIC, OtherSizes, SizeValues, depends_on_values, keeping_sizes_open
from autopar._torch.tensors import (
    example_tensor,
    has_storage,
    has_values,
    own_gradients,
    storage_key,
    storage_reference,
    without_memory,
)
