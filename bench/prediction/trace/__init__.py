"""What one training step computes and allocates, recorded with fake tensors, and the same at other batch sizes."""
