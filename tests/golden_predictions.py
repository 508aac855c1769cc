"""Predictions whose numbers are committed with the version of the predictor: `golden_predictions.json`, beside this.

``python -m tests.golden_predictions`` writes them anew: where numbers have moved only once `PREDICTOR_VERSION` of
`bench.prediction.cache` is raised. `tests/prediction/test_predictor.py` compares them.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.prediction import cache
from bench.prediction.prediction import prediction_to_plain
from bench.prediction.predictor import predict_runs
from tests.conftest import compose_run_config

FILE = Path(__file__).with_suffix(".json")

COMMAND = "python -m tests.golden_predictions"

RELATIVE_NOISE = 1e-9
"""What the order of additions may change."""

ON_A100 = ("hardware=a100_80gb", "gpus=8", "gpus_per_node=4", "precision=bf16", "sequence_length=128")
GPT = ("model=gpt_tiny", *ON_A100)
T5 = ("model=t5_tiny", *ON_A100)
LLAMA = ("model=llama_tiny", *ON_A100)
MESH = ("strategy=mesh",)
ON_CPU = ("hardware=cpu", "gpus=2", "precision=fp32", "sequence_length=64")
OF_THE_PAPER = ("hardware=a100_80gb", "gpus_per_node=8", "strategy=fsdp1", "precision=bf16", "sequence_length=512")

CASES: tuple[tuple[str, ...], ...] = (
    (*GPT, "strategy=single", "gpus=1"),
    (*GPT, "strategy=data_parallel", "gpus=4"),
    (*GPT, "strategy=ddp"),
    (*GPT, "strategy=ddp", "strategy.communication_hook=bf16"),
    (*GPT, "strategy=ddp", "strategy.communication_hook=powersgd"),
    (*GPT, "strategy=ddp", "gradient_accumulation=3", "strategy.gradient_as_bucket_view=false"),
    (*GPT, "strategy=zero1"),
    (*GPT, "strategy=fsdp", "strategy.sharding_factor=1"),
    (*GPT, "strategy=fsdp", "strategy.sharding_factor=node"),
    (*GPT, "strategy=fsdp", "activation_checkpointing=full"),
    (*GPT, "strategy=fsdp", "strategy.reshard_after_forward=false", "strategy.forward_prefetch=true"),
    (*GPT, "strategy=fsdp", "strategy.cpu_offload=true"),
    (*GPT, "strategy=fsdp1", "strategy.sharding_factor=1"),
    (*GPT, "strategy=fsdp1", "strategy.sharding_factor=node", "strategy.limit_all_gathers=false"),
    (*GPT, "strategy=fsdp1", "strategy.backward_prefetch=none", "gradient_accumulation=2"),
    *((*GPT, "strategy=deepspeed", f"strategy.stage={stage}") for stage in (1, 2, 3)),
    (*GPT, "strategy=accelerate"),
    (*GPT, "strategy=lightning", "strategy.backend=fsdp"),
    (*GPT, "strategy=tensor_parallel"),
    (*GPT, "strategy=tensor_parallel", "strategy.data_parallel=ddp", "strategy.sequence_parallel=false"),
    (*GPT, "strategy=pipeline", "strategy.stages=2", "model.num_layers=4"),
    (*GPT, "strategy=pipeline", "strategy.stages=2", "model.num_layers=4", "strategy.schedule=gpipe"),
    (*GPT, "strategy=naive_pipeline", "strategy.stages=2", "strategy.data_parallel=fsdp"),
    (*T5, "strategy=ddp", "precision=fp16"),
    (*T5, "strategy=fsdp", "precision=fp16", "activation_checkpointing=selective"),
    (*T5, "strategy=fsdp1", "precision=bf16_pure", "optimizer=sgd"),
    (*T5, "strategy=fsdp", "precision=tf32", "optimizer.implementation=foreach", "compile=true"),
    ("model=gpt_tiny", *ON_CPU, "strategy=fsdp"),
    ("model=gpt_tiny", *ON_CPU, "strategy=ddp", "optimizer.keep_gradients=true"),
    ("model=t5_tiny", *ON_CPU, "strategy=fsdp1", "optimizer.implementation=for_loop"),
    ("model=t5_tiny", *ON_CPU, "strategy=fsdp", "precision=bf16"),
    ("model=t5_611m", *OF_THE_PAPER, "strategy=ddp", "gpus=8", "batch_size_per_gpu=8"),
    ("model=t5_11b", *OF_THE_PAPER, "gpus=64", "batch_size_per_gpu=16", "activation_checkpointing=full"),
    ("model=gpt_2b7", *OF_THE_PAPER, "gpus=16"),
    (*LLAMA, "strategy=fsdp", "gradient_clip_norm=1", "activation_checkpointing=every_2"),
    (*LLAMA, "strategy=ddp", "optimizer=muon", "loss=chunked"),
    (*LLAMA, "strategy=fsdp", "precision=bf16_pure", "loss=compiled"),
    (*LLAMA, "strategy=fsdp", "activation_checkpointing=operators", "activation_offload=true"),
    ("model=moe_tiny", *ON_A100, "strategy=fsdp"),
    (*GPT, *MESH, "strategy.tensor=2", "strategy.pipeline=2"),
    (*GPT, *MESH, "strategy.pipeline=2", "strategy.schedule=interleaved_1f1b", "model.num_layers=8"),
    (*LLAMA, *MESH, "strategy.tensor=2", "strategy.context=2", "strategy.data=ddp"),
    ("model=moe_tiny", *ON_A100, *MESH, "strategy.tensor=2", "strategy.expert=2"),
    (*LLAMA, *MESH, "strategy.tensor=2", "strategy.pipeline=2", "finetune=lora"),
    ("model=mpt_7b", "hardware=h100_80gb", "gpus=16", "strategy=fsdp", "precision=bf16", "sequence_length=2048"),
)
"""Tiny models with every way to store and to send, and some of the paper's."""


