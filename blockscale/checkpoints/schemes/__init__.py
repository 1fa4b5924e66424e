"""Which tensors make up which weight."""
