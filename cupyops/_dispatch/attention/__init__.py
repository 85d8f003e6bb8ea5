"""Attention, over whole sequences and of a few queries against a cache."""
