"""Llama for fsdp-bench."""
