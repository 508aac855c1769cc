"""From shapes and bytes to seconds: kernels, collectives, and what a rank does besides."""
