"""FlashInfer's quantisers of a tensor, and its SiLU that ends in NVFP4."""

from __future__ import annotations

import torch
from torch.compiler import is_compiling

from blockscale.compat.flashinfer import recipes
from blockscale.compat.flashinfer.errors import public
from blockscale.compat.flashinfer.recipes import UNSET, NVFP44Over6Config
from blockscale.compat.flashinfer.scales import (
    DTYPES,
    SfLayout,
    contiguous,
    float32,
    shuffle_matrix_a,
    shuffle_matrix_sf_a,
)
from blockscale.ops import checks
from blockscale.ops.fused.act import ActOp

Tensor = torch.Tensor

_FI = "flashinfer"
_U8 = torch.uint8
_QUANTIZE = ActOp("flashinfer.fp4_quantize", "none", False, _FI, _U8, flat=False)
_EPILOGUE = 128
_LAYOUTS = {
    SfLayout.layout_128x4: "128x4",
    SfLayout.layout_8x4: "8x4",
    SfLayout.layout_linear: "linear",
}
_SILU = ActOp("flashinfer.silu_and_mul_nvfp4_quantize", "silu", False, _FI, _U8, flat=False)


BACKENDS = ("cuda", "cute-dsl")
"""FlashInfer's kernels, by their names; "cake" has rows' own scales alone."""


@public
def fp4_quantize(
    input: Tensor,
    global_scale: Tensor | None = None,
    sf_vec_size: int = 16,
    sf_use_ue8m0: bool = False,
    is_sf_swizzled_layout: bool = True,
    is_sf_8x4_layout: bool = False,
    is_global_scale_inversed: bool = False,
    enable_pdl: bool | None = None,
    backend: str = "cuda",
    nvfp4_4over6: NVFP44Over6Config | None = UNSET,
) -> tuple[Tensor, Tensor]:
    """Return FP4 codes [..., K / 2] and block scales of ``input * global_scale``, both uint8.

    Args:
        input: [..., K], two dimensions or more, bfloat16, float16 or float8_e4m3fn; a matrix that
            lies in memory column by column is quantised along its columns, and the results are
            transposed views.  What FP8 stands for is ``input * 6 / global_scale``.
        global_scale: one element, or one per row; needed for E4M3 scales, ignored for UE8M0 but
            for FP8 input, where None is 1.
        sf_vec_size: elements per block scale, 16 or 32.
        sf_use_ue8m0: UE8M0 scales (with 32), else E4M3 (with 16).
        is_sf_swizzled_layout: scales [ceil_to(rows, 128), ceil_to(K / sf_vec_size, 4)] in the
            128x4 layout, else linear [rows, K / sf_vec_size].
        is_sf_8x4_layout: the 8x4 layout instead, rows padded to a multiple of 8.
        is_global_scale_inversed: use the reciprocal of ``global_scale``.
        enable_pdl: as in `blockscale.add_rmsnorm_fp4quant`.
        backend: "cuda" or "cute-dsl", which are one kernel here.
        nvfp4_4over6: how each block chooses among two scales; None: it does not; left out: as the
            environment says (`recipes`).

    Raises:
        NotImplementedError: another sf_vec_size.
        TypeError: an argument that is no tensor, or of another dtype; no recipe.
        ValueError: (sf_vec_size, sf_use_ue8m0) is no pair; no global scale; shapes; an unknown
            backend; a recipe with UE8M0 scales or FP8 input.
    """
    where = _QUANTIZE.name
    if sf_vec_size not in (16, 32):
        raise NotImplementedError(f"{where}: sf_vec_size={sf_vec_size}; choose 16 or 32")
    if (sf_vec_size == 32) != bool(sf_use_ue8m0):
        raise ValueError(
            f"{where}: sf_vec_size={sf_vec_size} does not go with sf_use_ue8m0={sf_use_ue8m0}; "
            "choose 16 and False (NVFP4), or 32 and True (MXFP4)"
        )
    checks.choice(where, "backend", backend, BACKENDS)
    checks.tensor(where, "input", contiguous(input), DTYPES, dims=2)
    recipe = _recipe(where, nvfp4_4over6, sf_use_ue8m0, input, backend)
    fp8 = input.dtype == torch.float8_e4m3fn
    g = None
    if global_scale is not None and (fp8 or not sf_use_ue8m0):
        g = float32(where, "global_scale", global_scale, input)
    if g is None and not sf_use_ue8m0:
        raise ValueError(
            f"{where}: global_scale is missing; pass one, for example 448 * 6 / input.abs().max()"
        )
    if g is not None and is_global_scale_inversed:
        g = 1.0 / g
    columns = input.stride(-2) == 1 and input.shape[-1] > 1 and not input.is_contiguous()
    x = contiguous(input.transpose(-2, -1) if columns else input)
    layout = "8x4" if is_sf_8x4_layout else "128x4"
    layout = layout if is_sf_swizzled_layout else "linear"
    scaling = "one" if g is None or g.numel() == 1 else "rows"
    options = sf_vec_size, None, layout, enable_pdl, scaling, recipes.searched(recipe)
    packed, scale = _QUANTIZE.run(options, (x, None, None, None, g, ()))
    scale = scale.view(_U8)
    scale = scale.reshape(-1, scale.shape[-1])
    return (packed.transpose(-2, -1), scale.transpose(-2, -1)) if columns else (packed, scale)


