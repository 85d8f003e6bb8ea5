"""layer_norm, rms_norm and add_rms_norm."""
