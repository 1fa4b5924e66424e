"""The catalogue: which body, which schedules and which lowering a spec has on a kind of target.

`registry` has the mechanism; each family registers its ops in a file of its own.
"""

from blockscale.catalog import edgellm as edgellm
from blockscale.catalog import exchange as exchange
from blockscale.catalog import fused as fused
from blockscale.catalog import gemm as gemm
from blockscale.catalog import int4 as int4
from blockscale.catalog import layout as layout
from blockscale.catalog import moe as moe
from blockscale.catalog import quant as quant
from blockscale.catalog.registry import Bucket as Bucket
from blockscale.catalog.registry import Road as Road
from blockscale.catalog.registry import Workload as Workload
from blockscale.catalog.registry import buckets as buckets
from blockscale.catalog.registry import cuda_source as cuda_source
from blockscale.catalog.registry import exported as exported
from blockscale.catalog.registry import logged as logged
from blockscale.catalog.registry import register as register
from blockscale.catalog.registry import road as road
from blockscale.catalog.registry import target as target
from blockscale.catalog.registry import workloads as workloads
