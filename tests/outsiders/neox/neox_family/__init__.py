"""GPT-NeoX for fsdp-bench."""
