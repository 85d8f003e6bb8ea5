"""An operator from its reference and its launches: routes, derivation, arrays in and out."""
