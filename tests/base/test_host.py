"""CPU features, read from text in the format of /proc/cpuinfo."""

from itertools import pairwise

import pytest

from blockscale.base import host
from blockscale.base.targets import CPU_TARGETS, cpu, same_width

AVX2 = "cx16 lahf_lm popcnt pni ssse3 sse4_1 sse4_2 avx avx2 bmi1 bmi2 f16c fma abm movbe xsave"
AVX512 = f"{AVX2} avx512f avx512bw avx512cd avx512dq avx512vl"


def cpuinfo(flags: str) -> str:
    core = f"processor\t: 0\nmodel name\t: Test CPU 9000\nflags\t\t: {flags}\nbugs\t\t: none\n"
    return f"{core}\n{core}"


@pytest.mark.parametrize(
    ("flags", "level"),
    [
        (f"{AVX512} avx512_bf16", "avx512bf16"),
        (AVX512, "avx512"),
        (f"{AVX2} avx512_bf16", "avx2"),
        (AVX512.replace(" avx512vl", ""), "avx2"),
        (AVX2, "avx2"),
        (AVX2.replace(" fma", ""), "plain"),
        ("", "plain"),
    ],
)
def test_level_is_the_widest_that_is_complete(flags: str, level: str):
    assert host.level(host.features(cpuinfo(flags))) == level


@pytest.mark.parametrize(
    ("made_by", "level"),
    [("AuthenticAMD", "avx512bf16"), ("GenuineIntel", "avx512"), ("", "avx512bf16")],
)
def test_bfloat16_dots_are_for_those_that_are_fast(made_by: str, level: str):
    text = f"vendor_id\t: {made_by}\n{cpuinfo(f'{AVX512} avx512_bf16')}"
    assert host.level(host.features(text), host.vendor(text)) == level
    assert host.level([], host.vendor(text)) == "plain"


def test_level_of_this_machine_is_among_its_features():
    assert host.features() >= set(CPU_TARGETS[host.level()].features)


def test_other_architectures_are_plain():
    text = "processor : 0\nFeatures : fp asimd evtstrm\n"
    assert host.features(text) == {"fp", "asimd", "evtstrm"}
    assert host.level(host.features(text)) == "plain"


def test_cpu_model():
    assert host.cpu_model(cpuinfo("")) == "Test CPU 9000"
    assert host.cpu_model("nothing here") != ""


def test_required_features():
    assert set(cpu("avx512bf16").features) == {*AVX512.split(), "avx512_bf16"}
    assert set(cpu("avx512").features) == set(AVX512.split())
    assert set(cpu("avx2").features) == set(AVX2.split())
    assert cpu("plain").features == ()


def test_levels_are_ordered():
    """Widest first, each needing all that the next one needs."""
    levels = [set(row.features) for row in CPU_TARGETS.values()]
    assert all(wide > narrow for wide, narrow in pairwise(levels))


def test_levels_of_the_same_vector_width():
    """A log of one serves the other: itself first."""
    assert same_width("avx512bf16") == ("avx512bf16", "avx512")
    assert same_width("avx512") == ("avx512", "avx512bf16")
    assert same_width("avx2") == ("avx2",)
    assert same_width("plain") == ("plain",)


def test_bad_level():
    with pytest.raises(ValueError, match=r"level='sse9' is not one of .*avx512bf16.*avx2"):
        cpu("sse9")
