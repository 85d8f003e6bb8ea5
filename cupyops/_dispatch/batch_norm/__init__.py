"""batch_norm and batch_norm_act."""
