"""Blocks as torch.compile makes them: the program that its compiler writes for a block is run on fake tensors.

AOTAutograd traces a block's forward and backward, its min-cut partitioner decides what is kept for backward and what is
computed again, and Inductor decides which operators become one kernel, which results never reach memory, and when a
buffer is freed or taken over by another. Inductor's program allocates and frees tensors and calls kernels; here its
tensors are fake, and a fused kernel is an operator that computes nothing. No C++ or Triton compiler is called.

Inductor plans for a CPU, whatever the device: its plan for a GPU can only be made where Triton is. The partitioner is
the same for both.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import fx, nn
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._prims import rng_prims
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import _symmetric_memory as symmetric_memory
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import (
    _disable_current_modes,
    is_traceable_wrapper_subclass,
    transform_subclass,
)
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from bench.models.blocks import list_compiled_parts
from bench.models.pretrained_modules import describe_block
from bench.prediction.trace.device_operators import run_attention_backward
from bench.prediction.trace.fake_tensors import TracingFakeTensorMode
from bench.prediction.trace.overlapped_products import OVERLAPPED_PRODUCTS
from bench.strategies.tensor_parallel.dtensors import build_dtensor
from bench.strategies.tensor_parallel.split import TensorParallelSplit

FUSED_OPERATOR = "fused"
"""Name of a kernel that the compiler wrote."""

IN_PLACE_POINTER_NAME_PART = "in_out_ptr"
"""In the names of parameters of a kernel that it reads and then writes."""

RNG_STATE_BYTES = torch.default_generator.get_state().nbytes
"""What an operator that may draw random numbers keeps for when it is computed again."""

REPLACED_OPERATORS = {
    "torch.ops.higher_order.run_and_save_rng_state": "run_and_save_rng_state",
    "torch.ops.higher_order.run_with_rng_state": "run_with_rng_state",
    "torch.ops.bench.attention_backward.default": "attention_backward",
    **{f"torch.ops.symm_mem.{name}.default": name for name in OVERLAPPED_PRODUCTS},
}
"""Operators of a program for which functions of this module are called: the compiler leaves out buffers of attention
that nothing reads, fake tensors have no state of random numbers, and symmetric memory is no part of a trace."""

for random_operator in (rng_prims.run_and_save_rng_state, rng_prims.run_with_rng_state):  # torch looks modes up by type
    random_operator.py_impl(TracingFakeTensorMode)(random_operator.python_key_table[FakeTensorMode])

TENSOR_PLACE = object()
"""Stands where a call has a tensor: a program that remembered the tensor would keep its memory."""

Program = Callable[[list[Any]], Any]
"""Takes its inputs in a list, which it empties, and returns its results."""

CompiledPart = Callable[[list[torch.Tensor]], Any]
"""Takes the parameters and buffers of one of equal parts of blocks, and the tensors that it is called with."""

_graph_numbers = itertools.count()
"""What tells a checkpointed block's operators from another's."""

torch.library.define(f"bench::{FUSED_OPERATOR}", "(Tensor[] operands, Tensor(a!)[] results) -> ()")


@torch.library.register_fake(f"bench::{FUSED_OPERATOR}")
def _(operands: list[torch.Tensor], results: list[torch.Tensor]) -> None:
    """Computes nothing."""


if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm.out", "Meta"):
    # Without one, fake tensors have torch compute it, on tensors of full size.
    @torch.library.impl("aten::_scaled_mm.out", "Meta")
    def _(*_: Any, out: torch.Tensor, **__: Any) -> torch.Tensor:
        return out


def compile_blocks(
    block_lists: Iterable[Iterable[nn.Module]], model: nn.Module, split: TensorParallelSplit | None
) -> None:
    """Give each block of a model, after it was checkpointed, the forward and backward that ``compile()`` gives it, or
    gives its parts where ranks share the model so that torch compiles these alone.

    They are compiled when they are first called, for the shapes of that call.
    """
    overlaps_products = split is not None and split.overlaps_products
    graph_breaks = () if split is None else split.find_graph_breaks(model)
    compiled_parts: dict[Any, CompiledPart] = {}
    for blocks in block_lists:
        for block in blocks:
            for part in list_compiled_parts(block, graph_breaks):
                part.forward = _CompiledForward(part, compiled_parts, overlaps_products)


def compile_module(module: nn.Module) -> None:
    """Give a module that is no block, and in no list of them, what ``compile()`` gives it."""
    module.forward = _CompiledForward(module, {}, overlaps_products=False)


def find_compiled_part(block: nn.Module, layer: nn.Module) -> nn.Module | None:
    """The compiled part of a block that a layer of it is in, or is; None where it runs as it is."""
    parts = (module for module in block.modules() if isinstance(module.forward, _CompiledForward))
    return next((part for part in parts if layer in part.modules()), None)


class _CompiledForward:
    """The forward of a block."""

    def __init__(self, block: nn.Module, compiled_parts: dict[Any, CompiledPart], overlaps_products: bool) -> None:
        self._description = _describe_part(block)
        self._body = block._checkpoint_wrapped_module if isinstance(block, CheckpointWrapper) else block
        self._run_body = (
            _build_checkpointed_forward(block) if isinstance(block, CheckpointWrapper) else _take_hooks(block)
        )
        self._compiled_parts = compiled_parts
        self._overlaps_products = overlaps_products
        self._compiled: CompiledPart | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        values, structure = pytree.tree_flatten((args, kwargs))
        state = dict(itertools.chain(self._body.named_parameters(), self._body.named_buffers()))
        tensors = [*state.values(), *(value for value in values if isinstance(value, torch.Tensor))]
        if self._compiled is None:
            values = [TENSOR_PLACE if isinstance(value, torch.Tensor) else value for value in values]
            key = (self._description, _describe_call(values, structure, tensors))
            if key not in self._compiled_parts:
                self._compiled_parts[key] = self._compile(list(state), values, structure, tensors)
            self._compiled = self._compiled_parts[key]
        return self._compiled(tensors)

    def _compile(
        self, state_names: list[str], values: list[Any], structure: pytree.TreeSpec, tensors: list[torch.Tensor]
    ) -> CompiledPart:
        from torch._functorch.aot_autograd import aot_function
        from torch._inductor.compile_fx import partition_fn
        from torch._inductor.decomposition import select_decomp_table
        from torch._inductor.virtualized import V

        def run_block(tensors: list[torch.Tensor]) -> list[Any]:
            inputs = iter(tensors[len(state_names) :])
            call_values = [next(inputs) if value is TENSOR_PLACE else value for value in values]
            args, kwargs = pytree.tree_unflatten(call_values, structure)
            with _reparametrize_module(self._body, dict(zip(state_names, tensors, strict=False))):
                leaves, output_structure = pytree.tree_flatten(self._run_body(*args, **kwargs))
            input_numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
            returned_inputs = [input_numbers.get(id(leaf)) for leaf in leaves]
            specs = [leaf._spec if makes_dtensors and isinstance(leaf, DTensor) else None for leaf in leaves]
            outputs.append((returned_inputs, specs, output_structure))
            leaves = [leaf if spec is None else leaf.to_local() for leaf, spec in zip(leaves, specs, strict=True)]
            return [leaf for leaf, number in zip(leaves, returned_inputs, strict=True) if number is None]

        # AOTAutograd takes the mesh of a DTensor that it returns from one that goes in: else it returns a rank's part.
        makes_dtensors = not any(isinstance(tensor, DTensor) for tensor in tensors)
        outputs: list[tuple[list[int | None], list[DTensorSpec | None], pytree.TreeSpec]] = []
        compiled: Callable[..., Any] = aot_function(
            run_block,
            fw_compiler=functools.partial(_build_program, is_backward=False, overlaps_products=self._overlaps_products),
            bw_compiler=functools.partial(_build_program, is_backward=True, overlaps_products=self._overlaps_products),
            partition_fn=partition_fn,
            decompositions=select_decomp_table(),
        )
        fake_mode = detect_fake_mode(tensors)
        assert fake_mode is not None
        with (
            _disable_current_modes(),
            fake_mode,
            tracing(TracingContext(fake_mode)),
            V.set_fake_mode(fake_mode),  # that random numbers are replaced with
            mock.patch.object(torch, "get_rng_state", torch.random.get_rng_state),  # which a trace on a CPU follows
            saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),  # not those of checkpointing around it
        ):
            _run_once(compiled, tensors)
        returned_inputs, specs, output_structure = outputs[0]

        def run_compiled(tensors: list[torch.Tensor]) -> Any:
            """What the block returns as it got it is no output of the program: no gradient is added up in there."""
            results = iter(compiled(tensors))
            leaves = [next(results) if number is None else tensors[number] for number in returned_inputs]
            leaves = [
                leaf if spec is None else build_dtensor(leaf, spec) for leaf, spec in zip(leaves, specs, strict=True)
            ]
            return pytree.tree_unflatten(leaves, output_structure)

        return run_compiled


def _describe_part(part: nn.Module) -> str:
    """What decides about the operators that a part of a block runs: of blocks that repeat it is the same."""
    hooks = [
        [getattr(hook, "__qualname__", type(hook).__name__) for hook in (*before.values(), *after.values())]
        for before, after in ((module._forward_pre_hooks, module._forward_hooks) for module in part.modules())
    ]
    return f"{describe_block(part)} {hooks}"


def _describe_call(values: Sequence[Any], structure: pytree.TreeSpec, tensors: Sequence[torch.Tensor]) -> str:
    """What is compiled for: of tensors how they lie in memory, where they are divided, and which are the same one."""
    numbers = {id(tensor): number for number, tensor in reversed(list(enumerate(tensors)))}
    places = [
        (
            str(getattr(tensor, "_spec", type(tensor).__name__)),
            tuple(tensor.shape),
            tensor.stride(),
            str(tensor.dtype),
            tensor.requires_grad,
            numbers[id(tensor)],
        )
        for tensor in tensors
    ]
    return f"{values} {structure} {places}"


def _take_hooks(module: nn.Module) -> nn.Module:
    """A module that is called with the hooks that another has now, which the compiler takes in (those that divide
    what goes into a layer and comes out of it); hooks that are registered later are called around it."""
    hooked = type(module).__new__(type(module))
    vars(hooked).update(vars(module))  # copy.copy refuses modules whose parameters are computed (`localize_parameters`)
    for name in (
        "_forward_pre_hooks",
        "_forward_pre_hooks_with_kwargs",
        "_forward_hooks",
        "_forward_hooks_with_kwargs",
    ):
        setattr(module, name, OrderedDict())
    return hooked


def _build_checkpointed_forward(block: CheckpointWrapper) -> Callable[..., Any]:
    """The forward of a checkpointed block for the compiler: operators are marked with what is to become of them, as by
    ``torch._higher_order_ops.wrap.tag_activation_checkpoint``."""
    make_contexts = block.checkpoint_fn.keywords.get("context_fn") or (
        lambda: create_selective_checkpoint_contexts(_prefer_recomputing)
    )
    graph_number = next(_graph_numbers)
    body = _take_hooks(block._checkpoint_wrapped_module)

    def make_numbered_contexts() -> tuple[Any, Any]:
        forward_context, recomputation_context = make_contexts()
        forward_context.ac_graph_id = graph_number
        return forward_context, recomputation_context

    def run_checkpointed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(
            body,
            *args,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=make_numbered_contexts,
            early_stop=False,
            **kwargs,
        )

    return run_checkpointed


def _prefer_recomputing(_context: Any, _operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


def _run_once(compiled: Callable[..., Any], tensors: list[torch.Tensor]) -> None:
    """Forward and backward, which compiles both: of other tensors, since graphs remember theirs."""
    inputs = [_build_like(tensor).requires_grad_(tensor.requires_grad) for tensor in tensors]
    outputs = [output for output in pytree.tree_leaves(compiled(inputs)) if isinstance(output, torch.Tensor)]
    differentiable_outputs = [output for output in outputs if output.requires_grad]
    differentiable_inputs = [tensor for tensor in inputs if tensor.requires_grad]
    if differentiable_outputs:
        gradients = [torch.empty_like(output) for output in differentiable_outputs]
        torch.autograd.grad(differentiable_outputs, differentiable_inputs, gradients, allow_unused=True)


def _build_like(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that lies in memory as another does, and is wrapped alike: a DTensor, its part in FP8, or both."""
    if is_traceable_wrapper_subclass(tensor):

        def build_part(_: str, part: Any) -> Any:
            return _build_like(part) if isinstance(part, torch.Tensor) else part  # a DTensor has its mesh, too

        alike: torch.Tensor = transform_subclass(tensor, build_part)
        return alike.detach()
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _build_program(
    graph: fx.GraphModule, inputs: Sequence[Any], *, is_backward: bool, overlaps_products: bool
) -> Program:
    """Inductor's program for a graph, as `torch._inductor.compile_fx` has it written."""
    from torch._inductor import config, cpu_vec_isa
    from torch._inductor.compile_fx import _recursive_post_grad_passes, fake_tensor_prop, view_to_reshape
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    # Where there is nothing to overlap torch would warn of it.
    overlaps_products = overlaps_products and _has_collectives(graph)
    view_to_reshape(graph)
    with torch.no_grad():
        fake_mode = fake_tensor_prop(graph, inputs)
    with contextlib.ExitStack() as stack:
        stack.enter_context(unset_fake_temporarily())
        stack.enter_context(config.patch(_micro_pipeline_tp=overlaps_products))
        # The function, which remembers its answer, and not `cpp.vec_isa_ok`: what this process compiles later for its
        # CPU has vector instructions.
        stack.enter_context(mock.patch.object(cpu_vec_isa, "valid_vec_isa_list", return_value=[]))
        if overlaps_products:  # as where torch has NCCL, in whose absence it leaves products alone
            stack.enter_context(symmetric_memory._test_mode())
            stack.enter_context(mock.patch.object(dist, "is_nccl_available", return_value=True))
        stack.enter_context(V.set_fake_mode(fake_mode))
        _recursive_post_grad_passes(graph, is_inference=False)
        lowering = GraphLowering(graph, example_inputs=inputs, is_backward=is_backward)
        for context in (DebugContext(), V.set_graph_handler(lowering), V.set_extern_kernel_nodes([])):
            stack.enter_context(context)
        lowering.run(*inputs)
        _report_output_strides(lowering)
        source = lowering.codegen()[0].value
    return _load_program(source, lowering.constants)


