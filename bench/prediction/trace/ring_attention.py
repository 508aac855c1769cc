"""Ring attention in a trace: on a device's operators, with what is sent noted to go on until it is waited for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_ring

from bench.prediction.trace.device_operators import run_attention_backward
from bench.prediction.trace.op_recorder import OpRecorder
from bench.prediction.trace.trace import TraceKey
from bench.strategies.mesh import context


@contextlib.contextmanager
def trace_ring_attention(key: TraceKey, op_recorder: OpRecorder) -> Iterator[None]:
    """Within, attention over divided sequences runs as it does on a device.

    Functional collectives are waited for at once where tensors are fake; torch's template says where a real run does.
    """
    if key.split is None or key.split.context_degree == 1:
        yield
        return
    maybe_wait = torch_ring._maybe_wait

    def note_wait(tensor: torch.Tensor) -> torch.Tensor:
        op_recorder.note_wait(tensor)
        return maybe_wait(tensor)

    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(torch_ring, "_maybe_wait", note_wait))
        if key.device == "cuda":
            patches.enter_context(mock.patch.object(context, "choose_operators", _choose_operators))
        yield


def _choose_operators(query: Any) -> tuple[Any, Any]:
    """No mock stands here: it would keep the queries."""
    return _attend, _attend_backward


def _attend(mesh: DeviceMesh, query: Any, key: Any, value: Any, scale: float | None) -> Any:
    """As a fused kernel of CUDA devices."""
    return torch_ring._templated_ring_attention(
        mesh.get_group(), context.SEQUENCE_DIM, _run_forward, query, key, value, is_causal=True
    )


def _attend_backward(
    mesh: DeviceMesh, grad: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, rest: Any, scale: Any
) -> Any:
    return torch_ring._templated_ring_attention_backward(
        mesh.get_group(),
        context.SEQUENCE_DIM,
        _run_backward,
        grad,
        "grad_out",
        query,
        key,
        value,
        out,
        logsumexp,
        is_causal=True,
    )


def _run_forward(query: Any, key: Any, value: Any, **options: object) -> tuple[torch.Tensor, ...]:
    output, logsumexp = torch.ops.bench.attention_forward(query, key, value, None, options["is_causal"])
    return output, logsumexp


def _run_backward(query: Any, key: Any, value: Any, **options: Any) -> tuple[torch.Tensor, ...]:
    saved = (options["out"], options["logsumexp"], options["is_causal"])
    gradients, _ = run_attention_backward(options["grad_out"], query, key, value, None, *saved)
    return tuple(gradients)
