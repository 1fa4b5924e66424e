"""What `ffi_matrix` runs in each environment: ``ffi_smoke.py FOLDER VERSION``.

The folder has kernels.so, kernels-gpu.so and calls.pt: calls, their arguments and their results.
Exits with status 0 after one line that counts what was compared.
"""

import importlib.util
import sys
import threading
from pathlib import Path


def main(folder: Path, version: str) -> None:
    """Load the libraries and compare every result, bit for bit."""
    import torch
    import tvm_ffi

    import blockscale as bs
    from blockscale.compat import flashinfer

    assert importlib.util.find_spec("tvm") is None, "apache-tvm is here"
    assert tvm_ffi.__version__ == version, tvm_ffi.__version__
    library = bs.load(folder / "kernels.so")
    doors = {"bs": bs, "flashinfer": flashinfer, "library": library}
    calls = torch.load(folder / "calls.pt", weights_only=False)
    compared = 0

    def run(door: str, name: str, given: list, named: dict) -> list:
        place = doors[door]
        function = place[name] if door == "library" else getattr(place, name)
        got = function(*given, **named)
        return list(got) if isinstance(got, tuple) else [got]

    for door, name, given, named, want in calls:
        got = run(door, name, given, named)
        assert len(got) == len(want), name
        for made, expected in zip(got, want, strict=True):
            made = made if isinstance(made, torch.Tensor) else torch.as_tensor(made)
            assert torch.equal(made.view(torch.uint8), expected.view(torch.uint8)), name
            compared += 1

    door, name, given, named, want = calls[0]
    found: list = []
    threads = [
        threading.Thread(target=lambda: found.append(run(door, name, given, named)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(torch.equal(made[0], want[0]) for made in found)

    numpy_result = library["quantize_nvfp4_f32"](
        torch.ones(4, 64).numpy(), torch.ones(1).numpy()
    )  # arrays of NumPy go through tvm_ffi's own view
    assert numpy_result[0].shape == (4, 32)
    for bad, words in (
        ((torch.ones(4, 60),), "multiple of 16"),
        ((torch.ones(4, 64).double(),), "float64"),
    ):
        refused = ""
        try:
            bs.quantize(*bad)
        except (TypeError, ValueError) as error:
            refused = str(error)
        assert words in refused, refused

    gpu = bs.load(folder / "kernels-gpu.so")
    assert gpu.kind == "cuda"
    assert len(gpu)
    if torch.cuda.is_available():
        x = torch.randn(8, 256, dtype=torch.bfloat16)
        for made, want in zip(bs.quantize(x.cuda()), bs.quantize(x), strict=True):
            assert torch.equal(made.cpu().view(torch.uint8), want.view(torch.uint8))
            compared += 1
    print(f"{compared} results equal, {len(library) + len(gpu)} functions loaded")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
