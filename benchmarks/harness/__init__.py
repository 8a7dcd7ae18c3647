"""What the benchmarks share: fair measurements of a save or a load, not the things that are measured.

Each measurement runs in a child forked from the benchmark, so that memory, CPU seconds and allocator state start
clean and equal for every contender, while the tensors themselves are shared and need not be built again.
"""