def _recipe(
    where: str, setting: NVFP44Over6Config | None, ue8m0: bool, x: Tensor, backend: str
) -> NVFP44Over6Config | None:
    """Return the recipe of a call; UE8M0 scales have none and leave the environment unread."""
    if not ue8m0:
        return recipes.of_call(where, setting, x, strict=backend != "cuda")
    if setting is not UNSET and setting is not None:
        raise ValueError(
            f"{where}: nvfp4_4over6 chooses among E4M3 scales, but sf_use_ue8m0=True; leave it out"
        )
    return None


@public
def nvfp4_quantize(
    a: Tensor,
    a_global_sf: Tensor | float,
    sfLayout: SfLayout = SfLayout.layout_128x4,
    do_shuffle: bool = False,
    sf_vec_size: int = 16,
    enable_pdl: bool | None = None,
    backend: str = "cuda",
    per_token_activation: bool = False,
    expanded_idx_to_permuted_idx: Tensor | None = None,
    out_scale: Tensor | None = None,
    nvfp4_4over6: NVFP44Over6Config | None = UNSET,
) -> tuple[Tensor, ...]:
    """Return NVFP4 codes [M, K / 2] and scales (2-D, in ``sfLayout``) of ``a * a_global_sf``.

    Args:
        a: [M, K] bfloat16, float16 or float8_e4m3fn.
        a_global_sf: multiplies; with ``per_token_activation`` the base, see there.
        sfLayout: of the block scales.
        do_shuffle: rows of codes and scales in the order of `shuffle_matrix_a` with 128; M must be
            a multiple of 128, and the layout 128x4.
        sf_vec_size: 16.
        enable_pdl: as in `blockscale.add_rmsnorm_fp4quant`.
        backend: "cuda", "cute-dsl", or "cake" with rows' own scales.
        per_token_activation: find the global scale of each row: its largest magnitude times the
            base (`make_nvfp4_global_scale`) is the third result, [M] float32, and its reciprocal
            multiplies the row.
        expanded_idx_to_permuted_idx: [M] int32, with "cuda" and rows' own scales; rows that it
            does not name hold nothing that FlashInfer promises.
        out_scale: a number by which the third result is multiplied; not with "cuda".
        nvfp4_4over6: as in `fp4_quantize`.

    Raises:
        NotImplementedError: FP8 input with rows' own scales.
        ValueError, TypeError: as `fp4_quantize`; options that do not go together; a base that is
            not the recipe's.
    """
    where = "flashinfer.nvfp4_quantize"
    _check_together(where, backend, per_token_activation, sf_vec_size, out_scale)
    given = expanded_idx_to_permuted_idx is not None
    if given and not (per_token_activation and backend == "cuda"):
        raise ValueError(
            f"{where}: expanded_idx_to_permuted_idx needs per_token_activation=True and "
            "backend='cuda'; leave it out"
        )
    layout = SfLayout(sfLayout)
    if do_shuffle and layout != SfLayout.layout_128x4:
        raise ValueError(
            f"{where}: do_shuffle=True needs sfLayout=SfLayout.layout_128x4, not {layout!r}"
        )
    plain = SfLayout.layout_linear if do_shuffle else layout
    made: tuple[Tensor, ...]
    if per_token_activation:
        if given:
            expected = (torch.int32,)
            checks.tensor(
                where, "expanded_idx_to_permuted_idx", expanded_idx_to_permuted_idx, expected
            )
        made = _per_token(where, a, a_global_sf, plain, enable_pdl, backend, nvfp4_4over6)
        if out_scale is not None:
            made = *made[:2], made[2] * float32(where, "out_scale", out_scale, a)
    else:
        made = fp4_quantize(
            a,
            float32(where, "a_global_sf", a_global_sf, a),
            sf_vec_size,
            False,
            plain != SfLayout.layout_linear,
            plain == SfLayout.layout_8x4,
            enable_pdl=enable_pdl,
            backend=backend,
            nvfp4_4over6=nvfp4_4over6,
        )
    if not do_shuffle:
        return made
    codes, scale, *row = made
    high, wide = checks.padded_shape(*scale.shape)
    return (
        shuffle_matrix_a(codes, _EPILOGUE),
        shuffle_matrix_sf_a(scale, _EPILOGUE).reshape(high, wide),
        *(shuffle_matrix_a(part[:, None], _EPILOGUE)[:, 0] for part in row),
    )


