"""What is said of names that no kernel has."""

import pytest

from blockscale.base import words
from blockscale.specs import NAME_EXAMPLES, SPECS, Spec


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("lienar_nvfp4_n384_k384", "linear_nvfp4_n384_k384"),
        ("lienar_nvfp4_n384_k384_fp32", "linear_nvfp4_n384_k384_f32"),
        ("linear_nvfp4_n384_k384_float32", "linear_nvfp4_n384_k384_f32"),
        ("linear_nvfp4_k384_n384", "linear_nvfp4_n384_k384"),
        ("LINEAR_NVFP4_N384_K384", "linear_nvfp4_n384_k384"),
        ("linear_nvfp4_n384_k384_bf16 ", "linear_nvfp4_n384_k384_bf16"),
        ("quantise_nvfp4_f32", "quantize_nvfp4_f32"),
        ("dequantise_nvfp4_f32", "dequantize_nvfp4_f32"),
        ("quantize_nvfp4_bf16_128x4", "quantize_nvfp4_128x4_bf16"),
        ("relayout_128x5", "relayout_128x4"),
        (
            "fusd_moe_int4g128z_e8_k2_h1024_i2816_swiglu_bf16",
            "fused_moe_int4g128z_e8_k2_h1024_i2816_swiglu_bf16",
        ),
    ],
)
@pytest.mark.parametrize("parse", [Spec.parse, Spec.parse_all])
def test_what_was_meant(name, meant, parse):
    with pytest.raises(ValueError, match="names no kernel") as error:
        parse(name)
    assert str(error.value) == f"{name!r} names no kernel; did you mean {meant}?"
    assert Spec.parse_all(meant)


@pytest.mark.parametrize("example", NAME_EXAMPLES)
def test_every_family_is_recognised(example):
    """A letter too many, capitals: the name comes back, whatever the family."""
    for wrong in (example[0] + example, example.upper()):
        with pytest.raises(ValueError, match="names no kernel") as error:
            Spec.parse(wrong)
        assert str(error.value).endswith(f"did you mean {example}?")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("linear_nvfp4_n384_k380", "Linear: k=380 is not a multiple of 16"),
        ("linear_mxfp4_n384_k48_bf16", "Linear: k=48 is not a multiple of 32"),
        ("mm_nvfp4_n4095_k7168", "MmFp4: n=4095 is not a multiple of 8"),
        ("rmsnorm_nvfp4_h4100", "NormQuantize: hidden=4100 is not a multiple of 16"),
        ("fused_moe_nvfp4_e8_k2_h1000_i2816_swiglu", "hidden=1000 is not a multiple of 16"),
        ("moe_route_e256_k300_softmax", "top_k=300 is more than 64"),
        ("edgellm_up_h100_i1856", "hidden=100 is not a multiple of 64"),
        ("int4_mm_plain_n63_k64_g32_a16", "n=63 is odd"),
    ],
)
def test_sizes_are_refused_by_their_rule(name, sentence):
    """With the dtype or without: a name of the right form is never called no kernel's."""
    with pytest.raises(ValueError, match=sentence):
        Spec.parse_all(name)


@pytest.mark.parametrize("name", ["", "xyz", "linear", "linear_nvfp4_n384", "_" * 999, "a" * 9999])
def test_few_examples(name):
    """Five at most, the nearest first."""
    with pytest.raises(ValueError, match="names no kernel; names look like") as error:
        Spec.parse_all(name)
    said = str(error.value)
    assert "'blockscale list'" in said
    listed = said.partition("names look like ")[2].partition(";")[0].split(", ")
    assert len(listed) == words.SHOWN
    assert set(listed) <= {*NAME_EXAMPLES}
    if name.startswith("linear"):
        assert listed[0].startswith("linear")


def test_choices():
    """The likely one is named, and never more than five; they keep their types."""
    assert words.choose("nvpf4", ["nvfp4", "mxfp4"]) == (
        "choose one of 'nvfp4', 'mxfp4' (did you mean 'nvfp4'?)"
    )
    assert words.choose("gelu", ["relu2", "gelu_tanh"]).endswith("(did you mean 'gelu_tanh'?)")
    assert words.choose(16, (32, 64)) == "choose one of 32, 64"
    assert words.choose(["x"], (None, True)) == "choose one of None, True"
    said = words.choose("linaer", SPECS)
    assert said.count("'") == 2 * (words.SHOWN + 1)
    assert said.endswith(f", ... ({len(SPECS)} in all) (did you mean 'linear'?)")


def test_missing_fields():
    with pytest.raises(ValueError, match=r"Linear: the fields \['k'\] are missing"):
        Spec.from_json({"op": "linear", "n": 3})
