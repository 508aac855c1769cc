"""FSDP1: its strategy, and what it stores and sends."""
