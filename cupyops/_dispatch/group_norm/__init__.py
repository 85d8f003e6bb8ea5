"""group_norm."""
