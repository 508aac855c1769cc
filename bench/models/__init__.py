"""Model families: one file each. `family` in a model's YAML names the file, or a module path of your own."""

from bench.models.base import Batch, Family, FlopCount, load_family

__all__ = ["Batch", "Family", "FlopCount", "load_family"]
