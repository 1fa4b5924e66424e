"""WHICH choice won, on which machine: <op>/<target>/ with MetaSchedule's JSON and meta.json.

Written by ``blockscale.tuner`` only.  Read through
``importlib.resources.files("blockscale.tuning_logs")``.
"""
