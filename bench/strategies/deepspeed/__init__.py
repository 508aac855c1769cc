"""DeepSpeed: its strategy, and what each ZeRO stage stores and sends."""
