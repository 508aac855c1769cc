"""What adapters and quantised layers are traced as where peft or bitsandbytes is missing: nothing of it computes.

Modules of the same make: parameters of the same names, shapes and formats, in the same order, and forward and backward
passes that call the same operators on tensors of the same shapes. Read in peft 0.21.2
(``peft/tuners/lora/{layer,bnb}.py``) and bitsandbytes 0.50.2 (``bitsandbytes/nn/modules.py`` and
``autograd/_functions.py``).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from bench.core.precision import Precision

ADAPTER_NAME = "default"
"""peft's, in the names of the adapters' parameters."""

SCALE_OF_ONE_STEP = 1 / 127
"""Of a weight in int8, as a share of its row's maximum."""


class AdaptedLinear(nn.Module):
    """A layer with an adapter beside it: y = W x + alpha / r * B A x.

    Parameters
    ----------
    base_layer: nn.Module
        Frozen. Its input has `inputs` features, its output `outputs`.
    rank: int
        r.
    alpha: float
        The adapter's product counts alpha / r times.
    dropout: float
        Probability that it takes an element of its input as zero.
    """

    def __init__(
        self, base_layer: nn.Module, inputs: int, outputs: int, rank: int, alpha: float, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_dropout = nn.ModuleDict({ADAPTER_NAME: nn.Dropout(dropout) if dropout else nn.Identity()})
        self.lora_A = nn.ModuleDict({ADAPTER_NAME: nn.Linear(inputs, rank, bias=False, device="meta")})
        self.lora_B = nn.ModuleDict({ADAPTER_NAME: nn.Linear(rank, outputs, bias=False, device="meta")})
        self.scale = alpha / rank
        self.in_features, self.out_features = inputs, outputs
        for parameter in base_layer.parameters():
            parameter.requires_grad_(False)

    @property
    def weight(self) -> Any:
        """The frozen one: T5 asks for its format."""
        return self.base_layer.weight

    @property
    def bias(self) -> Any:
        return self.base_layer.bias

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """As peft's ``Linear``, ``Linear4bit`` and ``Linear8bitLt``, each of which converts at another place."""
        result = self.base_layer(tokens)
        result_dtype = result.dtype
        is_quantised = isinstance(self.base_layer, QuantisedLinear)
        if is_quantised and self.base_layer.bits == 4:
            result = result.clone()
        weight_dtype = self.lora_A[ADAPTER_NAME].weight.dtype
        if not is_quantised or not torch.is_autocast_enabled():
            tokens = tokens if tokens.dtype == weight_dtype else tokens.to(weight_dtype)  # type: ignore[arg-type]
        dropout, down, up = (layers[ADAPTER_NAME] for layers in (self.lora_dropout, self.lora_A, self.lora_B))
        if not is_quantised:
            result = result + up(down(dropout(tokens))) * self.scale
            return result.to(result_dtype)
        product = up(down(dropout(tokens))) * self.scale
        if not torch.is_autocast_enabled():
            product = product.to(result_dtype)
        return result + product


class QuantisedLinear(nn.Linear):
    """A layer whose weight has 4 or 8 bits."""

    def __init__(
        self, inputs: int, outputs: int, bias: bool, bits: int, precision: Precision, storage_dtype: torch.dtype
    ) -> None:
        super().__init__(inputs, outputs, bias, device="meta")
        self.weight.requires_grad_(False)
        self.bits = bits
        self.compute_dtype = precision.compute_dtype
        self.quant_storage = storage_dtype
        self.scales: tuple[torch.Tensor, ...] = ()
        """Of 8 bits: one per row. Of 4: one per block; or in 8 bits, with their values, their offset and their own
        scales."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.bits == 8:
            if self.bias is not None and self.bias.dtype != tokens.dtype:
                self.bias.data = self.bias.data.to(tokens.dtype)
            return multiply_int8(tokens, self.weight.data, self.scales[0], self.bias)
        dtype = tokens.dtype
        tokens = tokens.to(self.compute_dtype)
        if self.bias is not None and self.bias.dtype != tokens.dtype:
            self.bias.data = self.bias.data.to(tokens.dtype)
        result: torch.Tensor = _Product4Bit.apply(
            tokens, self.weight, self.bias, self.scales, (self.out_features, self.in_features)
        )
        return result.to(dtype)


# --- Operators of bitsandbytes, by its names: what they are called and what they return is all there is of them here.

WEIGHTS_PER_SCALE, SCALES_PER_OUTER_SCALE = 64, 256
"""Weights that share a scale; scales that share a scale of theirs."""

NF4 = "nf4"

torch.library.define(
    "bench::gemm_4bit",
    "(Tensor A, Tensor B, int[] shape, Tensor scales, int block_size, str kind, Tensor? bias=None,"
    " Tensor? scales_8bit=None, Tensor? scale_values=None, Tensor? scale_offset=None) -> Tensor",
)
torch.library.define(
    "bench::dequantize_4bit",
    "(Tensor A, Tensor scales, int block_size, str kind, int[] shape, ScalarType dtype) -> Tensor",
)
torch.library.define(
    "bench::dequantize_blockwise",
    "(Tensor A, Tensor scales, Tensor values, int block_size, ScalarType dtype) -> Tensor",
)
torch.library.define("bench::int8_vectorwise_quant", "(Tensor A) -> (Tensor, Tensor)")
torch.library.define(
    "bench::int8_scaled_mm",
    "(Tensor A, Tensor B, Tensor row_scales, Tensor column_scales, Tensor? bias, ScalarType dtype) -> Tensor",
)


@torch.library.register_fake("bench::gemm_4bit")
def _(tokens: torch.Tensor, _weight: Any, shape: Any, *_: Any, **__: Any) -> torch.Tensor:
    return tokens.new_empty(*tokens.shape[:-1], shape[0])


@torch.library.register_fake("bench::dequantize_4bit")
def _(weight: torch.Tensor, _scales: Any, _size: Any, _kind: Any, shape: Any, dtype: torch.dtype) -> torch.Tensor:
    return weight.new_empty(shape, dtype=dtype)


@torch.library.register_fake("bench::dequantize_blockwise")
def _(values: torch.Tensor, _scales: Any, _codes: Any, _size: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_like(values, dtype=dtype)


@torch.library.register_fake("bench::int8_vectorwise_quant")
def _(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows = math.prod(tokens.shape[:-1])
    return tokens.new_empty(tokens.shape, dtype=torch.int8), tokens.new_empty(rows, dtype=torch.float32)


@torch.library.register_fake("bench::int8_scaled_mm")
def _(tokens: torch.Tensor, weight: torch.Tensor, _rows: Any, _columns: Any, _bias: Any, dtype: Any) -> torch.Tensor:
    return tokens.new_empty(*tokens.shape[:-1], weight.shape[0], dtype=dtype)


# --- Products with quantised weights, forward and backward. Only the gradient of the tokens is ever asked for.


class _Product4Bit(torch.autograd.Function):
    """Forward in one operator; backward makes the weight anew and multiplies."""

    @staticmethod
    def forward(ctx: Any, tokens: Any, weight: Any, bias: Any, scales: Any, shape: Any) -> torch.Tensor:
        weight = weight.view(-1, 1)
        ctx.operands = weight, scales, shape
        if len(scales) == 1:
            return torch.ops.bench.gemm_4bit(tokens, weight, shape, scales[0], WEIGHTS_PER_SCALE, NF4, bias)
        inner_scales, values, offset, outer_scales = scales
        return torch.ops.bench.gemm_4bit(
            *(tokens, weight, shape, outer_scales, WEIGHTS_PER_SCALE, NF4, bias, inner_scales, values, offset)
        )

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        weight, scales, shape = ctx.operands
        whole_weight = _dequantise_4bit(weight, scales, shape, gradient.dtype)
        return torch.matmul(gradient, whole_weight), None, None, None, None


def _dequantise_4bit(weight: torch.Tensor, scales: Any, shape: Any, dtype: torch.dtype) -> Any:
    absolute_scales = scales[0]
    if len(scales) > 1:
        inner_scales, values, offset, outer_scales = scales
        absolute_scales = torch.ops.bench.dequantize_blockwise(
            inner_scales, outer_scales, values, SCALES_PER_OUTER_SCALE, torch.float32
        )
        absolute_scales += offset
    return torch.ops.bench.dequantize_4bit(weight, absolute_scales, WEIGHTS_PER_SCALE, NF4, shape, dtype)


class _Int8ProductOnCpu(torch.autograd.Function):
    """Both ways the weight is made anew: its kernels for CPUs have no product of int8."""

    @staticmethod
    def forward(ctx: Any, tokens: Any, weight: Any, scales: Any, bias: Any) -> torch.Tensor:
        ctx.operands = tokens, weight, scales
        whole_weight = weight.data.to(tokens.dtype).mul_(scales.unsqueeze(1).mul(SCALE_OF_ONE_STEP))
        return functional.linear(tokens, whole_weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return _compute_int8_input_gradient(gradient, *ctx.operands), None, None, None


class _Int8ProductOnGpu(torch.autograd.Function):
    """Forward the tokens are quantised, too."""

    @staticmethod
    def forward(ctx: Any, tokens: Any, weight: Any, scales: Any, bias: Any) -> torch.Tensor:
        shape = tokens.shape
        tokens = tokens.reshape(-1, shape[-1]) if tokens.dim() == 3 else tokens
        quantised_tokens, row_scales = torch.ops.bench.int8_vectorwise_quant(tokens.to(torch.float16))
        result = torch.ops.bench.int8_scaled_mm(quantised_tokens, weight, row_scales, scales, bias, tokens.dtype)
        ctx.operands = tokens, weight, scales
        ctx.shape = shape
        return result.reshape(*shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return _compute_int8_input_gradient(gradient, *ctx.operands).view(ctx.shape), None, None, None


def _compute_int8_input_gradient(
    gradient: torch.Tensor, tokens: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    if gradient.dim() == 3:
        gradient = gradient.reshape(-1, gradient.shape[-1]).contiguous()
    whole_weight = weight.to(tokens.dtype, copy=True).mul_(scales.unsqueeze(1).mul(SCALE_OF_ONE_STEP))
    return torch.matmul(gradient.to(tokens.dtype), whole_weight).view(tokens.shape)


multiply_int8: Any = _Int8ProductOnCpu.apply
multiply_int8_on_gpu: Any = _Int8ProductOnGpu.apply
"""What a trace puts in the place of `multiply_int8` where the device is a GPU."""
