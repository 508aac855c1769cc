"""Generations of fused attention kernels, and which of them PyTorch's ``scaled_dot_product_attention`` picks."""

from __future__ import annotations

from collections.abc import Collection

EFFICIENT, FLASH_2, FLASH_3, CUDNN, TRITON_2022, AOTRITON, SDPA = (
    "efficient",
    "flash2",
    "flash3",
    "cudnn",
    "triton_2022",
    "aotriton",
    "sdpa",
)
ATTENTION_KERNELS = (EFFICIENT, FLASH_2, FLASH_3, CUDNN, TRITON_2022, AOTRITON, SDPA)
"""The memory-efficient kernel (CUTLASS, of xFormers; any GPU, takes biases), FlashAttention-2 (arXiv:2307.08691;
compute capability 8.0 on), FlashAttention-3 (arXiv:2407.08608; 9.0 alone, a package of its own that PyTorch does not
call), cuDNN's (8.0 on), FlashAttention of 2022 written in Triton (llm-foundry's with ALiBi), AOTriton (AMD), and
whatever PyTorch picked where a device was calibrated."""

CUDNN_FIRST_VERSION = (2, 11)
"""PyTorch from which its wheels ask cuDNN first on compute capabilities 9 and 10: ``check_prefer_cudnn_attention`` of
aten/src/ATen/native/transformers/cuda/sdp_utils.cpp wants a cuDNN after 9.15. 2.9 asks FlashAttention first
(https://github.com/pytorch/pytorch/issues/169849); 2.11 has cuDNN 9.19, and its kernels are those that an H200 ran with
it (results/calibration/h200_profiled_kernels.csv). 2.5.0 alone did so before."""

LATEST_VERSION = (2, 13)
"""PyTorch whose choice predictions assume where nothing else is said."""


def choose_sdpa_kernel(
    available: Collection[str],
    *,
    has_bias: bool = False,
    learns_bias: bool = False,
    torch_version: tuple[int, ...] = LATEST_VERSION,
) -> str:
    """The kernel that ``scaled_dot_product_attention`` picks, without and with dropout.

    Parameters
    ----------
    available: collection of str
        Kernels that run on the device: keys of `AttentionSpeed.kernels`. Devices have ``cudnn`` there whose compute
        capability is 9 or 10, the only ones on which PyTorch prefers it.
    has_bias: bool
        Whether a bias or mask is added to the scores, which FlashAttention does not take.
    learns_bias: bool
        Whether that bias has a gradient, which of these kernels the memory-efficient one alone gives: on an H200 with
        PyTorch 2.11, T5's attention with relative positions ran it, and its cross-attention cuDNN's
        (results/calibration/h200_profiled_kernels.csv).
    torch_version: tuple of int
        Major and minor number, and the patch where it matters.

    Raises
    ------
    ValueError
        If no kernel is available that PyTorch calls.
    """
    prefers_cudnn = torch_version[:2] >= CUDNN_FIRST_VERSION or torch_version[:3] == (2, 5, 0)
    order = [SDPA, *([CUDNN] if prefers_cudnn and not learns_bias else [])]
    order += [*([] if has_bias else [FLASH_2, AOTRITON]), EFFICIENT, AOTRITON]
    for name in order:
        if name in available:
            return name
    raise ValueError(f"none of the attention kernels {', '.join(available)} is one that PyTorch calls")
