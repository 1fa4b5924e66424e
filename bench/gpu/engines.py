"""Models that transformers runs on our kernels, on a GPU: load, prefill, decode beside bfloat16.

    python -m bench.gpu.engines --names | xargs blockscale build --target sm_90a -o engines.so
    python -m bench.gpu.engines --library engines.so --out engines.json

The first where the compiler is, the second where the GPU is.  Models have the shapes of real ones
and random weights (`bench.gpu.engine_models`); a checkpoint is written, loaded and removed, model
after model.  Each part of the work is a process, so that none takes another with it: "check" (tiny
models against stock ones of the same values), and for each model the roads "ours", "bfloat16" (the
same shape in stock transformers) and, where transformers has one for the checkpoint, "stock"; of
Llama also "apart": ours without fused layers and norms.

A step of decoding is the model's forward with a static cache, argmax, and the token as the next
input: captured in a CUDA graph, as it is ("graph") and after torch.compile ("compile"), of ours
also with ``attn_implementation="blockscale"`` ("graph, attention"); "early": see `INDUCTOR`.  The
kernels of a step of one token are listed by their time.  Its bound is the time in which memory
gives the bytes of the weights that it reads; experts count as often as uniform choices hit them.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from bench import measure
from bench.gpu.engine_models import SHAPES, TINY, Shape, config_of, kernels, write
from blockscale.demo.files import write_json

FORMAT = 1
BYTES_A_US = 4.3e6
"""What an H200's memory gives."""
FLOP_A_US = 9.89e8
"""What its tensor cores do with 16-bit floats, by the data sheet."""
BOUND = 2e-2
"""Relative error of a row of logits of two layers in bfloat16, beside float32."""
WARM = 3
"""Steps before a graph is captured."""
PART_S = 200
"""A part that takes longer is ended."""
ROADS = {"gpt_oss": ("ours", "stock", "bfloat16")}
"""Of others: "ours" and "bfloat16", since transformers cannot load ModelOpt's NVFP4."""
ATTENTION = {"llama": "blockscale", "qwen3_moe": "blockscale"}
"""Ours, of models whose attention it is."""
INDUCTOR: dict[str, Any] = {"triton.enable_pdl": True, "combo_kernels": True}
"""Options of torch.compile for "early": its kernels let the next one begin early, as ours do, and
those that do not depend on each other are one."""
KERNELS = 14
"""Kernels of a step that are listed."""
EXPERTS = ("grouped_mm", "batched_mm")
"""How transformers runs experts; the faster one counts."""


def device_of() -> str:
    """Return where models run."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def synchronize() -> None:
    """Wait for the GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak() -> int:
    """Return the most bytes of device memory that tensors took."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


# ---- Models -------------------------------------------------------------------------------------


def loaded(folder: Path) -> Any:
    """Return what `from_pretrained` makes of a checkpoint."""
    from transformers import AutoModelForCausalLM

    options = {"dtype": torch.bfloat16, "device_map": device_of()}
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def plain(shape: Shape, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return a stock model with random weights, made where it runs."""
    from transformers import AutoModelForCausalLM

    with torch.device(device_of()):
        return AutoModelForCausalLM.from_config(config_of(shape), dtype=dtype).eval()


def weight_bytes(model: Any, batch: int) -> int:
    """Return the bytes of weights that a step of ``batch`` tokens reads."""
    config, total = model.config, 0.0
    counts = [getattr(config, name, None) for name in ("num_experts", "num_local_experts")]
    experts = next(filter(None, counts), 1)
    share = 1 - (1 - float(getattr(config, "num_experts_per_tok", 1)) / float(experts)) ** batch
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if "embed_tokens" not in name:
            total += value.nbytes * (share if ".experts." in name else 1)
    return round(total)


def active(shape: Shape) -> int:
    """Return how many weights a token of a prompt is multiplied with, lm_head apart."""
    c = config_of(shape)
    attention = c.hidden_size * c.head_dim * 2 * (c.num_attention_heads + c.num_key_value_heads)
    inner = c.intermediate_size
    if shape.kind != "llama":
        inner = getattr(c, "moe_intermediate_size", inner) * c.num_experts_per_tok
    return int(c.num_hidden_layers * (attention + 3 * c.hidden_size * inner))


