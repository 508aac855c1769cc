"""What of a model is trained: all of it, or adapters beside frozen weights, which may be quantised."""

from bench.finetune.base import Finetune, FullFinetune, LoRA, QLoRA, load_finetune

__all__ = ["Finetune", "FullFinetune", "LoRA", "QLoRA", "load_finetune"]
