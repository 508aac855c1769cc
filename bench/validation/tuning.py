"""Constants chosen without one of the sources, to see what they are worth on it.

Fitted are, per kind of GPU, the share of the peak that matrix products reach, with it on H100 the share of the memory's
bandwidth, and the share of the network's line rate: so that the mean absolute error of the rows at
`bench.validation.runs.TUNED_GPU_COUNTS` GPUs is least, give or take a fifth of a percent point. Those in
``conf/hardware`` were chosen on all sources, these on one. Where a source has no row of a kind of GPU, the shares of
another kind stand in.
"""

from __future__ import annotations


def _build_overrides(matmul_efficiency: float, memory_efficiency: float, node_efficiency: float) -> dict[str, str]:
    """Overrides of the constants that were fitted."""
    return {
        "hardware.speeds.matmul.efficiency.bf16": f"{matmul_efficiency}",
        "hardware.speeds.memory_efficiency": f"{memory_efficiency}",
        "hardware.speeds.links.node_efficiency": f"{node_efficiency}",
    }


_TUNED_ON_FSDP_PAPER = _build_overrides(matmul_efficiency=0.79, memory_efficiency=0.9, node_efficiency=0.75)
_TUNED_ON_LLM_FOUNDRY = _build_overrides(matmul_efficiency=0.72, memory_efficiency=0.9, node_efficiency=0.9)

OVERRIDES_WITHOUT_SOURCE: dict[str, dict[str, dict[str, str]]] = {
    "llm_foundry": {
        "a100_40gb": _TUNED_ON_FSDP_PAPER,
        "a100_80gb": _TUNED_ON_FSDP_PAPER,
        "h100_80gb": _TUNED_ON_FSDP_PAPER,
    },
    "fsdp_paper": {"a100_80gb": _TUNED_ON_LLM_FOUNDRY},
}
"""By source left out, then by hardware: overrides."""
