"""The structs of `csrc/` as ctypes lays them out, field by field in the same order, and what is called with them."""

from __future__ import annotations

import ctypes
from typing import Any

_P, _N, _I, _F = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float


def _struct(name: str, **fields: Any) -> Any:
    """A Structure whose instances also have room for their own address."""
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


# csrc/matmul.h
Weight = _struct(
    "Weight", panels=_P, scales=_P, bias=_P, num_panels=_N, inputs=_N, outputs=_N, dtype=_I, gated=_I
)  # fmt: skip

# csrc/attention.h
Memory = _struct(
    "Memory",
    **{"k": _P, "v": _P, "page_stride": _N, "block_size": _N, "kv_heads": _N, "key_dim": _N, "value_dim": _N},
    **{"dtype": _I, "k_scale": _P, "v_scale": _P, "scale_stride": _N},
)
Requests = _struct(
    "Requests", cu_seqlens_q=_P, seqused_k=_P, block_table=_P, slots=_P, count=_N, block_table_width=_N, num_rows=_N
)  # fmt: skip
Rotation = _struct("Rotation", cos=_P, sin=_P, half=_N)

# csrc/kernels.cpp
LinearArguments = _struct(
    "LinearArguments",
    **{"weight": _P, "x": _P, "norm_weight": _P, "residual": _P, "y": _P},
    **{"x_stride": _N, "rows": _N, "residual_stride": _N, "eps": _F, "activation": _I},
)
RowArguments = _struct(
    "RowArguments",
    **{"x": _P, "weight": _P, "bias": _P, "rotation": _P, "y": _P},
    **{"x_stride": _N, "rows": _N, "heads": _N, "dim": _N, "eps": _F},
)
AngleArguments = _struct(
    "AngleArguments", positions=_P, inv_freq=_P, cos=_P, sin=_P, rows=_N, half=_N, factor=_F
)  # fmt: skip
EmbedArguments = _struct("EmbedArguments", token_ids=_P, table=_P, y=_P, rows=_N, dim=_N, dtype=_I)
WriteArguments = _struct(
    "WriteArguments", memory=_P, requests=_P, k=_P, v=_P, rotation=_P, k_stride=_N, v_stride=_N
)  # fmt: skip
AttendArguments = _struct(
    "AttendArguments",
    **{"memory": _P, "requests": _P, "q": _P, "rotation": _P, "key_rotation": _P, "out": _P},
    **{"q_stride": _N, "q_heads": _N, "window": _N, "scale": _F, "softcap": _F, "diagonal": _I},
)
Call = _struct("Call", function=_P, arguments=_P)

OPERATIONS = ("linear", "rms_norm", "layer_norm", "rotate", "angles", "embed", "write_kv", "attend")
"""`miniserve_<name>(pool, arguments)`: what a step is made of, and what `run` can repeat."""

SIGNATURES: dict[str, tuple[list[Any], Any]] = {
    "pool_new": ([_I], _P),
    "pool_delete": ([_P], None),
    "use_large_pages": ([_P, _N], None),
    "pack": ([_P, _I, _P, _I, _N, _N, _I, _P, _P], None),
    "run": ([_P, _P, _N], None),
    "argmax": ([_P, _P, _N, _N, _N, _P], None),
    **{name: ([_P, _P], None) for name in OPERATIONS},
}
