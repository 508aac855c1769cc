"""Everything predicted: traces with fake tensors, costs in seconds, a simulated step, the cache."""