# ---- Steps --------------------------------------------------------------------------------------


@dataclass
class Decoding:
    """A batch that is being decoded: everything that a step reads and writes stays where it is."""

    model: Any
    forward: Callable[..., Any]
    cache: Any
    token: Tensor
    position: Tensor
    history: Tensor
    logits: Tensor | None = None
    graph: Any = None

    def mask(self) -> Any:
        """Return what a step may look at, by the position on the device, as the model takes it.

        transformers makes the same, but of numbers that it copies to the GPU, which no graph holds.
        """
        config, position = self.model.config, self.position[:, :, None, None]
        places = torch.arange(self.history.shape[1], device=position.device)
        seen = places <= position

        def as_taken(allowed: Tensor) -> Tensor:
            if config._attn_implementation != "eager":
                return allowed
            low = torch.finfo(self.model.dtype).min
            zeros = torch.zeros(allowed.shape, dtype=self.model.dtype, device=allowed.device)
            return zeros.masked_fill_(~allowed, low)

        if "sliding_attention" not in (getattr(config, "layer_types", None) or ()):
            return as_taken(seen)
        near = seen & (places > position - config.sliding_window)
        return {"full_attention": as_taken(seen), "sliding_attention": as_taken(near)}

    def step(self) -> None:
        """Decode a token of each row."""
        given = {"position_ids": self.position, "past_key_values": self.cache, "use_cache": True}
        made = self.forward(input_ids=self.token, attention_mask=self.mask(), **given)
        logits = made.logits[:, -1]
        self.token.copy_(logits.argmax(-1, keepdim=True))
        self.position.add_(1)
        self.history.scatter_(1, self.position, self.token)
        self.logits = logits

    def replayed(self) -> Callable[[], object]:
        """Return what does a step: the replay of a graph where there is a GPU."""
        if not torch.cuda.is_available():
            self.step()
            return self.step
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        self.graph = graph
        return self.replay

    def replay(self) -> None:
        """Decode a token of each row by the graph, whose tensors this object keeps."""
        self.graph.replay()

    def error(self) -> float:
        """Return how far the last step's logits are from those of all tokens at once."""
        assert self.logits is not None
        count = int(self.position[0])
        again = self.model(self.history[:, :count], use_cache=False, logits_to_keep=1).logits[:, -1]
        return measure.row_error(self.logits, again)