def _has_collectives(graph: fx.GraphModule) -> bool:
    return any(getattr(node.target, "namespace", None) == "_c10d_functional" for node in graph.graph.nodes)


def _report_output_strides(lowering: Any) -> None:
    """Tell AOTAutograd how the forward's results lie in memory, which the backward is compiled for."""
    context = TracingContext.try_get()
    if context is not None and context.output_strides is not None:
        context.output_strides += [
            tuple(int(stride) for stride in output.get_layout().stride) if output.has_tensor_output() else None
            for output in lowering.graph_outputs
        ]


def _load_program(source: str, constants: dict[str, torch.Tensor]) -> Program:
    """Make the text a function, whose tensors are fake and whose fused kernels are operators."""
    from torch._inductor.async_compile import AsyncCompile

    namespace: dict[str, Any] = {"__name__": "compiled_block"}
    with (
        mock.patch.object(
            AsyncCompile, "cpp_pybinding", lambda self, types, source: _build_fused_kernel(types, source)
        ),
        mock.patch.object(AsyncCompile, "wait"),
    ):
        for operator, name in REPLACED_OPERATORS.items():
            source = source.replace(operator, name)
        exec(compile(source, "<compiled block>", "exec"), namespace)
    namespace |= {
        **constants,
        "empty_strided_cpu": lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype),
        "reinterpret_tensor": lambda tensor, size, stride, offset: torch.as_strided(
            tensor, size, stride, tensor.storage_offset() + offset
        ),
        "assert_size_stride": lambda *_: None,
        "assert_alignment": lambda *_: None,
        "run_and_save_rng_state": lambda operator, *args, **kwargs: (
            torch.empty(RNG_STATE_BYTES, dtype=torch.uint8),
            operator(*args, **kwargs),
        ),
        "attention_backward": lambda *args, **kwargs: run_attention_backward(*args, **kwargs)[0],
        **OVERLAPPED_PRODUCTS,
        "run_with_rng_state": lambda _state, operator, *args, **kwargs: operator(*args, **kwargs),
    }
    program: Program = namespace["call"]

    def run_program(inputs: list[Any]) -> Any:
        return program(inputs)

    run_program._boxed_call = True  # type: ignore[attr-defined]
    return run_program


def _build_fused_kernel(parameter_types: list[str], source: str) -> Callable[..., None]:
    """A kernel whose parameters are of these C++ types: what is not const is written."""
    parameters = re.search(r"kernel\((.*?)\)", source, re.DOTALL)
    assert parameters is not None
    names = [parameter.split()[-1] for parameter in parameters[1].split(",")]
    is_read = [
        kind.startswith("const") or IN_PLACE_POINTER_NAME_PART in name
        for kind, name in zip(parameter_types, names, strict=True)
    ]
    is_written = [not kind.startswith("const") for kind in parameter_types]

    def run_kernel(*arguments: Any) -> None:
        torch.ops.bench.fused(
            [value for value, read in zip(arguments, is_read, strict=True) if read],
            [value for value, written in zip(arguments, is_written, strict=True) if written],
        )

    return run_kernel
