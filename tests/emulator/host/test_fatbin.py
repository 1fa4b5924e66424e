"""Fat binaries: what is inside, in every compression, which PTX a device gets, and damaged ones."""

import random
import subprocess
import sys
from contextlib import suppress

import pytest

from blockscale.emulator.errors import EmulationError
from blockscale.emulator.host import fatbin
from tests.emulator.host.fatbins import CUBIN, LZ4, ZSTD, container, image, ptx_container
from tests.emulator.kit import tools

CODE = """
extern "C" __global__ void add(const float *a, float *b, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) b[i] += a[i];
}
"""


def ptx(arch: str) -> bytes:
    return f".version 8.6\n.target {arch}\n.address_size 64\n".encode()


def texts() -> list[bytes]:
    """Return data of several kinds: none, short, long runs, words, letters, noise."""
    rng = random.Random(1)
    words = [bytes(rng.choices(b"abcdefghij.%[]", k=rng.randrange(1, 9))) for _ in range(200)]
    return [
        b"",
        b"hello",
        b"x" * 70_000,
        b" ".join(rng.choices(words, k=30_000)),
        bytes(rng.choices(b"abc", k=20_000)),
        rng.randbytes(3_000),
        rng.randbytes(40) * 500,
        b"".join(rng.randbytes(rng.randrange(1, 20)) + b"0" * 9 for _ in range(3_000)),
    ]


def test_images_of_a_container():
    data = container(
        image("sm_100a", b"\x7fELF...", CUBIN),
        image("sm_100a", ptx("sm_100a")),
        image("sm_100f", ptx("sm_100f")),
        image("sm_80", ptx("sm_80")),
        image("sm_90", b"?", kind=8),
    )
    images = fatbin.read(data)
    assert [str(i) for i in images] == [
        "cubin sm_100a",
        "ptx sm_100a",
        "ptx sm_100f",
        "ptx sm_80",
        "kind 8 sm_90",
    ]
    assert images[1].ptx.startswith(".version 8.6\n.target sm_100a")
    assert fatbin.container_size(data[:16]) == len(data)