def _check_together(
    where: str, backend: str, per_token: bool, sf_vec_size: int, out_scale: object
) -> None:
    """ValueError for options that do not go together."""
    checks.choice(where, "backend", backend, (*BACKENDS, "cake"))
    rules = (
        (sf_vec_size != 16, f"sf_vec_size={sf_vec_size}, but NVFP4 has 16"),
        (backend == "cake" and not per_token, "backend='cake' needs per_token_activation=True"),
        (out_scale is not None and not per_token, "out_scale needs per_token_activation=True"),
        (out_scale is not None and backend == "cuda", "out_scale does not go with backend='cuda'"),
    )
    for broken, rule in rules:
        if broken:
            raise ValueError(f"{where}: {rule}; leave it out")


def _per_token(
    where: str,
    a: Tensor,
    base: Tensor | float,
    layout: SfLayout,
    enable_pdl: bool | None,
    backend: str,
    setting: NVFP44Over6Config | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, block scales (2-D) and the scales of rows, which ``base`` multiplies."""
    if isinstance(a, Tensor) and a.dtype == torch.float8_e4m3fn:
        raise NotImplementedError(
            f"{where}: per_token_activation=True needs bfloat16 or float16, not float8_e4m3fn"
        )
    checks.tensor(where, "a", contiguous(a), checks.SIXTEEN_BIT, dims=2)
    recipe = recipes.of_call(where, setting, a)
    if backend == "cake" and (recipe is not None or layout != SfLayout.layout_128x4):
        raise ValueError(
            f"{where}: backend='cake' has the 128x4 layout, no shuffle and no four-over-six; "
            "choose backend='cute-dsl'"
        )
    at_hand = not isinstance(base, Tensor) or (base.is_cpu and not is_compiling())  # no waiting
    if setting is not UNSET and at_hand:
        recipes.check_base(where, float(base), recipe)
    g = float32(where, "a_global_sf", base, a)
    search = recipes.searched(recipe)
    numbers = (recipes.span(recipe),) if search in ("mae", "mse") else ()
    options = 16, None, _LAYOUTS[layout], enable_pdl, "token", search
    packed, scale, row = _QUANTIZE.run(options, (contiguous(a), None, None, None, g, numbers))
    scale = scale.view(_U8)
    return packed, scale.reshape(-1, scale.shape[-1]), row


@public
def mxfp4_quantize(
    a: Tensor,
    backend: str = "cuda",
    enable_pdl: bool | None = None,
    sfLayout: SfLayout = SfLayout.layout_128x4,
) -> tuple[Tensor, Tensor]:
    """Return MXFP4 codes [M, K / 2] and UE8M0 scales (2-D, in ``sfLayout``) of ``a``."""
    layout = SfLayout(sfLayout)
    linear, eight = layout == SfLayout.layout_linear, layout == SfLayout.layout_8x4
    return fp4_quantize(a, None, 32, True, not linear, eight, False, enable_pdl, backend)


@public
def silu_and_mul_nvfp4_quantize(
    input: Tensor,
    global_scale: Tensor,
    sf_vec_size: int = 16,
    is_sf_swizzled_layout: bool = True,
    is_sf_8x4_layout: bool = False,
    enable_pdl: bool | None = None,
    nvfp4_4over6: NVFP44Over6Config | None = UNSET,
) -> tuple[Tensor, Tensor]:
    """Return NVFP4 codes [..., K / 2] and scales (2-D), both uint8, of ``silu(gate) * up``.

    ``input`` is [..., 2 K]: gate, then up; ``global_scale`` [1] multiplies; layouts and
    ``nvfp4_4over6`` as in `fp4_quantize`.
    """
    if sf_vec_size != 16:
        raise NotImplementedError(f"{_SILU.name}: sf_vec_size={sf_vec_size}; NVFP4 has 16")
    layout = "linear"
    if is_sf_swizzled_layout:
        layout = "8x4" if is_sf_8x4_layout else "128x4"
    checks.tensor(_SILU.name, "input", contiguous(input), DTYPES)
    recipe = recipes.of_call(_SILU.name, nvfp4_4over6, input)
    g = float32(_SILU.name, "global_scale", global_scale, input)
    options = 16, None, layout, enable_pdl, "one", recipes.searched(recipe)
    packed, scale = _SILU.run(options, (input, None, None, None, g, ()))
    scale = scale.view(_U8)
    return packed, scale.reshape(-1, scale.shape[-1])
