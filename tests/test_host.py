"""CPU features, read from text in the format of /proc/cpuinfo."""

import pytest

from blockscale import host

AVX2 = "cx16 lahf_lm popcnt pni ssse3 sse4_1 sse4_2 avx avx2 bmi1 bmi2 f16c fma abm movbe xsave"
AVX512 = f"{AVX2} avx512f avx512bw avx512cd avx512dq avx512vl"


def cpuinfo(flags: str) -> str:
    core = f"processor\t: 0\nmodel name\t: Test CPU 9000\nflags\t\t: {flags}\nbugs\t\t: none\n"
    return f"{core}\n{core}"


@pytest.mark.parametrize(
    ("flags", "level"),
    [
        (AVX512, "avx512"),
        (AVX512.replace(" avx512vl", ""), "avx2"),
        (AVX2, "avx2"),
        (AVX2.replace(" fma", ""), "plain"),
        ("", "plain"),
    ],
)
def test_level_is_the_widest_that_is_complete(flags: str, level: str):
    assert host.level(host.features(cpuinfo(flags))) == level


def test_level_of_this_machine_is_among_its_features():
    assert host.features() >= set(host.required_features(host.level()))


def test_other_architectures_are_plain():
    text = "processor : 0\nFeatures : fp asimd evtstrm\n"
    assert host.features(text) == {"fp", "asimd", "evtstrm"}
    assert host.level(host.features(text)) == "plain"


def test_cpu_model():
    assert host.cpu_model(cpuinfo("")) == "Test CPU 9000"
    assert host.cpu_model("nothing here") != ""


def test_bf16_dot():
    assert host.has_bf16_dot(host.features(cpuinfo(f"{AVX512} avx512_bf16")))
    assert not host.has_bf16_dot(host.features(cpuinfo(AVX512)))
    assert "avx512_bf16" in host.required_features("avx512", bf16_dot=True)


def test_required_features():
    assert set(host.required_features("avx512")) == set(AVX512.split())
    assert set(host.required_features("avx2")) == set(AVX2.split())
    assert host.required_features("plain") == ()


def test_bad_level():
    with pytest.raises(ValueError, match=r"level='sse9' is not one of .*avx2"):
        host.required_features("sse9")
    with pytest.raises(ValueError, match="level='avx2' has no BF16 dot product"):
        host.required_features("avx2", bf16_dot=True)
