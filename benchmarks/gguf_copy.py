"""Copy a GGUF file with its matrices in another type, so that llama.cpp runs the same weights as everyone else.

python benchmarks/gguf_copy.py smollm2.gguf models/smollm2-bf16.gguf BF16     (or Q8_0, F16)
"""

from __future__ import annotations

import sys

import gguf


def main(source: str, target: str, kind: str) -> None:
    """Dequantise every tensor and store the matrices as `kind`, vectors as F32; metadata as it was."""
    reader = gguf.GGUFReader(source)
    architecture = reader.get_field("general.architecture")
    writer = gguf.GGUFWriter(target, architecture.contents() if architecture else "llama")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            sub_type = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type)
    matrix_type = gguf.GGMLQuantizationType[kind]
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(tuple(reversed(tensor.shape.tolist())))
        stored = matrix_type if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, gguf.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main(*sys.argv[1:4])
