"""The hazards, by family; each is a small function that tries one thing on a `Case`."""
