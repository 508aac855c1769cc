"""Reference benchmark suite for FSDP against DDP: measure, compare and report training runs."""
