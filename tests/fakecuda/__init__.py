"""A CUDA that is not there, for tests on machines without a GPU: see README.md."""
