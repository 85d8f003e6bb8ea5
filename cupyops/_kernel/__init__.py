"""A CUDA kernel from its text to its launch, and what is built on launches alone: CUDA graphs, notebook cells."""
