"""Post-local SGD for fsdp-bench."""
