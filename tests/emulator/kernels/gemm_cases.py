"""Cases of the asynchronous kernels: nvfp4_tile, nvfp4_pair, cluster, chained."""

from __future__ import annotations

import numpy as np

from tests.emulator.kernels.cuda_kernels import Case, atoms, equal, nans, nvfp4, pack, tensor_map

Generator = np.random.Generator


def nvfp4_tile(
    rng: Generator, m: int = 128, n: int = 128, k: int = 256, *, high_first: bool = False
) -> Case:
    """One CTA a 128 x 128 tile; m, n multiples of 128, k of 256."""
    a, sa, left = nvfp4(rng, m, k)
    b, sb, right = nvfp4(rng, n, k)
    packed_a, packed_b = pack(a, high_first=high_first), pack(b)
    c = nans(m, n)
    maps = [tensor_map(x, "UINT8", (128, 128), "128B") for x in (packed_a, packed_b)]
    return Case(
        source="nvfp4_tile",
        entry="nvfp4_tile",
        args=[*maps, atoms(sa), atoms(sb), c, n, k // 256],
        judge=equal((c, left @ right.T)),
        grid=(m // 128, n // 128),
        threads=224,
        shared=2 * 36864 + 48,
    )


def nvfp4_pair(
    rng: Generator, m: int = 256, n: int = 256, k: int = 256, *, swizzle: str = "64B"
) -> Case:
    """Two CTAs a 256 x 256 tile; k a multiple of 128."""
    a, sa, left = nvfp4(rng, m, k)
    b, sb, right = nvfp4(rng, n, k)
    c = nans(m, n)
    scales = [atoms(s).reshape(-1, k // 64, 32, 16) for s in (sa, sb)]
    maps = [tensor_map(pack(x), "UINT8", (64, 128), swizzle) for x in (a, b)]
    boxes = ((16, 32, 2, 1), (16, 32, 2, 2))  # bytes, rows, atoms along K, blocks of 128 rows
    maps += [tensor_map(x, "UINT8", box) for x, box in zip(scales, boxes, strict=True)]
    maps += [tensor_map(c, "FLOAT32", (32, 128), "128B")]
    return Case(
        source="nvfp4_pair",
        entry="nvfp4_pair",
        args=[*maps, k // 128],
        judge=equal((c, left @ right.T)),
        grid=(m // 128, n // 256),
        threads=192,
        cluster=2,
        shared=2 * 16384 + 2 * (2 * 8192 + 3072) + 48,
    )


def cluster_sums(rng: Generator, size: int = 2, clusters: int = 1) -> Case:
    """Clusters of ``size`` CTAs that multicast and read each other's shared memory."""
    ctas = size * clusters
    x = rng.integers(-100, 101, (8 * ctas, 32)).astype(np.float32) / 4
    own, running = nans(ctas, 32), nans(ctas, 32)
    blocks = x.astype(np.float64).reshape(clusters, size, 8, 32).sum(2)
    sums = np.zeros((clusters, size, 32))
    for to in range(size):
        for source in range(size):
            if to == source or to != (source + 1) % size:
                sums[:, to] += blocks[:, source]
    total = sums.cumsum(1)
    return Case(
        source="cluster",
        entry="cluster_sums",
        args=[tensor_map(x, "FLOAT32", (32, 8)), own, running, size],
        judge=equal((own, sums.reshape(ctas, 32)), (running, total.reshape(ctas, 32))),
        grid=(ctas,),
        threads=64,
        cluster=size,
        shared=4 * 8 * 32 * 4 + 32 * 4 + 16,
    )


def chained(rng: Generator, m: int = 128, length: int = 256) -> Case:
    """relu(Q K^T) V of small integers, all exact in f16."""
    q, k = (rng.integers(-2, 3, (rows, 64)).astype(np.float16) for rows in (m, length))
    v = rng.integers(-4, 5, (length, 128)).astype(np.float16)
    o = nans(m, 128)
    wide = [x.astype(np.float64) for x in (q, k, v)]
    want = np.maximum(wide[0] @ wide[1].T, 0) @ wide[2]
    maps = [tensor_map(x, "FLOAT16", (64, 128), "128B") for x in (q, k, v)]
    return Case(
        source="chained",
        entry="chained",
        args=[*maps, o, length // 128],
        judge=equal((o, want)),
        grid=(m // 128,),
        shared=16384 * 4 + 32,
    )
