"""What has no knowledge of kernels or operators: argument checks, strides, array libraries, progress, traces."""
