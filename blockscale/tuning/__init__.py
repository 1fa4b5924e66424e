"""The parts of `blockscale.tuner`: space, cost model, worker processes, records, progress."""
