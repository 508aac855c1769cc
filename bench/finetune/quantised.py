"""Linear layers with weights of 4 or 8 bits: bitsandbytes', which has kernels for NVIDIA GPUs and for CPUs.

bitsandbytes is QLoRA's own library, peft and transformers build on it, and it has both 4 and 8 bits. Its layers take
their weights in two steps: as they are drawn, then quantised (`quantise_drawn_weight`), one layer after the other, so
that no rank ever holds more than one of them whole.

4 bits: two weights to a byte, an absolute maximum for each block of 64. With double quantisation these have 8 bits
themselves, less their mean, with an fp32 maximum for each 256 (QLoRA, arXiv:2305.14314, section 3). 8 bits: one byte
per weight and an fp32 maximum per row (LLM.int8(), arXiv:2208.07339).
"""

from __future__ import annotations

import importlib
import math
from typing import TYPE_CHECKING, Any

from bench.core.precision import Precision
from bench.finetune.adapters import (
    AdapterSpec,
    find_layer_dimensions,
    is_quantised,
    is_transposed,
    iterate_linear_layers,
)
from bench.models import Family
from bench.models.base import StoredFormat

if TYPE_CHECKING:
    import torch
    from torch import nn

    from bench.finetune.stand_ins import QuantisedLinear

WEIGHT_CODE_SIZE, SCALE_CODE_SIZE = 2**4, 2**8
"""Values that a weight and a scale may have."""

FP32_BYTES = 4


def quantise_layers(
    family: Family, model: nn.Module, adapter_spec: AdapterSpec, precision: Precision, storage_dtype: torch.dtype
) -> None:
    """Put layers that hold quantised weights into the place of every linear layer of the blocks, on meta.

    Weights of 4 bits are packed into numbers of the format in which the strategy hands parameters to the model: what
    casts parameters leaves these as they are, a flat parameter has one format, and T5 converts what it puts into a
    layer to the format of the layer's weight.
    """
    from bench.finetune.stand_ins import QuantisedLinear

    for parent, name, layer in list(iterate_linear_layers(family, model)):
        inputs, outputs = find_layer_dimensions(layer)
        bias = layer.bias is not None
        quantised_layer: Any
        if adapter_spec.uses_stand_ins:
            quantised_layer = QuantisedLinear(inputs, outputs, bias, adapter_spec.bits or 0, precision, storage_dtype)
        elif adapter_spec.bits == 4:
            quantised_layer = _import_bitsandbytes().nn.Linear4bit(
                inputs,
                outputs,
                bias=bias,
                compute_dtype=precision.compute_dtype,
                compress_statistics=adapter_spec.double_quantisation,
                quant_type="nf4",
                quant_storage=storage_dtype,
                device="meta",
            )
        else:
            quantised_layer = _import_bitsandbytes().nn.Linear8bitLt(
                inputs, outputs, bias=bias, has_fp16_weights=False, device="meta"
            )
        quantised_layer.bits = adapter_spec.bits
        quantised_layer.double_quantisation = adapter_spec.double_quantisation
        quantised_layer.drawn_transposed = is_transposed(layer)
        quantised_layer.drawn_shape = tuple(layer.weight.shape)  # type: ignore[arg-type]
        setattr(parent, name, quantised_layer)


def prepare_drawn_weights(model: nn.Module) -> None:
    """Have every such layer wait for its weight as the base draws it: once adapters have asked what they stand beside.

    What was a `Conv1D` is drawn the other way round.
    """
    import torch
    from torch import nn

    for module in list_quantised_layers(model):
        module.weight = nn.Parameter(torch.empty(module.drawn_shape, device="meta"), requires_grad=False)


def quantise_drawn_weight(module: Any) -> None:
    """Quantise a layer's weight, if it is such a layer, that was drawn; on fake tensors, make what comes of it."""
    from torch._subclasses.fake_tensor import FakeTensor

    from bench.finetune.stand_ins import QuantisedLinear

    if not is_quantised(module):
        return
    weight = module.weight.data
    if isinstance(module, QuantisedLinear):
        _quantise_stand_in_weight(module, weight)
        return
    if isinstance(weight, FakeTensor):
        _quantise_fake_weight(module, weight)
        return
    bitsandbytes = _import_bitsandbytes()
    weight = weight.t().contiguous() if module.drawn_transposed else weight
    if module.bits == 4:
        module.weight = bitsandbytes.nn.Params4bit(
            weight.to(module.compute_dtype),
            requires_grad=False,
            compress_statistics=module.double_quantisation,
            quant_type="nf4",
            quant_storage=module.quant_storage,
            module=module,
        ).to(weight.device)
    else:
        # It is quantised on the way from the CPU.
        module.weight = bitsandbytes.nn.Int8Params(weight.cpu(), requires_grad=False, has_fp16_weights=False).to(
            weight.device
        )


