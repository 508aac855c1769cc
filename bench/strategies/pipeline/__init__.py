"""Pipeline parallelism: the strategy, its schedule, the pipelined model and its step plans."""
