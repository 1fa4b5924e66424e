"""specs/plans/launches.py: the header that C and CUDA code include is what Python says."""

from blockscale.specs.plans import launches


def test_header_is_up_to_date():
    assert launches.HEADER.read_text() == launches.header(), "call launches.write()"


def test_parts_follow_each_other():
    """Each part begins at a multiple of 256 bytes, and counts tokens, slots and tiles."""
    parts = [launches.Part("a", token=3), launches.Part("b", slot=2, tile=16, fixed=1)]
    assert parts[0].size(100, 0, 0) == 512
    assert parts[1].size(0, 100, 10) == 512
    assert launches.workspace_bytes(parts, 100, 100, 10) == 1024
