"""Model families: one file each. `family` in a model's YAML names the file, or a module path of your own.

What a family says of its models needs no torch, whose import takes longer than most commands: it is imported where a
model is built or run.
"""

import logging

from bench.models.base import Batch, Family, FlopCount, load_family

__all__ = ["Batch", "Family", "FlopCount", "load_family"]

for _name in ("torchao", "torch.utils._pytree", "transformers"):
    # transformers imports torchao where it is installed, which warns of kernels that are for other devices.
    logging.getLogger(_name).setLevel(logging.ERROR)
