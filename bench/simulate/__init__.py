"""Everything `predicted`: traces of the real model, a simulated schedule, a model of kernels and networks."""