def _quantise_fake_weight(module: Any, weight: torch.Tensor) -> None:
    """What `quantise_drawn_weight` makes, without values."""
    import torch
    from torch import nn

    from bench.finetune.stand_ins import SCALES_PER_OUTER_SCALE, WEIGHTS_PER_SCALE

    bitsandbytes = _import_bitsandbytes()
    outputs, inputs = module.out_features, module.in_features
    if module.bits == 8:
        packed_weight = nn.Parameter(torch.empty(outputs, inputs, dtype=torch.int8), requires_grad=False)
        packed_weight.CB = packed_weight.SCB = None  # type: ignore[attr-defined]
        module.state.CB, module.state.SCB = packed_weight.data, torch.empty(outputs)
    else:
        num_blocks = -(-weight.numel() // WEIGHTS_PER_SCALE)
        packed_size = weight.numel() // 2 // module.quant_storage.itemsize
        packed_weight = nn.Parameter(torch.empty(packed_size, 1, dtype=module.quant_storage), requires_grad=False)
        scale_state = None
        if module.double_quantisation:
            scale_state = bitsandbytes.functional.QuantState(
                torch.empty(-(-num_blocks // SCALES_PER_OUTER_SCALE)),
                code=torch.empty(256),
                blocksize=SCALES_PER_OUTER_SCALE,
                dtype=torch.float32,
            )
        packed_weight.quant_state = bitsandbytes.functional.QuantState(  # type: ignore[attr-defined]
            torch.empty(num_blocks, dtype=torch.uint8 if scale_state else torch.float32),
            shape=torch.Size((outputs, inputs)),
            code=torch.empty(16),
            blocksize=WEIGHTS_PER_SCALE,
            quant_type="nf4",
            dtype=module.compute_dtype,
            offset=torch.empty(()) if scale_state else None,
            state2=scale_state,
        )
    module.weight = packed_weight


def _quantise_stand_in_weight(module: QuantisedLinear, weight: torch.Tensor) -> None:
    """What `_quantise_fake_weight` makes, of a layer that stands for bitsandbytes'."""
    import torch
    from torch import nn

    from bench.finetune.stand_ins import SCALES_PER_OUTER_SCALE, WEIGHTS_PER_SCALE

    if module.bits == 8:
        packed_weight = torch.empty(module.out_features, module.in_features, dtype=torch.int8)
        module.scales = (torch.empty(module.out_features),)
    else:
        packed_size = weight.numel() // 2 // module.quant_storage.itemsize
        packed_weight = torch.empty(packed_size, 1, dtype=module.quant_storage)
        num_blocks = math.ceil(weight.numel() / WEIGHTS_PER_SCALE)
        module.scales = (torch.empty(num_blocks),)
        if module.double_quantisation:
            num_outer_scales = math.ceil(num_blocks / SCALES_PER_OUTER_SCALE)
            module.scales = (
                torch.empty(num_blocks, dtype=torch.uint8),
                torch.empty(SCALE_CODE_SIZE),
                torch.empty(()),
                torch.empty(num_outer_scales),
            )
    module.weight = nn.Parameter(packed_weight, requires_grad=False)


def find_quantised_formats(model: nn.Module) -> dict[int, StoredFormat]:
    """Every quantised weight as it is stored, by the identity of the parameter as it is drawn."""
    formats = {}
    for module in list_quantised_layers(model):
        num_weights = module.in_features * module.out_features
        if module.bits == 4:
            shape = (num_weights // 2 // module.quant_storage.itemsize, 1)
            scale_bytes = count_scale_bytes(num_weights, has_double_quantisation=module.double_quantisation)
            formats[id(module.weight)] = StoredFormat(shape, num_weights // 2, scale_bytes)
        else:
            shape = (module.out_features, module.in_features)
            formats[id(module.weight)] = StoredFormat(shape, num_weights, FP32_BYTES * module.out_features)
    return formats


def count_scale_bytes(num_weights: int, *, has_double_quantisation: bool) -> int:
    """Of the scales of a matrix in 4 bits: per weight 4 / 64 bytes, or 1 / 64 + 4 / (64 x 256) with double.

    Every layer also has its own table of the values that 4 bits stand for, and 8 bits of a scale.
    """
    from bench.finetune.stand_ins import SCALES_PER_OUTER_SCALE, WEIGHTS_PER_SCALE

    num_blocks = math.ceil(num_weights / WEIGHTS_PER_SCALE)
    if not has_double_quantisation:
        return FP32_BYTES * (num_blocks + WEIGHT_CODE_SIZE)
    return num_blocks + FP32_BYTES * (
        math.ceil(num_blocks / SCALES_PER_OUTER_SCALE) + 1 + WEIGHT_CODE_SIZE + SCALE_CODE_SIZE
    )


def _import_bitsandbytes() -> Any:
    return importlib.import_module("bitsandbytes")


def list_quantised_layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if is_quantised(module)]
