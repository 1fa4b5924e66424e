"""The parts of `tuning.tuner`: space, cost model, worker processes, records, progress."""
