"""HOW it is computed: one file per architecture, Schedule -> None.

The ``sample_*`` calls of a schedule are its search space.
"""

if __name__ != "blockscale.schedules":
    raise ImportError(
        "import 'blockscale.schedules', not 'schedules': "
        "a second copy would register its intrinsics and rules twice"
    )
