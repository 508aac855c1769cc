"""Constants chosen without one of the sources, to see what they are worth on it.

Fitted are, per kind of GPU, the share of the peak that matrix products reach, with it on H100 the share of the memory's
bandwidth, and the share of the network's line rate: so that the mean absolute error of the rows at
`bench.validation.runs.TUNED_AT` GPUs is least, give or take a fifth of a percent point. Those in ``conf/hardware`` were
chosen on all sources, these on one. Where a source has no row of a kind of GPU, the shares of another kind stand in.
"""

from __future__ import annotations


def _constants(matmul: float, memory: float, node: float) -> dict[str, str]:
    """Overrides of the constants that were fitted."""
    return {
        "hardware.speeds.matmul.efficiency.bf16": f"{matmul}",
        "hardware.speeds.memory_efficiency": f"{memory}",
        "hardware.speeds.links.node_efficiency": f"{node}",
    }


_PAPER_ALONE = _constants(matmul=0.79, memory=0.9, node=0.75)
_LLM_FOUNDRY_ALONE = _constants(matmul=0.72, memory=0.9, node=0.9)

CHOSEN_WITHOUT: dict[str, dict[str, dict[str, str]]] = {
    "llm_foundry": {"a100_40gb": _PAPER_ALONE, "a100_80gb": _PAPER_ALONE, "h100_80gb": _PAPER_ALONE},
    "fsdp_paper": {"a100_80gb": _LLM_FOUNDRY_ALONE},
}
"""By source left out, then by hardware: overrides."""
