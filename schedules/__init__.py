"""HOW it is computed: one file per architecture, Schedule -> None.

The decisions that a schedule takes (``choose``, a ``sample_*`` call each) are its search space.
"""

if __name__ != "blockscale.schedules":
    raise ImportError(
        "import 'blockscale.schedules', not 'schedules': "
        "a second copy would register its intrinsics and rules twice"
    )
