"""Linear layers and GEMMs."""
