"""One rank's step simulated: streams, the caching allocator, and the memory that comes of it."""
