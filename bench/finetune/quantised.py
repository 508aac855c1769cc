"""Linear layers with weights of 4 or 8 bits: bitsandbytes', which has kernels for NVIDIA GPUs and for CPUs.

bitsandbytes is QLoRA's own library, peft and transformers build on it, and it has both 4 and 8 bits. Its layers take
their weights in two steps: as they are drawn, then quantised (`store`), one layer after the other, so that no rank ever
holds more than one of them whole.

4 bits: two weights to a byte, an absolute maximum for each block of 64. With double quantisation these have 8 bits
themselves, less their mean, with an fp32 maximum for each 256 (QLoRA, arXiv:2305.14314, section 3). 8 bits: one byte
per weight and an fp32 maximum per row (LLM.int8(), arXiv:2208.07339).
"""

from __future__ import annotations

import importlib
import math
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from bench.finetune.adapters import dimensions, inside_blocks, is_transposed
from bench.finetune.shape import Shape
from bench.models import Family
from bench.precision import Precision

BLOCK, SCALES_BLOCK = 64, 256
"""Weights that share a scale; scales that share a scale of theirs."""

CODE, SCALES_CODE = 2**4, 2**8
"""Values that a weight and a scale may have."""

FP32_BYTES = 4


def quantise_layers(family: Family, model: nn.Module, shape: Shape, precision: Precision) -> None:
    """Put layers that hold quantised weights into the place of every linear layer of the blocks, on meta.

    Packed weights are stored as numbers of the parameters' format: T5 converts what it puts into a layer to the format
    of the layer's weight.
    """
    bnb = _library()
    for parent, name, layer in inside_blocks(family, model):
        inputs, outputs = dimensions(layer)
        bias = layer.bias is not None
        made: Any
        if shape.bits == 4:
            made = bnb.nn.Linear4bit(
                inputs,
                outputs,
                bias=bias,
                compute_dtype=precision.compute_dtype,
                compress_statistics=shape.double_quantisation,
                quant_type="nf4",
                quant_storage=precision.parameter_dtype,
                device="meta",
            )
        else:
            made = bnb.nn.Linear8bitLt(inputs, outputs, bias=bias, has_fp16_weights=False, device="meta")
        made.double_quantisation = shape.double_quantisation
        made.drawn_transposed = is_transposed(layer)
        made.drawn_shape = tuple(layer.weight.shape)  # type: ignore[arg-type]
        setattr(parent, name, made)
    model.is_loaded_in_4bit = shape.bits == 4  # type: ignore[assignment]
    model.is_loaded_in_8bit = shape.bits == 8  # type: ignore[assignment]


def expect_drawn_weights(model: nn.Module) -> None:
    """Have every such layer wait for its weight as the base draws it: once adapters have asked what they stand beside.

    What was a `Conv1D` is drawn the other way round.
    """
    for module in _layers(model):
        module.weight = nn.Parameter(torch.empty(module.drawn_shape, device="meta"), requires_grad=False)


def store(module: Any) -> None:
    """Quantise a layer's weight, if it is such a layer, that was drawn; on fake tensors, make what comes of it."""
    if not _is_quantised(module):
        return
    bnb = _library()
    weight = module.weight.data
    if isinstance(weight, FakeTensor):
        _store_fake(module, weight)
        return
    weight = weight.t().contiguous() if module.drawn_transposed else weight
    if isinstance(module, bnb.nn.Linear4bit):
        module.weight = bnb.nn.Params4bit(
            weight.to(module.compute_dtype),
            requires_grad=False,
            compress_statistics=module.double_quantisation,
            quant_type="nf4",
            quant_storage=module.quant_storage,
            module=module,
        ).to(weight.device)
    else:
        # It is quantised on the way from the CPU.
        module.weight = bnb.nn.Int8Params(weight.cpu(), requires_grad=False, has_fp16_weights=False).to(weight.device)


def _store_fake(module: Any, weight: torch.Tensor) -> None:
    """What `store` makes, without values."""
    bnb = _library()
    outputs, inputs = module.out_features, module.in_features
    if not isinstance(module, bnb.nn.Linear4bit):
        packed = nn.Parameter(torch.empty(outputs, inputs, dtype=torch.int8), requires_grad=False)
        packed.CB = packed.SCB = None  # type: ignore[attr-defined]
        module.state.CB, module.state.SCB = packed.data, torch.empty(outputs)
    else:
        blocks = -(-weight.numel() // BLOCK)
        size = weight.numel() // 2 // module.quant_storage.itemsize
        packed = nn.Parameter(torch.empty(size, 1, dtype=module.quant_storage), requires_grad=False)
        nested = None
        if module.double_quantisation:
            nested = bnb.functional.QuantState(
                torch.empty(-(-blocks // SCALES_BLOCK)),
                code=torch.empty(256),
                blocksize=SCALES_BLOCK,
                dtype=torch.float32,
            )
        packed.quant_state = bnb.functional.QuantState(  # type: ignore[attr-defined]
            torch.empty(blocks, dtype=torch.uint8 if nested else torch.float32),
            shape=torch.Size((outputs, inputs)),
            code=torch.empty(16),
            blocksize=BLOCK,
            quant_type="nf4",
            dtype=module.compute_dtype,
            offset=torch.empty(()) if nested else None,
            state2=nested,
        )
    module.weight = packed


def stored_bytes(model: nn.Module) -> dict[int, int]:
    """Bytes of every quantised weight with its scales, by the identity of the parameter."""
    bnb = _library()
    found = {}
    for module in _layers(model):
        weights = module.in_features * module.out_features
        if isinstance(module, bnb.nn.Linear4bit):
            found[id(module.weight)] = weights // 2 + scale_bytes(weights, double=module.double_quantisation)
        else:
            found[id(module.weight)] = weights + FP32_BYTES * module.out_features
    return found


def scale_bytes(weights: int, *, double: bool) -> int:
    """Of the scales of a matrix in 4 bits: per weight 4 / 64 bytes, or 1 / 64 + 4 / (64 x 256) with double.

    Every layer also has its own table of the values that 4 bits stand for, and 8 bits of a scale.
    """
    blocks = math.ceil(weights / BLOCK)
    if not double:
        return FP32_BYTES * (blocks + CODE)
    return blocks + FP32_BYTES * (math.ceil(blocks / SCALES_BLOCK) + 1 + CODE + SCALES_CODE)


def _library() -> Any:
    """bitsandbytes, an optional extra."""
    return importlib.import_module("bitsandbytes")


def _layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if _is_quantised(module)]


def _is_quantised(module: nn.Module) -> bool:
    return hasattr(module, "drawn_shape")
