"""A model of PyTorch's CUDA caching allocator: what a step's allocations reserve, without torch and without a GPU."""
