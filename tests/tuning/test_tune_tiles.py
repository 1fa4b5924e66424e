"""Tuning functions of whole tiles for a GPU, linear layers and INT4 products: nothing runs here."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch

import blockscale as bs
from blockscale import catalog
from blockscale.base.errors import LoweringError
from blockscale.base.manifest import read_manifest
from blockscale.building import builder, logs
from blockscale.building.commit import commit
from blockscale.building.space import new_schedule
from blockscale.building.store import Store
from blockscale.catalog.registry import scheduled
from blockscale.lower.warp.derive import derive
from blockscale.lower.warp.emit import emit
from blockscale.schedules.steps import preferred
from blockscale.specs import Spec
from blockscale.specs.plans import PREFIX
from blockscale.specs.spec import NAME_EXAMPLES
from blockscale.tuning import exporter, gpu, site, task, worker
from blockscale.tuning.components.sketches import draw
from blockscale.tuning.tuner import tune
from blockscale.tuning.worker import Argument
from tests.kit import fake_gpu
from tests.kit.pairwise import few

ARCH = "sm_90a"
LINEAR = "linear_nvfp4_n192_k512_tiles64_bf16"
INT4 = "int4_mm_tiles64_n192_k512_g128_a16_bf16"


def of(name: str, rows: int, level: str = ARCH) -> catalog.Workload:
    return next(w for w in catalog.workloads(Spec.parse(name), level) if w.rows == rows)


def arguments(workload: catalog.Workload, tmp_path, level: str = ARCH) -> dict[str, Argument]:
    made = task.Task(workload, level, Store(tmp_path, print), [], print).arguments()
    return {argument.name: argument for argument in made}


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A work folder of three workloads, what the session found, and their committed log."""
    work_dir, log = (tmp_path_factory.mktemp(name) for name in ("tuned", "log"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(site, "gpu", fake_gpu)
        patch.setattr(site, "_GPU_NEEDS", "tvm")
        patch.setattr(fake_gpu, "measure", fake_gpu.measure_bytes)
        found = tune(
            [of(LINEAR, 1), of(LINEAR, 64), of(INT4, 16)], target=ARCH, seconds=200, trials_each=3,
            work_dir=work_dir, workers=2, progress=False,
            exporter="tests.kit.fake_gpu:export_source",
        )  # fmt: skip
    assert commit(work_dir, log, top_k=2) == pytest.approx(found.best)
    return found, log


def test_the_default_and_candidates_are_built_and_measured(tuned):
    result, _ = tuned
    assert result.trials == 9
    assert not any(line["failed"] for line in result.history)
    for tag, best in result.best.items():
        lines = [line for line in result.history if line["workload"] == tag]
        assert [line["kind"] for line in lines] == ["default", "search", "search"]
        assert best == min(line["us"] for line in lines)
        assert len({line["us"] for line in lines}) == 3  # kernels


def test_records_are_found_and_replayed(tuned):
    """The best record makes another kernel than the default's, or is the default's."""
    result, log = tuned
    assert logs.check([log]) == []
    assert logs.entries(log) == 3
    for name, rows in ((LINEAR, 1), (LINEAR, 64), (INT4, 16)):
        work = of(name, rows)
        hit = logs.find(work, ARCH, [log])
        assert hit is not None
        assert hit.us == pytest.approx(result.best[work.tag])
        traces = {work.tag: hit.trace}
        [best] = (body for w, (_, body) in zip(
            catalog.workloads(work.spec, ARCH), scheduled(work.spec, ARCH, traces), strict=True,
        ) if w == work)  # fmt: skip
        sch = new_schedule(work.symbolic(ARCH))
        work.default(sch, ARCH)
        texts = [emit(derive(func), "k") for func in (best, sch.mod["main"])]
        same = result.best[work.tag] == result.default[work.tag]
        assert (texts[0] == texts[1]) == same, work.tag


@pytest.mark.parametrize("name", [LINEAR, INT4])
def test_a_candidate_becomes_a_library(tmp_path, name):
    """Of the function for any number of rows, with the parameters of its spec."""
    work = of(name, 16)
    tuning = task.Task(work, ARCH, Store(tmp_path, print), [], print)
    [default] = tuning.baselines(9)
    built = tuning.to_build(default)
    target = str(tuning.target)
    assert worker.build(built, target, exporter.CUDA, str(tmp_path / "x.so"))
    told = read_manifest(tmp_path / "x.so")
    assert [p["name"] for p in told["functions"]["main"]["params"]] == [
        *arguments(work, tmp_path / "again")
    ]
    assert len(list(tmp_path.glob("*.kept"))) == 1


def test_a_library_says_which_buckets_are_tuned(tuned, tmp_path, caplog):
    _, log = tuned
    names = [LINEAR, INT4]
    made = builder.build(names, tmp_path / "x.so", level=ARCH, logs_dirs=[log])
    told = {n: [b["rows"] for b in made["functions"][n]["buckets"] if b["tuned"]] for n in names}
    assert told == {LINEAR: [1, 64], INT4: [16]}
    assert "have no log" in caplog.text


KIN = {
    "linear_nvfp4_n192_k512_res_tiles64_to_f32_f16": (LINEAR, 64),
    "linear_nvfp4_n192_k512_gelu_tanh_tiles64_bf16": (LINEAR, 1),
    "int4_mm_tiles64_n192_k512_g128_a8_pre_f16": (INT4, 16),
}


@pytest.mark.parametrize("name", KIN)
def test_a_log_serves_what_only_stores_otherwise(tuned, name):
    """The tile, the depth of the ring, the order are the tuned one's."""
    _, log = tuned
    base, rows = KIN[name]
    work, own = of(base, rows), of(name, rows)
    assert work in own.kin(ARCH)
    hit = logs.find(work, ARCH, [log])
    kernels = []
    for each in (work, own):
        bodies = scheduled(each.spec, ARCH, {each.tag: hit.trace})
        at = [w.tag for w in catalog.workloads(each.spec, ARCH)].index(each.tag)
        kernels.append(derive(bodies[at][1]))
    first, second = kernels
    for field in ("unit", "cols_tile", "rows_tile", "warps", "slices", "ctas", "blocks", "stages"):
        assert getattr(first, field) == getattr(second, field), field
    assert first.fastest == second.fastest


def test_a_weight_of_other_codes_is_no_kin():
    spec = Spec.parse("linear_mxfp4_n192_k512_res_tiles64_bf16")
    kin = catalog.road(spec, ARCH).kin(spec, None)
    assert [k.name for k in kin] == ["linear_mxfp4_n192_k512_tiles64_bf16"]
    assert catalog.road(kin[0], ARCH).kin(kin[0], None) == []


# ---- Arguments ----------------------------------------------------------------------------------

WHOLE_TILES = {
    (LINEAR, 64): {
        "x": (64, 512), "packed": (3, 8, 2048), "block_scale": (3, 8, 256), "global_scale": (1,),
        "bias": (192,), "y": (64, 192),
    },
    ("linear_mxfp4_n200_k512_silu_gated_res_tiles64_f16", 8): {
        "x": (8, 512), "packed": (4, 8, 2048), "block_scale": (4, 8, 128), "global_scale": (2,),
        "bias": (200,), "residual": (8, 100), "y": (8, 100),
    },
    ("linear_mxfp4_n192_k512_fp8_tiles64e_bf16", 1024): {
        "x": (1024, 512), "packed": (3, 8, 2048), "block_scale": (3, 8, 128),
        "global_scale": (192,), "bias": (192,), "y": (1024, 192),
    },
    ("int4_mm_tiles64_e8_n512_k256_g64z_a8_f16", 64): {
        "x": (64, 256), "offsets": (9,), "packed": (8, 8, 4, 2048), "scale": (8, 8, 4, 256),
        "alpha": (8,), "bias": (8, 512), "out": (64, 512),
    },
}  # fmt: skip


@pytest.mark.parametrize(("name", "rows"), WHOLE_TILES)
def test_arguments_of_whole_tiles_have_true_sizes(tmp_path, name, rows):
    work = of(name, rows)
    made = arguments(work, tmp_path)
    workspace = made.pop("workspace", None)
    assert {name: argument.shape for name, argument in made.items()} == WHOLE_TILES[name, rows]
    if workspace is not None:
        assert workspace.shape == (work.spec.workspace_bytes(rows),)
        assert workspace.output
        assert not workspace.compared
    if "offsets" in made:
        assert (made["offsets"].values == np.arange(9) * 8).all()
    [scale] = (each for name, each in made.items() if name in ("block_scale", "scale"))
    assert scale.storage == worker.TILE_SCALES[getattr(work.spec, "fmt", "int4")]
    assert [a.name for a in made.values() if a.compared] == [[*WHOLE_TILES[name, rows]][-1]]


def test_arguments_of_grouped_gemms_have_scales_of_padded_experts(tmp_path):
    work = of("grouped_mm_nvfp4_e8_n4096_k7168_bf16", 8 * 64, "sm_100a")
    made = arguments(work, tmp_path, "sm_100a")
    assert made["a"].shape == (512, 3584)
    assert made["a_scale"].shape == (8 * 128, 448)
    assert made["offsets"].value == 512


@pytest.mark.parametrize("level", few([ARCH, "avx512"]))
def test_arguments_are_the_static_functions(tmp_path, level):
    """Of every op that is not of whole tiles."""
    seen = set()
    for name in NAME_EXAMPLES:
        spec = Spec.parse(name)
        try:
            work = catalog.workloads(spec, level)[0]
            func = work.mod(level)["main"]
        except (TypeError, IndexError):  # no such kernel, or nothing to tune
            continue
        if work.part is not None or catalog.road(spec, level).sizes is not None:
            continue
        if spec.op in ("ep_dispatch", "ep_combine"):
            with pytest.raises(TypeError, match="depend on a group of ranks"):
                arguments(work, tmp_path, level)
            continue
        made = arguments(work, tmp_path, level)
        for argument, variable in zip(made.values(), func.params, strict=True):
            shape = getattr(variable, "shape", None)
            wanted = None if shape is None else tuple(map(int, shape))
            assert (argument.shape, argument.dtype) == (wanted, str(variable.ty.dtype)), name
        seen.add(spec.op)
    assert len(seen) > 7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scales_of_int4_are_numbers_whatever_their_bytes(dtype):
    scale = Argument("scale", "uint8", (1,), False, worker.TILE_SCALES["int4"])
    low, high = scale.range
    values = torch.arange(low, high, dtype=torch.uint8)
    numbers = torch.cartesian_prod(values, values).view(dtype).float()
    assert numbers.numel() > 4
    assert 0.01 < numbers.min() < numbers.max() < 2


@pytest.mark.parametrize(("fmt", "codes"), [("nvfp4", range(1, 127)), ("mxfp4", range(110, 128))])
def test_scales_of_tiles_are_such_as_weights_have(fmt, codes):
    """All bytes that are drawn are those of a prepared weight with some scale."""
    spec = Spec.parse(f"linear_{fmt}_n64_k{64 * len(codes)}_tiles64_bf16")
    scale = np.repeat(np.array(codes, np.uint8), 64 // spec.group)
    weight = bs.prepare_linear_weights(
        torch.zeros(64, spec.k // 2, dtype=torch.uint8),
        torch.from_numpy(np.tile(scale, (64, 1))), fmt=fmt, layout="tiles64",
    )  # fmt: skip
    drawn = range(*Argument("s", "uint8", (1,), False, worker.TILE_SCALES[fmt]).range)
    assert len(drawn) > 4
    assert set(drawn) <= set(weight.block_scale.flatten().tolist())


def test_what_is_compared_is_not_the_workspace(monkeypatch):
    """A workspace that another schedule leaves otherwise is no difference."""
    made = [
        Argument("x", "float32", (4,), False, None),
        Argument("out", "float32", (4,), True, None),
        Argument("workspace", "uint8", (64,), True, None),
    ]
    fill = {"default": 1, "other": 2}

    def load(library):
        def run(x, out, workspace):
            x, out, workspace = (torch.from_dlpack(t) for t in (x, out, workspace))
            out.copy_(x * (1 if library != "wrong" else 2))
            workspace.fill_(fill.get(library, 0))

        return run

    monkeypatch.setattr(gpu.Held, "load", lambda self, library: load(library))
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    monkeypatch.setattr(gpu, "l2_bytes", lambda: 64)
    monkeypatch.setattr(gpu, "_on_stream", nullcontext)
    held = gpu.Held(made, "default")
    assert held.differs(load("other")) is None
    assert "'out'" in held.differs(load("wrong"))


# ---- The search's view --------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "rows"), [(LINEAR, 8), (INT4, 16)])
def test_the_cost_model_sees_what_the_kernel_is(name, rows):
    work = of(name, rows)
    space = draw(work, ARCH, 0, work.mod(ARCH))
    rows_of = space.features(space.all())
    assert len({tuple(row) for row in rows_of}) == space.size  # it tells all points apart
    names = sorted({name for design in space.designs for name in design.facts})
    sketch = work.sketches(ARCH)[1]
    sch = new_schedule(work.mod(ARCH))
    sketch(sch, preferred)
    made, facts = derive(sch.mod["main"]), work.facts(ARCH)(sch)
    assert set(facts) == set(names)
    assert facts[f"{PREFIX}stages"] == made.stages
    assert facts[f"{PREFIX}shared"] == made.shared
    assert facts[f"{PREFIX}wgmma"] == (made.unit == "wgmma")


def refuse(module, target, out):
    raise LoweringError("two stages do not fit")


def test_what_no_kernel_can_be_made_of_is_no_trial(tmp_path):
    """It is illegal, as what TensorIR refuses."""
    work = of(LINEAR, 1)
    tuning = task.Task(work, ARCH, Store(tmp_path, print), [], print)
    [default] = tuning.baselines(9)
    made = tuning.to_build(default)
    with pytest.raises(worker.Illegal, match="two stages do not fit"):
        worker.build(made, "{}", f"{__name__}:refuse", str(tmp_path / "x.so"))
