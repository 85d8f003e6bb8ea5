"""What several operators share on the host: the other half of cuda_src/common, by the same names where there are two."""