def predict_cases() -> dict[str, dict[str, Any]]:
    """The numbers of every case, by what is typed for it; of a run whose time nobody knows the memory alone."""
    configs = [compose_run_config(*case, "mode=predict") for case in CASES]
    return {
        " ".join(case): _flatten(prediction_to_plain(prediction))
        for case, prediction in zip(CASES, predict_runs(configs), strict=True)
    }


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Numbers and words of nested values, by dotted names."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, int | float | str):
            flat[f"{prefix}{name}"] = value
        elif isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{name}.")
    return flat


def list_moved(known: Mapping[str, Mapping[str, Any]], current: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What differs by more than noise, a line each."""
    return [
        f"{case}: {name} was {known[case].get(name)}, is {current[case].get(name)}"
        for case in known.keys() & current.keys()
        for name in sorted(known[case].keys() | current[case].keys())
        if not _is_same(known[case].get(name), current[case].get(name))
    ]


def _is_same(known: Any, current: Any) -> bool:
    if isinstance(known, int | float) and isinstance(current, int | float):
        return math.isclose(known, current, rel_tol=RELATIVE_NOISE, abs_tol=0)
    return bool(known == current)


def describe_libraries() -> dict[str, str | None]:
    """Versions of what every trace is made with: with others the numbers may be others."""
    return {package: cache.find_package_version(package) for package in cache.TRACED_PACKAGES}


def read_golden() -> dict[str, Any]:
    """``version``, ``libraries`` and ``predictions``."""
    golden: dict[str, Any] = json.loads(FILE.read_text())
    return golden


def find_fault(golden: Mapping[str, Any], current: Mapping[str, Mapping[str, Any]]) -> str | None:
    """What is wrong with the version, in a sentence; None if nothing is."""
    moved = list_moved(golden["predictions"], current)
    listed = "".join(f"\n  {line}" for line in moved[:20])
    is_raised = golden["version"] != cache.PREDICTOR_VERSION
    if moved and not is_raised:
        return (
            f"{len(moved)} predicted numbers moved: raise PREDICTOR_VERSION in bench/prediction/cache.py and run "
            f"`{COMMAND}`, then `make predictions`.{listed}"
        )
    if moved:
        return f"{len(moved)} predicted numbers moved and PREDICTOR_VERSION is raised: run `{COMMAND}`.{listed}"
    if is_raised:
        return (
            f"PREDICTOR_VERSION is {cache.PREDICTOR_VERSION} and no number moved since {golden['version']}: put it "
            f"back, or add a case whose number moved to tests/golden_predictions.py and run `{COMMAND}`."
        )
    if golden["predictions"].keys() != current.keys():
        return f"The golden predictions are not those of the cases: run `{COMMAND}`."
    return None


def main() -> int:
    """Write the file anew, unless numbers moved and the version did not.

    Returns
    -------
    int
        0 if it was written, 1 if not.
    """
    current = predict_cases()
    if FILE.exists():
        golden = read_golden()
        moved = list_moved(golden["predictions"], current)
        same_libraries = golden["libraries"] == describe_libraries()
        if moved and same_libraries and golden["version"] == cache.PREDICTOR_VERSION:
            print(find_fault(golden, current), file=sys.stderr)
            return 1
        print(f"{len(moved)} numbers moved.")
    values = {"version": cache.PREDICTOR_VERSION, "libraries": describe_libraries(), "predictions": current}
    FILE.write_text(json.dumps(values, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
