"""The parts of `blockscale.tune`: search space, cost model, worker processes, records, progress."""
