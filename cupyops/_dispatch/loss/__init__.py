"""Losses over classes, after a linear layer too."""
