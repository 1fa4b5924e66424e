"""Measurements on this machine; never shipped.  ``make bench`` runs `bench.cpu`."""
