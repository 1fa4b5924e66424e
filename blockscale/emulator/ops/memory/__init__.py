"""Loads, stores and atomics; release and acquire through memory."""
