"""What of a model is trained: all of it, or adapters beside frozen weights, which may be quantised. One file each."""

from bench.finetune.base import Finetune, list_finetunes, load_finetune
from bench.finetune.full import FullFinetune

__all__ = ["Finetune", "FullFinetune", "list_finetunes", "load_finetune"]
