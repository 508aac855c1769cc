"""What a user may mistype: one sentence that says what is wrong and what is valid, exit code 2, and nothing begun."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from bench import sweep
from bench.hardware.detect import DetectedDevice
from bench.launch.local import LocalLauncher
from bench.sweeps import run_sweep

MODELS = "t5_11b, t5_2b, t5_611m, t5_mini, t5_small, t5_tiny"
WRITE_KEY_VALUE = "write key=value"
AT_LEAST_1 = "a whole number of at least 1"

# What is typed, and parts of the sentence it earns: the field, the value, what is valid.
BAD_COMMAND_LINES: dict[str, tuple[str, ...]] = {
    # options
    "model=t5_tny": ("model=t5_tny", MODELS),
    "model=t5-tiny": ("model=t5-tiny", MODELS),
    "model=T5_TINY": ("model=T5_TINY", MODELS),
    "model=t5_tiny.yaml": ("model=t5_tiny.yaml", MODELS),
    "model=": ("model=", MODELS),
    "model={name:x}": ("model=", MODELS),
    "-m model=gpt_tiny,t5_tny": ("model=t5_tny", MODELS),
    "strategy=dp": ("strategy=dp", "fsdp, fsdp1"),
    "strategy=fsdp2": ("strategy=fsdp2", "fsdp, fsdp1"),
    "strategy=FSDP": ("strategy=FSDP", "fsdp, fsdp1"),
    "strategy=[ddp,fsdp]": ("strategy=", "fsdp, fsdp1"),
    "precision=fp4": ("precision=fp4", "bf16, bf16_pure, fp16, fp32, fp8, tf32"),
    "precision=int8": ("precision=int8", "INT8 is not offered, since", "bf16, bf16_pure, fp16, fp32, fp8, tf32"),
    "optimizer=adam": ("optimizer=adam", "adafactor, adamw", "muon, sgd"),
    "hardware=h100": ("hardware=h100", "auto, b200"),
    "cluster=loca": ("cluster=loca", "local"),
    "sweep=defalt": ("sweep=defalt", "adhoc, claims, cpu_times, default"),
    "-m sweep=default,adhoc": ("sweep=default,adhoc", "one value"),
    # fields
    "gpu=4": ("gpu ", "not a field", "gpus", "batch_size_per_gpu"),
    "batch_size=4": ("batch_size ", "not a field", "batch_size_per_gpu"),
    "Gpus=4": ("Gpus ", "not a field", "gpus"),
    "+extra=3": ("extra ", "not a field", "gpus"),
    "+extra.field=3": ("extra.field ", "not a field", "gpus"),
    "+batch_size=4": ("batch_size ", "not a field", "batch_size_per_gpu"),
    "+cluster.time_limit=4": ("cluster.time_limit ", "not a field"),
    "+gpus=2": ("+gpus ", "choose gpus"),
    "+model=gpt_tiny": ("+model ", "choose model"),
    "++gpus=2": ("++gpus=2", WRITE_KEY_VALUE),
    "~gpus": ("~gpus", "gpus=value"),
    "~model": ("~model", "model=value"),
    "~strategy.cpu_offload": ("~strategy.cpu_offload", "strategy.cpu_offload=value"),
    "gpus=all cluster.gpus_per_node=abc": ("cluster.gpus_per_node=abc", AT_LEAST_1),
    "gpus=all mode=predict hardware=h200 cluster.gpus_per_node=null": ("cluster.gpus_per_node=null", AT_LEAST_1),
    "cluster=slurm cluster.hardware=5": ("hardware=5", "h200"),
    "cluster=slurm cluster.hardware=true": ("cluster.hardware=true", "a name or null"),
    "sweep=default mode=predict hardware=h200 hardware.memory_gb=much": ("hardware.memory_gb=much", "a number of GB"),
    "hydra.run.dir=x": ("hydra.run.dir ", "not a field", "gpus"),
    "hydra/launcher=basic": ("hydra/launcher ", "not a field"),
    "strategy.sharding_factr=2": ("strategy.sharding_factr ", "not a field", "strategy.sharding_factor"),
    "strategy=ddp strategy.backward_prefetch=pre": ("strategy.backward_prefetch ", "strategy=ddp", "bucket_cap_mb"),
    "model=gpt_tiny model.d_model=4": ("model.d_model ", "model=gpt_tiny", "model.hidden_size"),
    "model=gpt_tiny +model.colour=red": ("model.colour ", "not a field", "hidden_size"),
    "model.hidden_size.x=3 model=gpt_tiny": ("model.hidden_size.x ", "not a field"),
    "measurement.step=3": ("measurement.step ", "not a field", "measurement.steps"),
    "measurement=quick": ("measurement=quick", "measurement.steps"),
    "cluster.time_limit=5": ("cluster.time_limit ", "not a field", "cluster.time_limit_s"),
    "sweep.grid=3": ("sweep.grid ", "not a field", "sweep.grids"),
    "hardware.peak_tflops.fp32=1": ("hardware.peak_tflops.fp32 ", "+hardware.peak_tflops.fp32"),
    "hardware.peak_tflops=3": ("hardware.peak_tflops=3", "+hardware.peak_tflops."),
    "+hardware.peak_tflops.fp64=1": ("fp64", "fp32, tf32, bf16, fp16"),
    "+hardware.peak_tflops.fp32=-1": ("hardware.peak_tflops.fp32=-1", "a number of TFLOP/s of at least 1e-06"),
    # not an override at all
    "gpus": ("'gpus'", WRITE_KEY_VALUE),
    "default": ("'default'", WRITE_KEY_VALUE),
    "gpus==4": ("'gpus==4'", WRITE_KEY_VALUE),
    "=4": ("'=4'", WRITE_KEY_VALUE),
    "gpus = 4": ("'gpus'", WRITE_KEY_VALUE),
    "model/t5_tiny": ("'model/t5_tiny'", WRITE_KEY_VALUE),
    "model:t5_tiny": ("'model:t5_tiny'", WRITE_KEY_VALUE),
    "conf/model/t5_tiny.yaml": ("'conf/model/t5_tiny.yaml'", WRITE_KEY_VALUE),
    "model@x=t5_tiny": ("'model@x=t5_tiny'", WRITE_KEY_VALUE),
    "@model=t5_tiny": ("'@model=t5_tiny'", WRITE_KEY_VALUE),
    "gpus=4)": ("'gpus=4)'", WRITE_KEY_VALUE),
    "gpus=${": ("'gpus=${'", WRITE_KEY_VALUE),
    "gpus='4": ("gpus='4", WRITE_KEY_VALUE),
    "gpus=${nothing}": ("nothing",),
    "é=3": ("'é=3'", WRITE_KEY_VALUE),
    "-m model=gpt_tiny, t5_tiny": ("'model=gpt_tiny,'", WRITE_KEY_VALUE),
    "-m gpus=1,,2": ("'gpus=1,,2'", WRITE_KEY_VALUE),
    "-m gpus=range(1,1)": ("gpus=", "at least one value"),
    # commas without -m, and axes where there can be none
    "strategy=ddp,fsdp": ("strategy=ddp,fsdp", "-m"),
    "gpus=1,2": ("gpus=1,2", "-m"),
    "hardware.memory_limit_gib=0,5": ("hardware.memory_limit_gib=0,5", "-m"),
    "sweep=default gpus=1,2": ("gpus=1,2", "-m"),
    "-m store=a,b": ("store=a,b", "one value"),
    "-m force=true,false": ("force=", "one value"),
    "gpus=[1,2]": ("gpus=[1, 2]", "a whole number"),
    # world sizes
    "gpus=abc": ("gpus=abc", "a whole number"),
    "gpus=0": ("gpus=0 ", AT_LEAST_1),
    "gpus=-1": ("gpus=-1 ", AT_LEAST_1),
    "gpus=2.5": ("gpus=2.5", "a whole number"),
    "gpus=": ("gpus=", "a whole number"),
    "gpus=null": ("gpus=null", "a whole number"),
    "gpus=true": ("gpus=true", "a whole number"),
    "gpus=9": ("gpus=9", "gpus_per_node=8"),
    "gpus=16 hardware=cpu": ("gpus=16", "cluster=local", "at most 8"),
    "gpus=8 hardware=cpu cluster.max_cpu_processes=4": ("gpus=8", "the 4 processes", "cluster.max_cpu_processes"),
    "gpus=3 gpus_per_node=2": ("gpus=3", "gpus_per_node=2"),
    "gpus_per_node=0": ("gpus_per_node=0", AT_LEAST_1),
    "-m gpus=1,abc": ("gpus=abc", "a whole number"),
    # strategies
    "gpus=4 strategy.sharding_factor=3": ("strategy.sharding_factor=3", "gpus=4", "1, 2, 4"),
    "-m gpus=3 strategy=fsdp,fsdp1 strategy.sharding_factor=2": ("strategy.sharding_factor=2", "gpus=3", "1, 3"),
    "strategy.sharding_factor=0": ("strategy.sharding_factor=0", "full, node", "at least 1"),
    "strategy.sharding_factor=-1": ("strategy.sharding_factor=-1", "full, node", "at least 1"),
    "strategy.sharding_factor=half": ("strategy.sharding_factor=half", "full, node"),
    "strategy.sharding_factor=1.5": ("strategy.sharding_factor=1.5", "a whole number"),
    "strategy=ddp strategy.sharding_factor=2 gpus=2": ("strategy.sharding_factor=2", "strategy=ddp", "fsdp"),
    "strategy=ddp strategy.bucket_cap_mb=0": ("strategy.bucket_cap_mb=0", "at least 1"),
    "strategy=ddp strategy.static_graph=-5": ("strategy.static_graph=-5", "true or false or null"),
    "strategy=ddp strategy.bucket_cap_mb=true": ("strategy.bucket_cap_mb=true", "a whole number"),
    "strategy.name=..": ("strategy.name=..", "fsdp, fsdp1"),
    "strategy.name=a/b": ("strategy.name=a/b", "fsdp, fsdp1"),
    "tracker=wandb tracker.name=..": ("tracker.name=..", "wandb"),
    "tracker=wandb tracker.tags=glob(*)": ("tracker.tags=glob(*)", "the values themselves"),
    "-m gpus=interval(1,2)": ("gpus=interval(1,2)", "the values themselves"),
    "strategy=ddp strategy.static_graph=true gradient_accumulation=2": ("strategy.static_graph=true", "null"),
    "strategy=single gpus=2": ("gpus=2", "strategy=single", "ddp, fsdp or fsdp1"),
    "-m strategy=single gpus=2,4": ("gpus=2", "strategy=single", "ddp, fsdp or fsdp1"),
    "strategy=fsdp strategy.backward_prefetch=pre": ("strategy.backward_prefetch=pre", "true or false"),
    "strategy=fsdp1 strategy.backward_prefetch=often": ("strategy.backward_prefetch=often", "pre, post, none"),
    "strategy.reshard_after_forward=maybe": ("strategy.reshard_after_forward=maybe", "true or false"),
    "strategy.blocks_per_unit=0": ("strategy.blocks_per_unit=0", "at least 1"),
    "strategy.cpu_offload=true hardware=cpu": ("strategy.cpu_offload=true", "choose false"),
    "strategy.name=zero": ("strategy.name=zero", "fsdp, fsdp1"),
    # models
    "model=gpt_tiny model.family=nonsense": ("model.family=nonsense", "t5", "module path"),
    "model=gpt_tiny model.family=no.such.module": ("model.family=no.such.module", "t5"),
    "model=gpt_tiny model.family=os.path": ("model.family=os.path", "one subclass of Family"),
    "model=gpt_tiny model.family=.gpt": ("model.family=.gpt", "t5"),
    "model=gpt_tiny model.family=null": ("model.family=null", "bench/models"),
    "model=gpt_tiny model.num_layers=0": ("model.num_layers=0", AT_LEAST_1),
    "model=gpt_tiny model.num_layers=many": ("model.num_layers=many", "a whole number"),
    "model=gpt_tiny model.hidden_size=1e2": ("model.hidden_size=100.0", "a whole number"),
    "model=gpt_tiny model.num_heads=3": ("model.num_heads=3", "a divisor of model.hidden_size=128"),
    "model=gpt_tiny model.attention=flash": ("model.attention=flash", "sdpa, eager"),
    "model=gpt_tiny model.dropout=2": ("model.dropout=2", "at least 0 and below 1"),
    "model=t5_tiny model.dropout=-0.1": ("model.dropout=-0.1", "at least 0 and below 1"),
    "model=gpt_tiny model.name=null": ("model.name=null", "a name"),
    "model=t5_tiny model.decoder_sequence_length=0": ("model.decoder_sequence_length=0", AT_LEAST_1),
    "model=gpt_tiny sequence_length=513": ("sequence_length=513", "2 to model.block_size=512"),
    "model=gpt_tiny sequence_length=1": ("sequence_length=1", "2 to model.block_size=512"),
    "model=t5_tiny sequence_length=0": ("sequence_length=0", AT_LEAST_1),
    "sequence_length=abc": ("sequence_length=abc", "a whole number"),
    # too large to be planned in seconds
    "model=gpt_tiny model.num_layers=1000000": ("model.num_layers=1000000", "at most 512"),
    "model=t5_tiny model.num_encoder_layers=1000000": ("model.num_encoder_layers=1000000", "at most 512"),
    "model=gpt_tiny model.hidden_size=999999999999": ("model.hidden_size=999999999999", "at most 1048576"),
    "batch_size_per_gpu=99999999999": ("batch_size_per_gpu=99999999999", "at most 1000000"),
    "batch_size_per_gpu=1000000 sequence_length=1000000 model=t5_tiny": ("batch_size_per_gpu=1000000", "tokens"),
    "sequence_length=99999999999": ("sequence_length=99999999999", "at most 1048576"),
    "gradient_accumulation=99999999999": ("gradient_accumulation=99999999999", "at most 1024"),
    "gpus=99999999999": ("gpus=99999999999", "at most 131072"),
    "gpus_per_node=99999999999": ("gpus_per_node=99999999999", "at most 131072"),
    "measurement.steps=99999999999": ("measurement.steps=99999999999", "at most 1000000"),
    "sweep.repeats=2147483648": ("sweep.repeats=2147483648", "at most 1000"),
    "-m gpus=range(1,1000000000)": ("gpus=range(1,1000000000)", "at most 100000 values"),
    "-m gpus=shuffle(range(1,1000000000))": ("gpus=shuffle(range(1,1000000000))", "at most 100000 values"),
    "-m seed=range(1,1000) repeat=range(1,1000)": ("998001 runs", "at most 100000"),
    "gpus=" + "9" * 400: ("gpus=999", "(400 characters)", "at most 131072"),
    "gpus=" + "9" * 5000: ("gpus=999", WRITE_KEY_VALUE),
    "seed=" + "[" * 2000: ("seed=[", WRITE_KEY_VALUE),
    # the rest of a run
    "batch_size_per_gpu=0": ("batch_size_per_gpu=0", AT_LEAST_1),
    "batch_size_per_gpu=1e3": ("batch_size_per_gpu=1000.0", "a whole number"),
    "gradient_accumulation=0": ("gradient_accumulation=0", AT_LEAST_1),
    "gradient_accumulation_sync=2": ("gradient_accumulation_sync=2", "true or false"),
    "activation_checkpointing=some": ("activation_checkpointing=some", "none, full, selective"),
    "activation_checkpointing=true": ("activation_checkpointing=true", "none, full, selective"),
    "compile=yes": ("compile=yes", "true or false"),
    "seed=-1": ("seed=-1", "a whole number"),
    "seed=99999999999999999999": (
        "seed=99999999999999999999",
        "at least 0 and at most 9223372036854775807",
    ),
    "repeat=-1": ("repeat=-1", "at least 0"),
    "mode=predct": ("mode=predct", "measure, rehearse, predict"),
    # predictions: of what could never be
    "mode=predict gpus=32768 hardware=a100_80gb": ("gpus=32768", "at most 16384"),
    "mode=predict gpus=0": ("gpus=0 ", AT_LEAST_1),
    "mode=predict gpus=12": ("gpus=12", "gpus_per_node=8"),
    "mode=predict gpus=9 gpus_per_node=4": ("gpus=9", "gpus_per_node=4"),
    "mode=predict batch_size_per_gpu=0": ("batch_size_per_gpu=0", AT_LEAST_1),
    "mode=predict sequence_length=0": ("sequence_length=0",),
    "mode=predict hardware=b100": ("hardware=b100", "a6000, auto, b200"),
    "mode=predict hardware=v100_16gb precision=bf16": ("precision=bf16", "hardware=v100_16gb", "fp32"),
    "mode=predict hardware=v100_32gb precision=tf32": ("precision=tf32", "hardware=v100_32gb", "fp16"),
    "mode=predict precision=tf32": ("precision=tf32", "GPU", "fp32, bf16"),
    "mode=predict hardware=h200 hardware.memory_limit_gib=200": ("hardware.memory_limit_gib=200", "141"),
    "mode=predict gpus=4 strategy.sharding_factor=3": ("strategy.sharding_factor=3", "gpus=4", "1, 2, 4"),
    "mode=predict strategy=single gpus=2": ("gpus=2", "strategy=single", "ddp, fsdp or fsdp1"),
    "mode=predict strategy=ddp gpus=8 strategy.sharding_factor=2": ("strategy.sharding_factor=2", "strategy=ddp"),
    "mode=predict strategy=ddp strategy.backward_prefetch=pre": ("strategy.backward_prefetch ", "strategy=ddp"),
    "mode=predict hardware=a100_80gb gpus=16384 model=gpt_tiny model.hidden_size=4 model.num_heads=1 "
    "model.num_layers=1 model.intermediate_size=4 model.vocabulary_size=8 model.block_size=128": (
        "strategy.sharding_factor=16384",
        "parameters of model=gpt_tiny",
    ),
    "mode=predict search=largest_batch": ("search=largest_batch on a CPU", "hardware.memory_limit_gib"),
    "mode=predict search=largest_batch hardware=gpu": ("search=largest_batch", "hardware=gpu", "memory_limit_gib"),
    "mode=predict skip_oom=true": ("skip_oom=true", "mode=predict", "choose false"),
    "gpus=1 skip_oom=true search=largest_batch": ("skip_oom=true", "search", "choose false"),
    "skip_oom=perhaps": ("skip_oom=perhaps", "true or false"),
    "time_budget_min=0": ("time_budget_min=0", "minutes above 0"),
    "time_budget_min=soon": ("time_budget_min=soon", "minutes above 0"),
    "time_budget_min=5 cluster=slurm": ("time_budget_min=5", "cluster.time_limit_min"),
    "tracker=wandbb": ("tracker=wandbb", "none, wandb"),
    "tracker=wandb tracker.mode=onlin": ("tracker.mode=onlin", "auto, online, offline"),
    "tracker=wandb tracker.mode=disabled": ("tracker.mode=disabled", "auto, online, offline"),
    "tracker=wandb tracker.projct=ours": ("tracker.projct ", "not a field", "tracker.project"),
    "tracker=wandb tracker.project=team/ours": ("tracker.project=team/ours", "128 characters"),
    "tracker=wandb tracker.tags=baseline": ("tracker.tags=baseline", "a list"),
    "tracker=wandb tracker.base_url=example.org": ("tracker.base_url=example.org", "https://"),
    "tracker=wandb tracker.time_limit_s=0": ("tracker.time_limit_s=0", "at least 1"),
    "tracker=wandb tracker.name=tensorboard": ("tracker.name=tensorboard", "mlflow, none, wandb"),
    "tracker.mode=online": ("tracker.mode ", "tracker=none"),
    "-m tracker=none,wandb": ("tracker=none,wandb", "one value"),
    "mode=rehearsal": ("mode=rehearsal", "measure, rehearse, predict"),
    "sweep=single_gpu": ("sweep=single_gpu", "is for cuda", "hardware=cpu"),
    "optimizer.learning_rate=0": ("optimizer.learning_rate=0", "above 0"),
    "optimizer.learning_rate=nan": ("optimizer.learning_rate=nan", "above 0 and at most 1e+38"),
    "optimizer.learning_rate=inf": ("optimizer.learning_rate=inf", "above 0 and at most 1e+38"),
    "optimizer=sgd optimizer.momentum=nan": ("optimizer.momentum=nan", "at least 0 and below 1"),
    "optimizer.keep_gradients=512": ("optimizer.keep_gradients=512", "true or false"),
    "optimizer.learning_rate=fast": ("optimizer.learning_rate=fast", "a number"),
    "optimizer.implementation=cuda": ("optimizer.implementation=cuda", "fused, foreach, for_loop"),
    "optimizer=adamw optimizer.momentum=0.9": ("optimizer.momentum=0.9", "choose 0"),
    "strategy=fsdp optimizer=sgd optimizer.implementation=fused": ("optimizer.implementation=fused", "foreach"),
    "optimizer=sgd optimizer.momentum=1": ("optimizer.momentum=1", "below 1"),
    "precision=bf16 precision.compute=fp64": ("precision.compute=fp64", "fp32, bf16, fp16"),
    "precision=bf16_pure precision.compute=fp32": ("precision.compute=fp32", "bf16"),
    "precision=bf16 precision.tf32=true": ("precision.tf32=true", "choose false"),
    "precision=tf32 hardware=cpu": ("precision=tf32", "GPU", "fp32, bf16"),
    "measurement.steps=0": ("measurement.steps=0", AT_LEAST_1),
    "measurement.steps=1.5": ("measurement.steps=1.5", "a whole number"),
    "measurement.warmup_steps=1": ("measurement.warmup_steps=1", "at least 2"),
    "hardware.device=tpu": ("hardware.device=tpu", "cpu, cuda"),
    "hardware.cpu_threads=0": ("hardware.cpu_threads=0", "at least 1"),
    "hardware=a100_80gb mode=predict hardware.memory_bandwidth_gb_s=-84": ("memory_bandwidth_gb_s=-84", "at least"),
    "hardware=a100_80gb mode=predict hardware.memory_bandwidth_gb_s=0": ("memory_bandwidth_gb_s=0", "at least"),
    "hardware=a100_80gb mode=predict hardware.memory_gb=nan": ("hardware.memory_gb=nan", "a number of GB"),
    "hardware=a100_80gb mode=predict hardware.memory_gb=inf": ("hardware.memory_gb=inf", "a number of GB"),
    "hardware=a100_80gb mode=predict hardware.peak_tflops.bf16=inf": ("hardware.peak_tflops.bf16=inf", "TFLOP/s"),
    "hardware=a100_80gb hardware.peak_tflops.bf16={1:2}": ("hardware.peak_tflops.bf16={1: 2}", "TFLOP/s"),
    "hardware=a100_80gb hardware.speeds.matmul.efficiency.fp16=[1]": ("efficiency.fp16=[1]", "a number"),
    "hardware=a100_80gb hardware.speeds.outside.communicator_gib=inf": ("communicator_gib=inf", "a number of GiB"),
    "precision=fp32 precision.name=x": ("precision.name=x", "precision=NAME"),
    "hardware.memory_limit_gib=-1": ("hardware.memory_limit_gib=-1", "above 0", "null"),
    "hardware.memory_limit_gib=0": ("hardware.memory_limit_gib=0", "above 0", "null"),
    "hardware.memory_limit_gib=lots": ("hardware.memory_limit_gib=lots", "a number of GiB above 0", "null"),
    "hardware.memory_limit_gib=nan": ("hardware.memory_limit_gib=nan", "above 0", "null"),
    "hardware.memory_limit_gib=inf": ("hardware.memory_limit_gib=inf", "above 0", "null"),
    "hardware=h100_80gb": ("hardware=h100_80gb", "hardware=cpu or auto"),
    # how it is carried out
    "search=bogus": ("search=bogus", "none, largest_batch"),
    "search=true": ("search=true", "none, largest_batch"),
    "dry_run=maybe": ("dry_run=maybe", "true, false, script"),
    "dry_run=1": ("dry_run=1", "true, false, script"),
    "force=2": ("force=2", "true or false"),
    "report=html": ("report=html", "true or false"),
    "store=": ("store=", "a folder"),
    "store=null": ("store=null", "a folder"),
    "store=[a]": ("store=", "a folder"),
    "store=/etc/passwd/runs": ("store=/etc/passwd/runs", "a folder that can be written to"),
    "store=/etc/passwd": ("store=/etc/passwd", "a folder that can be written to"),
    "store=/proc/runs": ("store=/proc/runs", "a folder that can be written to"),
    "cluster.time_limit_s=0": ("cluster.time_limit_s=0", "at least 1"),
    "cluster.time_limit_s=-5": ("cluster.time_limit_s=-5", "at least 1"),
    "cluster.time_limit_s=soon": ("cluster.time_limit_s=soon", "a number"),
    "cluster.time_limit_s=nan": ("cluster.time_limit_s=nan", "a number"),
    "cluster.time_limit_s=null": ("cluster.time_limit_s=null", "a number"),
    "cluster.max_cpu_processes=0": ("cluster.max_cpu_processes=0", "at least 1"),
    "cluster.gpus_per_node=abc": ("gpus_per_node=abc", "a whole number"),
    "cluster.launcher=pbs": ("cluster.launcher=pbs", "local"),
    # sweep files
    "sweep.repeats=0": ("sweep.repeats=0", AT_LEAST_1),
    "sweep.repeats=two": ("sweep.repeats=two", AT_LEAST_1),
    "sweep.grids=[]": ("sweep=default", "grids"),
    "sweep.grids=3": ("sweep=default", "grids"),
    "sweep.grids=[3]": ("sweep=default", "grid"),
    "sweep.grids=[{axis:{gpus:[1]}}]": ("sweep=default", "axis", "fixed, axes, exclude"),
    "sweep.grids=[{axes:{gpus:1}}]": ("sweep=default", "axis gpus", "list"),
    "sweep.grids=[{axes:{gpus:[]}}]": ("sweep=default", "axis gpus", "list"),
    "sweep.grids=[{axes:3}]": ("sweep=default", "axes", "mapping"),
    "sweep.grids=[{fixed:3}]": ("sweep=default", "fixed", "mapping"),
    "sweep.grids=[{exclude:[3]}]": ("sweep=default", "exclude", "mapping"),
    "sweep.grids=[{exclude:{gpus:1}}]": ("sweep=default", "exclude", "list"),
    "sweep.grids=[{axes:{gpu:[1]}}]": ("gpu ", "not a field", "gpus"),
    "sweep.grids=[{axes:{model:[t5_tny]}}]": ("t5_tny", MODELS),
    "sweep.grids=[{axes:{gpus:[1]},exclude:[{gpus:1}]}]": ("sweep=default", "no run"),
}


@pytest.fixture(autouse=True)
def nothing_begins(monkeypatch, tmp_path):
    """In an empty folder on a machine without GPUs, where launching is a failure."""

    def launch(*_args, **_options):
        pytest.fail("something was launched")

    monkeypatch.setattr(LocalLauncher, "launch", launch)
    monkeypatch.setattr(run_sweep, "detect_device", lambda: DetectedDevice("cpu", "a processor", 0))
    monkeypatch.chdir(tmp_path)


def read_refusal(capsys, *arguments: str) -> str:
    """The one sentence that a command line is refused with."""
    try:
        code = sweep.main(list(arguments))
    except SystemExit as exit:  # argparse
        code = exit.code
    shown = capsys.readouterr()
    assert code == 2, shown
    assert shown.out == ""
    lines = shown.err.splitlines()
    assert len(lines) == 1, shown.err
    return lines[0]


@pytest.mark.parametrize("typed", BAD_COMMAND_LINES)
def test_a_mistake_earns_one_sentence_and_nothing_else(typed, capsys, tmp_path):
    sentence = read_refusal(capsys, *typed.split())
    for part in BAD_COMMAND_LINES[typed]:
        assert part in sentence, sentence
    assert sentence.rstrip(")").endswith(".")
    assert "Traceback" not in sentence
    assert "Error" not in sentence
    assert not list(tmp_path.iterdir()), "something was written"


def test_an_unknown_option_of_the_command_itself_is_refused(capsys, tmp_path):
    with pytest.raises(SystemExit) as exit:
        sweep.main(["--gpus=4"])
    assert exit.value.code == 2
    shown = capsys.readouterr().err
    assert "--gpus=4" in shown
    assert "key=value" in shown
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("missing", ["a compiler", "headers"])
@pytest.mark.parametrize(("setting", "other"), [("compile=true", "compile=false"), ("loss=compiled", "loss=whole")])
def test_compiling_without_what_it_needs_is_refused(missing, setting, other, capsys, monkeypatch):
    if missing == "a compiler":
        monkeypatch.setattr(shutil, "which", lambda name: None)
    else:
        monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
        monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": "/nowhere"})
    sentence = read_refusal(capsys, "model=gpt_tiny", "hardware=cpu", setting)
    assert setting in sentence
    assert other in sentence
    assert ("compiler" if missing == "a compiler" else "headers") in sentence


@pytest.mark.slow
def test_what_one_run_cannot_do_leaves_the_others_of_a_sweep(capsys):
    code = sweep.main(
        [
            "-m",
            "model=t5_tiny",
            "strategy=ddp,single",
            "gpus=1,2",
            "precision=fp32,tf32",
            "hardware=cpu",
            "dry_run=true",
        ]
    )
    shown = capsys.readouterr().out
    assert code == 0
    assert "3 runs, 0 done, 3 to run, 5 impossible" in shown
    assert "gpus=2 is not valid for strategy=single" in shown
    assert "precision=tf32 needs an NVIDIA GPU" in shown


@pytest.mark.parametrize(
    ("typed", "reason"),
    [
        (
            "strategy=tensor_parallel strategy.degree=2 strategy.data_parallel=none gpus=2,4",
            "strategy.data_parallel=none is not valid",
        ),
        (
            "strategy=tensor_parallel strategy.degree=2 gpus=4 strategy.data_parallel=ddp,fsdp "
            "strategy.reshard_after_forward=false",
            "strategy.reshard_after_forward=false is not valid: choose null",
        ),
        (
            "strategy=accelerate gpus=2 strategy.backend=ddp,fsdp strategy.reshard_after_forward=false",
            "strategy.backend=ddp of strategy=accelerate has no such knob",
        ),
        ("strategy=deepspeed gpus=2 strategy.stage=0,1 strategy.overlap_comm=true", "strategy.overlap_comm=true is"),
        (
            "strategy=deepspeed gpus=2 strategy.stage=3 strategy.offload_optimizer=none,nvme",
            "strategy.nvme_path=null is not valid",
        ),
        (
            "strategy=deepspeed gpus=2 strategy.stage=3 strategy.offload_optimizer=cpu,nvme strategy.nvme_path=/nvme",
            "strategy.nvme_path=/nvme is not valid",
        ),
    ],
)
def test_knobs_that_do_not_go_together_leave_the_others_of_a_sweep(typed, reason, capsys):
    where = ("model=t5_tiny", "mode=predict", "hardware=a100_80gb", "dry_run=true")  # needs no library
    code = sweep.main(["-m", *where, *typed.split()])
    shown = capsys.readouterr()
    assert code == 0, shown.err
    assert "1 to run, 1 impossible" in shown.out
    assert reason in shown.out


def test_a_valid_command_line_with_one_mistake_runs_nothing_of_it(capsys, tmp_path):
    sentence = read_refusal(capsys, "-m", "model=gpt_tiny", "batch_size_per_gpu=1,2,-3", "store=somewhere")
    assert "batch_size_per_gpu=-3" in sentence
    assert not list(tmp_path.iterdir())


def test_a_store_on_a_file_is_refused_without_touching_the_file(capsys, tmp_path):
    taken = tmp_path / "taken"
    taken.write_text("a file")
    for store in (taken, taken / "below"):
        sentence = read_refusal(capsys, "model=gpt_tiny", f"store={store}")
        assert sentence.startswith(f"store={store} is not valid: choose a folder that can be written to (")
    assert taken.read_text() == "a file"


def test_a_store_one_may_not_look_into_is_refused(capsys, monkeypatch):
    def exists(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", exists)
    sentence = read_refusal(capsys, "model=gpt_tiny", "store=somewhere")
    assert sentence == "store=somewhere is not valid: choose a folder that can be read (Permission denied)."


@pytest.mark.parametrize("force", ["false", "true"])
def test_a_run_of_the_store_one_may_not_look_into_is_refused(force, capsys, monkeypatch):
    def listdir(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "listdir", listdir)
    sentence = read_refusal(capsys, "model=gpt_tiny", "store=somewhere", f"force={force}")
    start = "store=somewhere is not valid: choose a folder that can be read (Permission denied: somewhere/"
    assert sentence.startswith(start)
