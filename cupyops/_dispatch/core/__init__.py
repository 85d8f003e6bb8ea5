"""Common parts of all families: forms and how they are chosen, GPUs, rows, sharding."""
