"""Settings."""

# Shorter runs are more calls of tensor operations: on a CPU a gather takes 7 % longer with half as
# many values, 27 % with a quarter, and no less with twice as many (docs/benchmarks.md has the job).
MAX_CHUNK_VALUES = 1 << 18