def started(model: Any, batch: int, given: Namespace, forward: Callable[..., Any]) -> Decoding:
    """Return a batch after its prompt of ``--context`` tokens.

    All layers have a cache of the whole length, also those with a window, whose cache would
    otherwise be moved in each step.
    """
    from transformers.cache_utils import Cache, StaticLayer

    length = given.context + WARM + given.steps * (given.replays + 1) + 2
    length = -(-length // 64) * 64
    layers: list[Any] = [
        StaticLayer(max_cache_len=length) for _ in range(model.config.num_hidden_layers)
    ]
    cache = Cache(layers=layers)
    tokens = random_tokens(model, batch, given.context)
    logits = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
    token = logits.argmax(-1, keepdim=True)
    history = torch.zeros(batch, length, dtype=torch.long, device=token.device)
    history[:, : given.context], history[:, given.context :][:, :1] = tokens, token
    position = torch.full((batch, 1), given.context, device=token.device)
    return Decoding(model, forward, cache, token, position, history)


def random_tokens(model: Any, rows: int, count: int) -> Tensor:
    """Return [rows, count] tokens."""
    made = torch.Generator().manual_seed(rows)
    return torch.randint(2, model.config.vocab_size, (rows, count), generator=made).to(model.device)


def microseconds(call: Callable[[], object], calls: int, repeats: int) -> float:
    """Return the median time of a call, of ``calls`` in a row."""
    times = []
    for _ in range(repeats):
        synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        synchronize()
        times.append(1e6 * (time.perf_counter() - start) / calls)
    return median(times)


def decoded(
    model: Any,
    batch: int,
    given: Namespace,
    forward: Callable[..., Any] | None = None,
    experts: str | None = None,
    kept: list[Callable[[], object]] | None = None,
) -> dict[str, Any]:
    """Return the time of a step, its bound, and the error of the last one.

    ``kept``: gets the replay of a graph, for `kernel_times`.
    ``experts``: how transformers runs them in a step; prompts always go by the first of `EXPERTS`,
    since the second copies the weights of each token's experts.
    """
    start = time.perf_counter()
    batch_of = started(model, batch, given, forward or model.forward)
    if experts:
        model.set_experts_implementation(experts)
    try:
        replay = batch_of.replayed()
        ready = time.perf_counter() - start
        us = microseconds(replay, given.steps, given.replays)
    finally:
        if experts:
            model.set_experts_implementation(EXPERTS[0])
    read = weight_bytes(model, batch)
    row = {"us": us, "tokens_s": 1e6 * batch / us, "bytes": read, "floor_us": read / BYTES_A_US}
    row |= {"error": batch_of.error(), "ready_s": ready}
    if kept is not None and torch.cuda.is_available():
        kept.append(replay)
    return row


def kernel_times(call: Callable[[], object], calls: int) -> list[dict[str, Any]]:
    """Return the kernels of a call that take the most of it: name, how many, microseconds."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(calls):
            call()
        synchronize()
    events = [e for e in found.key_averages() if e.device_time_total]
    events.sort(key=lambda e: -e.device_time_total)
    listed = [
        {"name": e.key[:90], "calls": e.count / calls, "us": e.device_time_total / calls}
        for e in events[:KERNELS]
    ]
    rest = events[KERNELS:]
    more = {"name": f"{len(rest)} others", "calls": sum(e.count for e in rest) / calls}
    return [*listed, {**more, "us": sum(e.device_time_total for e in rest) / calls}]


def prefilled(model: Any, shape: Shape, given: Namespace) -> dict[str, Any]:
    """Return the time of a prompt of ``--prompt`` tokens, and its bound."""
    tokens = random_tokens(model, 1, given.prompt)

    def call() -> None:
        model(tokens, use_cache=True, logits_to_keep=1)

    call()
    call()
    us = microseconds(call, 1, given.replays)
    work = 2 * given.prompt * active(shape) / FLOP_A_US
    floor = max(work, weight_bytes(model, given.prompt) / BYTES_A_US)
    row = {"tokens": given.prompt, "us": us, "tokens_s": 1e6 * given.prompt / us}
    return {**row, "floor_us": floor}


# ---- Parts --------------------------------------------------------------------------------------


class Part:
    """The result of one process, written after each measurement."""

    def __init__(self, case: str, road: str, out: Path) -> None:
        self.row: dict[str, Any] = {"case": case, "road": road, "decode": []}
        self._out, self._start = out, time.perf_counter()
        self.replays: dict[str, list[Callable[[], object]]] = {}

    def keep(self, **found: Any) -> None:
        """Keep, write and print."""
        self.row.update(found)
        self._said(found)

    def tried(self, what: Mapping[str, Any], call: Callable[[], dict[str, Any]]) -> None:
        """Keep a row of "decode", or why there is none."""
        try:
            found = {**what, **call()}
        except Exception as error:
            found = {**what, "failed": measure.describe(error)}
        self.row["decode"].append(found)
        self._said(found)

    def _said(self, found: Mapping[str, Any]) -> None:
        write_json(self._out, self.row)
        told = {k: round(v, 4) if isinstance(v, float) else v for k, v in found.items()}
        head = f"{time.perf_counter() - self._start:5.0f} s  {self.row['case']} {self.row['road']}"
        print(head, json.dumps(told), flush=True)


@torch.no_grad()
def run_part(part: Part, shape: Shape, given: Namespace) -> None:
    """Measure one road of one model."""
    road, folder = part.row["road"], given.folder / part.row["case"]
    if road in ("ours", "apart"):
        ours(given)
    if torch.cuda.is_available():
        torch.ones(1, device="cuda")  # or making the context counts as loading
        synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    with apart() if road == "apart" else nullcontext():
        model = plain(shape) if road == "bfloat16" else loaded(folder)
    synchronize()
    seconds = time.perf_counter() - start
    held = sum(v.nbytes for v in [*model.parameters(), *model.buffers()])
    part.keep(load_peak_bytes=peak(), bytes=held)
    if road != "bfloat16":  # whose random weights are made in place, of no file
        part.keep(load_s=seconds)
    if road == "ours":
        tokens = random_tokens(model, 2, 5)
        made = model.generate(tokens, max_new_tokens=4, do_sample=False)
        part.keep(generated=list(made.shape))
    stock_experts = road in ("stock", "bfloat16") and shape.kind != "llama"
    for experts in EXPERTS if stock_experts else (None,):
        for batch in given.batches:
            what = {"batch": batch, "how": "graph", **({"experts": experts} if experts else {})}
            kept = part.replays.setdefault("graph", []) if batch == 1 else None
            part.tried(what, partial(decoded, model, batch, given, experts=experts, kept=kept))
    part.keep(prefill=prefilled(model, shape, given), peak_bytes=peak())
    decode_in_other_ways(part, model, shape, given)
    for how, replays in part.replays.items():
        for replay in replays[:1]:
            part.keep(**{f"kernels of {how}": kernel_times(replay, given.steps)})


def decode_in_other_ways(part: Part, model: Any, shape: Shape, given: Namespace) -> None:
    """Measure steps after `torch.compile`, and with our attention."""
    road = part.row["road"]
    compiles = shape.kind == "llama" and given.compile and road != "apart"
    if compiles and not (road == "ours" and shape.head):
        compiled(part, model, given, "compile")
    if compiles and road == "bfloat16":
        compiled(part, model, given, "compile, early")
    if road != "ours" or shape.kind not in ATTENTION:
        return
    model.set_attn_implementation(ATTENTION[shape.kind])
    for batch in given.batches:
        what = {"batch": batch, "how": "graph, attention"}
        kept = part.replays.setdefault("graph, attention", []) if batch == 1 else None
        part.tried(what, partial(decoded, model, batch, given, kept=kept))
    if compiles:
        compiled(part, model, given, "compile, attention")
        compiled(part, model, given, "compile, attention, early")


def compiled(part: Part, model: Any, given: Namespace, how: str) -> None:
    """Measure steps of one token after `torch.compile`; "early": with `INDUCTOR`."""
    torch._dynamo.reset()
    kept = part.replays.setdefault(how, [])
    options: dict[str, Any] | None = INDUCTOR if how.endswith(", early") else None
    forward = torch.compile(model.forward, dynamic=False, options=options)
    part.tried({"batch": 1, "how": how}, partial(decoded, model, 1, given, forward, kept=kept))


def ours(given: Namespace) -> None:
    """Let `from_pretrained` take our kernels."""
    import blockscale
    import blockscale.integrations.transformers

    for path in given.library:
        blockscale.load(path)


def apart() -> AbstractContextManager[Any]:
    """Return the context in which models are loaded without fused layers and norms."""
    from blockscale.integrations.transformers import fusing

    return fusing(projections=False, mlps=False, norms=False)


@torch.no_grad()
def run_check(part: Part, given: Namespace) -> None:
    """Compare tiny models with stock ones of the same values, which are in float32."""
    ours(given)
    from transformers import AutoModelForCausalLM

    for name, shape in TINY.items():
        write(shape, given.folder / name)
        dense = given.folder / f"{name}-dense"
        write_dense(given.folder / name, shape, dense)
        stock = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
        model = loaded(given.folder / name)
        tokens = random_tokens(model, 3, 17)
        wanted = stock(tokens.cpu()).logits.flatten(0, 1)
        error = measure.row_error(model(tokens).logits.flatten(0, 1).cpu(), wanted)
        found = decoded(model, 2, given)
        right = max(error, found["error"]) < BOUND
        part.keep(**{name: {"error": error, "decode_error": found["error"], "right": right}})


def write_dense(folder: Path, shape: Shape, out: Path) -> None:
    """Write a checkpoint's values as a plain one of float32."""
    from safetensors.torch import save_file

    from blockscale import checkpoints

    ckpt = checkpoints.open(folder)
    found = {}
    for name in ckpt.names:
        value = ckpt.weight(name).dequantize(torch.float32)
        turned = shape.kind == "gpt_oss" and value.dim() == 3
        found[name] = (value.transpose(1, 2) if turned else value).contiguous()
    out.mkdir(parents=True, exist_ok=True)
    config_of(shape).save_pretrained(out)
    save_file(found, out / "model.safetensors", metadata={"format": "pt"})


# ---- All of it ----------------------------------------------------------------------------------


def shapes_of(given: Namespace) -> dict[str, Shape]:
    """Return the models that are asked for."""
    known = TINY if given.tiny else SHAPES
    changes = {} if given.layers is None else {"num_hidden_layers": given.layers}
    return {name: known[name].of(**changes) for name in measure.chosen(known, given.only)}


def arguments(given: Sequence[str] | None) -> Namespace:
    """Return the parsed command line."""
    parser = measure.parser("bench.gpu.engines", __doc__, replays=5)
    option = parser.add_argument
    option("--describe", type=Path, help="write the models' headers into this folder, no more")
    option("--folder", type=Path, help="for checkpoints; the roomier of /dev/shm and the usual")
    option("--tiny", action="store_true", help="tiny models, also on a CPU")
    option("--layers", type=int, help="fewer than the models have")
    option("--batches", type=int, nargs="+", default=[1, 16, 64])
    option("--prompt", type=int, default=2048, help="tokens of the prefill")
    option("--context", type=int, default=128, help="tokens before the first step")
    option("--steps", type=int, default=16, help="in a row, of each of --replays")
    option("--no-compile", dest="compile", action="store_false", help="graphs alone")
    option("--seconds", type=float, default=420, help="no part is started after this long")
    option("--part", nargs=2, help="the model and the road that this process measures")
    needed = ("out",) if "--describe" not in (given or sys.argv) else ()
    return measure.parsed(parser, given, needed=needed)


def spacious() -> Path:
    """Return the folder for temporary files that has more room, in memory or on the disk."""
    places = [Path(tempfile.gettempdir()), Path("/dev/shm")]
    return max((p for p in places if p.is_dir()), key=lambda p: shutil.disk_usage(p).free)


def process(given: Namespace, case: str, road: str) -> dict[str, Any]:
    """Return the results of a part, which runs in a process of its own."""
    out = given.folder / f"{case}-{road}.json"
    said = [*(part for path in given.library for part in ("--library", str(path)))]
    for name in ("prompt", "context", "steps", "replays", "folder"):
        said += [f"--{name}", str(getattr(given, name))]
    said += ["--batches", *map(str, given.batches), *(["--tiny"] if given.tiny else [])]
    said += [] if given.layers is None else ["--layers", str(given.layers)]
    said += [] if given.compile else ["--no-compile"]
    command = [sys.executable, "-m", "bench.gpu.engines", "--part", case, road, "--out", str(out)]
    failed = None
    try:
        done = subprocess.run([*command, *said], stderr=subprocess.PIPE, text=True, timeout=PART_S)
        if done.returncode:
            failed = "\n".join(done.stderr.strip().splitlines()[-6:])
    except subprocess.TimeoutExpired:
        failed = f"ended after {PART_S} s"
    row = json.loads(out.read_text()) if out.exists() else {"case": case, "road": road}
    if failed:
        row["failed"] = failed
        print(f"{case} {road} failed: {failed}", flush=True)
    return row


def run(given: Namespace) -> list[dict[str, Any]]:
    """Return the rows of all parts."""
    import transformers

    names = ("context", "prompt", "steps", "layers")
    about = {name: getattr(given, name) for name in names}
    about |= {"transformers": transformers.__version__}
    session = measure.Session("engines", given, FORMAT, rows="rows", **about)
    begin = time.perf_counter()

    def add(case: str, road: str, **more: Any) -> None:
        if time.perf_counter() - begin > given.seconds:
            row = {"case": case, "road": road, "failed": f"left out after {given.seconds:.0f} s"}
        else:
            row = {**process(given, case, road), **more}
        session.add(row, f"{case} {road} done")

    with tempfile.TemporaryDirectory(dir=given.folder or spacious()) as folder:
        given.folder = Path(folder)
        if not given.only and not given.tiny:
            add("tiny", "check")
        for name, shape in shapes_of(given).items():
            start = time.perf_counter()
            size = write(shape, given.folder / name)
            written = {"write_s": time.perf_counter() - start, "checkpoint_bytes": size}
            for road in roads(name, shape):
                if road == "bfloat16":
                    shutil.rmtree(given.folder / name)
                    written = {}
                if road != "bfloat16" or not name.endswith("-head"):  # as fast as without
                    add(name, road, **written)
    session.end()
    return session.cases


def roads(name: str, shape: Shape) -> tuple[str, ...]:
    """Return what is measured of a model."""
    if shape.kind == "llama" and not name.endswith("-head"):
        return "ours", "apart", "bfloat16"
    return ROADS.get(shape.kind, ("ours", "bfloat16"))


def lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the table of decoding and prefill, beside bfloat16."""
    plain: dict[tuple[Any, ...], float] = {}
    for row in rows:
        if row["road"] == "bfloat16":
            for key, us in steps_of(row):
                plain[row["case"], *key] = min(us, plain.get((row["case"], *key), us))
    said = []
    for row in rows:
        head = f"{row['case']:16} {row['road']:9}"
        if "bytes" in row:
            made = f"loaded in {row['load_s']:.1f} s" if "load_s" in row else "made, not loaded"
            most = row["load_peak_bytes"] / 1e9
            said.append(f"{head} {made}, {row['bytes'] / 1e9:.1f} GB, peak meanwhile {most:.1f}")
        for each in row.get("decode", []):
            if "us" not in each:
                said.append(f"{head} {each}")
                continue
            way = each["how"].replace(", attention", "")
            known = plain.get((row["case"].removesuffix("-head"), way, each["batch"]))
            times = "" if known is None else f" x{known / each['us']:.2f} of bfloat16"
            rate = f"{each['tokens_s']:9.1f} tokens/s {each['us']:9.1f} us"
            bound = f"(bytes {each['floor_us']:.1f}) error {each['error']:.1e}"
            how = f"{each['how']} {each.get('experts', '')}"
            said.append(f"{head} batch {each['batch']:3} {how:17} {rate} {bound}{times}")
        found = row.get("prefill")
        if found:
            rate = f"{found['tokens_s']:9.1f} tokens/s {found['us']:9.1f} us"
            said.append(f"{head} prefill {found['tokens']} {rate} (bound {found['floor_us']:.1f})")
        if "failed" in row:
            said.append(f"{head} FAILED {row['failed']}")
    return said


def steps_of(row: Mapping[str, Any]) -> list[tuple[tuple[str, int], float]]:
    """Return the times of a row's steps by how they ran and the batch."""
    found = [each for each in row.get("decode", []) if "us" in each]
    return [((each["how"], each["batch"]), each["us"]) for each in found]


def main(given: Sequence[str] | None = None) -> int:
    """Print names, write headers, or measure; return 1 if a part failed or a check is wrong."""
    options = arguments(given)
    if options.part:
        case, road = options.part
        part = Part(case, road, options.out)
        torch.manual_seed(0)
        if road == "check":
            run_check(part, options)
        else:
            run_part(part, shapes_of(options)[case], options)
        return 0
    every = {**shapes_of(options), **TINY}
    if options.describe:
        for name, shape in every.items():
            write(shape, options.describe / name, data=False)
        return 0
    if options.names:
        with tempfile.TemporaryDirectory() as folder:
            print(*kernels(every, Path(folder), cuda=True), sep="\n")
        return 0
    if not options.tiny and measure.refused("bench.gpu.engines"):
        return 2
    rows = run(options)
    print(*lines(rows), sep="\n")
    return measure.status("bench.gpu.engines", [*bad(rows)])


def bad(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the parts that failed, and tiny models that are wrong."""
    found = [f"{row['case']} {row['road']}" for row in rows if "failed" in row]
    checks = [row for row in rows if row["road"] == "check"]
    return found + [n for row in checks for n in TINY if not row.get(n, {}).get("right")]


if __name__ == "__main__":
    sys.exit(main())