def test_the_text_knows_its_target_best():
    """Older tools set no flag for the suffix a."""
    [found] = fatbin.read(container(image("sm_90", ptx("sm_90a"))))
    assert found.arch == "sm_90a"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Return a folder with PTX and machine code of CODE."""
    folder = tmp_path_factory.mktemp("code")
    (folder / "code.cu").write_text(CODE)
    for command in (
        [tools.nvcc(), "-ptx", "-arch=compute_100a", "code.cu", "-o", "code.ptx"],
        [tools.ptxas(), "-arch=sm_100a", "code.ptx", "-o", "code.cubin"],
    ):
        subprocess.run(command, cwd=folder, check=True)
    return folder


@pytest.mark.parametrize("mode", ["default", "size", "speed", "balance", "none"])
@tools.needs_nvcc
def test_every_compression_of_nvcc(built, mode):
    """The modes of `nvcc --compress-mode`, which hands the files to fatbinary."""
    pytest.importorskip("zstandard")
    images = (
        f"--image3=kind={k},sm=100a,file=code.{f}" for k, f in [("elf", "cubin"), ("ptx", "ptx")]
    )
    options = ["-64", "-compress-all", f"--compress-mode={mode}", *images]
    fatbinary = [tools.program("fatbinary"), f"--create={mode}.fatbin", *options]
    subprocess.run(fatbinary, cwd=built, check=True)
    data = (built / f"{mode}.fatbin").read_bytes()
    cubin, found = fatbin.read(data)
    assert (str(cubin), str(found)) == ("cubin sm_100a", "ptx sm_100a")
    assert cubin.data == (built / "code.cubin").read_bytes()
    plain = (built / "code.ptx").read_text()  # fatbinary leaves comments out
    plain, stored = (text[text.index(".visible") :].split() for text in (plain, found.ptx))
    assert plain == stored


def zstd(data: bytes, level: int = 3) -> bytes:
    return pytest.importorskip("zstandard").ZstdCompressor(level=level).compress(data)


@pytest.mark.parametrize("which", range(8))
def test_zstd(which):
    data = texts()[which]
    for level in (1, 19):
        text = image("sm_90", data, packed=zstd(data, level), flags=ZSTD)
        assert fatbin.read(container(text))[0].data == data


@pytest.mark.parametrize("wrong", [-1, 1])
def test_zstd_of_another_size(wrong):
    data = texts()[3]
    size = len(data) + wrong
    with pytest.raises(ValueError, match=rf"Zstandard: \d+ bytes or more instead of {size}"):
        fatbin.decompress_zstd(zstd(data), size)


def test_zstd_without_its_package(monkeypatch):
    """The sentence names the package, and how to do without it."""
    monkeypatch.setitem(sys.modules, "zstandard", None)
    text = image("sm_90", b"text", packed=b"(\xb5/\xfd", flags=ZSTD)
    with pytest.raises(ModuleNotFoundError, match=r"'zstandard' is missing; pip .* --no-compress"):
        fatbin.read(container(text))


def lz4(data: bytes) -> bytes:
    """Compress greedily (every fourth match is refused, so that literals of all lengths occur)."""
    out, at, anchor, seen = bytearray(), 0, 0, {}

    def lengths(literals: int, match: int | None) -> None:
        nibble = 0 if match is None else min(match - 4, 15)
        out.append(min(literals, 15) << 4 | nibble)
        more(literals)
        out.extend(data[anchor : anchor + literals])

    def more(value: int) -> None:
        if value >= 15:
            out.extend(b"\xff" * ((value - 15) // 255))
            out.append((value - 15) % 255)

    while at + 12 < len(data):
        key = data[at : at + 4]
        back = seen.get(key)
        seen[key] = at
        if back is None or at - back > 65535 or at % 4 == 3:
            at += 1
            continue
        length = 4
        while at + length < len(data) - 5 and data[back + length] == data[at + length]:
            length += 1
        lengths(at - anchor, length)
        out += (at - back).to_bytes(2, "little")
        more(length - 4)
        at += length
        anchor = at
    lengths(len(data) - anchor, None)
    return bytes(out)


@pytest.mark.parametrize("which", range(8))
def test_lz4(which):
    data = texts()[which]
    packed = lz4(data)
    assert fatbin.decompress_lz4(packed, len(data)) == data
    text = image("sm_90", data, packed=packed, flags=LZ4)
    assert fatbin.read(container(text))[0].data == data


@pytest.mark.parametrize(
    ("device", "inside", "chosen"),
    [
        ("sm_100a", ["sm_90", "sm_100a", "sm_100f", "sm_100"], "sm_100a"),
        ("sm_103a", ["sm_90", "sm_100a", "sm_100f", "sm_100"], "sm_100f"),
        ("sm_120a", ["sm_90", "sm_100a", "sm_100f", "sm_100"], "sm_100"),
        ("sm_120a", ["sm_80", "sm_90", "sm_90a"], "sm_90"),
        ("sm_90a", ["sm_80", "sm_90a", "sm_100"], "sm_90a"),
    ],
)
def test_which_ptx_a_device_gets(device, inside, chosen):
    """PTX ISA, .target: a runs on that architecture, f on its family, no suffix on all after it."""
    images = fatbin.read(container(*(image(arch, ptx(arch)) for arch in inside)))
    assert fatbin.choose(images, device).arch == chosen


def test_machine_code_alone_is_a_clear_error():
    images = fatbin.read(container(image("sm_100a", b"\x7fELF", CUBIN)))
    with pytest.raises(EmulationError, match=r"only machine code \(sm_100a\).*reads PTX; build it"):
        fatbin.choose(images, "sm_100a", "lib.so")


def test_no_ptx_for_the_device():
    images = fatbin.read(container(image("sm_90a", ptx("sm_90a")), image("sm_100a", b"", CUBIN)))
    sentence = "lib.so: holds ptx sm_90a, cubin sm_100a, of which no PTX runs on sm_100a"
    with pytest.raises(EmulationError, match=sentence):
        fatbin.choose(images, "sm_100a", "lib.so")


def test_ptx_of_other_code_than_the_device_would_run():
    """Where machine code fits better than any PTX, a GPU runs that, and it may be other code."""
    older, own = image("sm_80", ptx("sm_80")), image("sm_100a", b"\x7fELF", CUBIN)
    images = fatbin.read(container(older, own))
    with pytest.raises(
        EmulationError, match="sm_100a would run the cubin sm_100a, and the nearest"
    ):
        fatbin.choose(images, "sm_100a")
    assert fatbin.choose(images, "sm_120a").arch == "sm_80"
    same = fatbin.read(container(image("sm_90", ptx("sm_90")), image("sm_90", b"", CUBIN)))
    assert fatbin.choose(same, "sm_90a").arch == "sm_90"


def test_find_in_a_file():
    """A constant that looks like the magic number does not hide the fat binary behind it."""
    first, second = ptx_container("// one", "sm_90a"), ptx_container("// two", "sm_100a")
    noise = b"\x50\xed\x55\xba" + b"abc"
    file = noise + b"\x50\xed\x55\xba\x01\0\x10\0" + b"\xff" * 8 + first + noise + second + noise
    assert [i.ptx for i in fatbin.find(file)] == ["// one", "// two"]
    assert fatbin.find(b"\x50\xed\x55\xba") == []


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda d: b"PK" + d[2:], "begins with 504b55ba, not with the magic number"),
        (lambda d: b"", "begins with nothing, not with the magic number"),
        (lambda d: d[:-1], "it was cut off"),
        (lambda d: d[:24] + b"\xff" * 4 + d[28:], "claims 64 .* bytes, and the container ends at"),
        (lambda d: d[:8] + b"\x20" + bytes(7) + d[16:], "has no room for its header"),
    ],
)
def test_damaged_containers(damage, sentence):
    with pytest.raises(EmulationError, match=sentence):
        fatbin.read(damage(ptx_container("// some text", "sm_90a")))


@pytest.mark.parametrize("flags", [LZ4, ZSTD])
def test_damaged_compression(flags):
    """Every cut and every flipped byte is an error or the same size, and ends."""
    data = texts()[3][:2000]
    packed = zstd(data) if flags == ZSTD else lz4(data)
    rng = random.Random(2)
    failures = 0
    for _ in range(200):
        broken = bytearray(packed[: rng.randrange(8, len(packed))])
        if rng.random() < 0.5:
            broken = bytearray(packed)
            broken[rng.randrange(len(packed))] ^= 1 << rng.randrange(8)
        file = container(image("sm_90", data, packed=bytes(broken), flags=flags))
        with suppress(EmulationError):
            [found] = fatbin.read(file)
            assert len(found.data) == len(data)
            continue
        failures += 1
    assert failures > 50
