"""The demo: a real sentence encoder with 4-bit weights, from safetensors to a report.

`python -m blockscale.demo` quantises, tunes and builds; it then starts `blockscale.demo.infer`, a
second process that never imports tvm, and writes the report from what that process measured.
"""
