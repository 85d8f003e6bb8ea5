"""Products of matrices, and linear layers with what follows them."""
