"""FSDP2: its strategy, and what it stores and sends."""
