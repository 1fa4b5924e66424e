"""WHAT is computed: one file per op, spec -> PrimFunc in plain loops, the same for every target."""

if __name__ != "blockscale.tir":
    raise ImportError(
        "import 'blockscale.tir', not 'tir': a second copy would register its intrinsics twice"
    )

from blockscale.tir import script

script.install()
