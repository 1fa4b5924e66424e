"""GEMMs by block-scaled mma.sync: what of `lower.pipe` is different without tensor memory."""
