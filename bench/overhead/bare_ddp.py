"""The bare script: train a T5 or GPT under DDP and time its steps, with nothing but torch and transformers.

Written as one would by hand, without this suite: what it takes is what the work takes. Start it with torchrun:

    OMP_NUM_THREADS=1 python -m torch.distributed.run --standalone --nproc-per-node 2 bare_ddp.py \
        --family t5 --config '{"d_model": 128, "num_layers": 2}' --sequence-length 64

Rank 0 prints one line of JSON: its step times, each that of the slowest rank, and how long the script took.
"""

import time

START_S = time.perf_counter()

import argparse  # noqa: E402
import itertools  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402, N812
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402


def build_model(family: str, config: dict[str, Any]) -> nn.Module:
    """T5 or GPT-2 with transformers' own initialisation; `config` holds arguments of its configuration class."""
    if family == "t5":
        from transformers import T5Config, T5ForConditionalGeneration

        return T5ForConditionalGeneration(T5Config(**config))
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(**config))


def build_synthetic_batch(
    family: str, vocabulary_size: int, batch_size: int, sequence_length: int, device: torch.device
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    tokens = torch.randint(1, vocabulary_size, (batch_size, sequence_length), device=device)
    if family == "t5":
        labels = torch.randint(1, vocabulary_size, (batch_size, sequence_length), device=device)
        return {"input_ids": tokens, "decoder_input_ids": F.pad(labels[:, :-1], (1, 0))}, labels
    return {"input_ids": tokens}, F.pad(tokens[:, 1:], (0, 1), value=-100)


def compute_loss(model: nn.Module, inputs: dict[str, torch.Tensor], labels: torch.Tensor, bf16: bool) -> torch.Tensor:
    """Cross entropy in fp32."""
    with torch.autocast(labels.device.type, torch.bfloat16, enabled=bf16):
        logits = model(**inputs)["logits"]
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the steps of a bare DDP loop.")
    parser.add_argument("--family", choices=("t5", "gpt"), required=True)
    parser.add_argument("--config", type=json.loads, required=True, help="JSON for T5Config or GPT2Config")
    parser.add_argument("--batch-size", type=int, default=4, help="sequences per rank")
    parser.add_argument("--sequence-length", type=int, default=128)
    parser.add_argument("--warmup-steps", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--bf16", action="store_true", help="autocast")
    options = parser.parse_args()

    torch.manual_seed(0)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    model = build_model(options.family, options.config).to(device).train()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    ddp = DistributedDataParallel(
        model, device_ids=[device.index] if on_gpu else None, gradient_as_bucket_view=True, static_graph=True
    )
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-4, fused=True)
    vocabulary_size = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    inputs, labels = build_synthetic_batch(
        options.family, vocabulary_size, options.batch_size, options.sequence_length, device
    )

    def record_time() -> Any:
        if not on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def train_steps(num_steps: int) -> list[Any]:
        timestamps = [record_time()]
        for _ in range(num_steps):
            compute_loss(ddp, inputs, labels, options.bf16).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            timestamps.append(record_time())
        return timestamps

    def compute_slowest_times(timestamps: list[Any]) -> list[float]:
        intervals = itertools.pairwise(timestamps)
        times = [start.elapsed_time(end) / 1000 if on_gpu else end - start for start, end in intervals]
        tensor = torch.tensor(times, dtype=torch.float64, device=device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor.tolist()

    warmup_timestamps = train_steps(options.warmup_steps)
    dist.barrier()
    timed_timestamps = train_steps(options.steps)
    if on_gpu:
        torch.cuda.synchronize()
    result = {
        "parameters": num_parameters,
        "warmup_times_s": compute_slowest_times(warmup_timestamps),
        "step_times_s": compute_slowest_times(timed_timestamps),
        "script_wall_s": time.perf_counter() - START_S,
    }
    if dist.get_rank() == 0:
        print(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
