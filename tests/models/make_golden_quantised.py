"""Writes tests/models/golden/quantised.npz with the tools that made the formats, which the tests do not need.

    pip install torch transformers compressed-tensors loguru
    pip download --no-deps --no-binary autoawq autoawq==0.2.9; tar xf autoawq-0.2.9.tar.gz
    pip download --no-deps auto-gptq==0.7.1; unzip auto_gptq-0.7.1-*.whl -d auto_gptq
    python tests/models/make_golden_quantised.py --autoawq autoawq-0.2.9 --auto-gptq auto_gptq

Of each format the tensors that a checkpoint has, packed by its tools, and the weights that these make of them. The two
packages are taken apart, because as a whole they need kernels and older versions of others.
"""

import argparse
import importlib
import sys
import types
from pathlib import Path

import numpy as np
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

GOLDEN = Path(__file__).parent / "golden"
OUT, IN, SIZE = 32, 64, 16


def part_of(folder: Path, name: str):
    """A module of a package that is not imported as a whole."""
    parents = name.split(".")[:-1]
    for i in range(len(parents)):
        package = types.ModuleType(".".join(parents[: i + 1]))
        package.__path__ = [str(folder.joinpath(*parents[: i + 1]))]
        sys.modules[package.__name__] = package
    return importlib.import_module(name)


def plain(tensor: torch.Tensor) -> np.ndarray:
    """8-bit floats as their bits."""
    return (tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor).contiguous().numpy()


def affine(weight: torch.Tensor, bits: int, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales (of 16 bits) and zero points [out, groups], from 1 on: AutoGPTQ cannot store a zero."""
    groups = weight.reshape(len(weight), -1, SIZE)
    least, most = groups.amin(-1), groups.amax(-1)
    if symmetric:
        most = groups.abs().amax(-1)
        least = -most
    scales = ((most - least) / (2**bits - 1)).half().float()
    return scales, (-least / scales).round().clamp(1, 2**bits - 1)


def compressed(
    weight: torch.Tensor, form: str, *, group: bool = False, bits: int = 4, **scheme
) -> dict[str, np.ndarray]:
    args = QuantizationArgs(num_bits=bits, **scheme)
    whole = QuantizationScheme(targets=["Linear"], weights=args)
    if args.strategy == "block":
        rows, columns = args.block_structure
        blocks = torch.nn.functional.pad(weight, (0, -IN % columns, 0, -OUT % rows))
        blocks = blocks.reshape(-(-OUT // rows), rows, -(-IN // columns), columns)
        scales = blocks.abs().amax((1, 3)) / 448
    elif args.strategy == "tensor":
        scales = weight.abs().max()[None] / 448
    elif args.strategy == "channel":
        scales = weight.abs().amax(1, keepdim=True) / (448 if args.type == "float" else 127)
    else:
        scales, zeros = affine(weight, bits, args.symmetric)
    state = {"weight": weight, "weight_scale": scales.bfloat16().float()}
    if not args.symmetric:
        state["weight_zero_point"] = (zeros - 2 ** (bits - 1)).to(torch.int8)
    compressor = BaseCompressor.get_value_from_registry(form)
    stored = compressor.compress(state, whole)
    values = compressor.decompress(stored, whole)["weight"]
    return {name: plain(x) for name, x in stored.items()} | {"values": values.numpy()}


def fp8(weight: torch.Tensor) -> dict[str, np.ndarray]:
    """In blocks of 16 x 32, which transformers wants to divide the matrix."""
    blocks = weight.reshape(OUT // 16, 16, IN // 32, 32)
    scales = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).reshape(OUT, IN).to(torch.float8_e4m3fn)
    values = _dequantize_fp8_weight(codes, scales, [16, 32], torch.float32)
    return {"weight": plain(codes), "weight_scale_inv": plain(scales), "values": plain(values)}


def awq(weight: torch.Tensor, folder: Path) -> dict[str, np.ndarray]:
    linear = torch.nn.Linear(IN, OUT, bias=False)
    linear.weight.data = weight
    scales, zeros = affine(weight, 4, symmetric=False)
    module = part_of(folder, "awq.modules.linear.gemm").WQLinear_GEMM
    made = module.from_linear(linear, 4, SIZE, scales=scales.T.contiguous(), zeros=zeros.T.contiguous())
    parts = {name: getattr(made, name) for name in ("qweight", "qzeros", "scales")}
    unpack = part_of(folder, "awq.utils.packing_utils").dequantize_gemm
    values = unpack(parts["qweight"], parts["qzeros"], parts["scales"].float(), 4, SIZE).T
    return {name: plain(x) for name, x in (parts | {"values": values}).items()}


def gptq(weight: torch.Tensor, folder: Path, bits: int, ordered: bool) -> dict[str, np.ndarray]:
    linear = torch.nn.Linear(IN, OUT, bias=False)
    groups = torch.arange(IN) // SIZE
    order = groups if ordered else groups[torch.randperm(IN)]
    linear.weight.data = weight[:, order.argsort(stable=True).argsort()]  # the same groups, dealt out
    scales, zeros = affine(weight, bits, symmetric=False)
    made = part_of(folder, "auto_gptq.nn_modules.qlinear.qlinear_cuda").QuantLinear(
        bits, SIZE, IN, OUT, False
    )
    made.pack(linear, scales, zeros, order.int())
    parts = {name: getattr(made, name).clone() for name in ("qweight", "qzeros", "scales", "g_idx")}
    with torch.no_grad():  # of the unit vectors, in float32: the weights themselves
        values = made.float()(torch.eye(IN)).T
    return {name: plain(x) for name, x in (parts | {"values": values}).items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--autoawq", type=Path, required=True, help="autoawq 0.2.9, unpacked")
    parser.add_argument("--auto-gptq", type=Path, required=True, help="auto-gptq 0.7.1, unpacked")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    weight = torch.randn(OUT, IN)
    weight[:, ::7] *= 3
    int4 = {"type": "int", "strategy": "group", "group_size": SIZE}
    float8 = {"type": "float", "bits": 8}
    found = {
        "fp8": fp8(weight),
        "float_tensor": compressed(weight, "float-quantized", strategy="tensor", **float8),
        "float_channel": compressed(weight, "float-quantized", strategy="channel", **float8),
        "float_block": compressed(
            weight, "float-quantized", strategy="block", block_structure=[24, 40], **float8
        ),
        "int_channel": compressed(weight, "int-quantized", type="int", bits=8, strategy="channel"),
        "pack": compressed(weight, "pack-quantized", **int4),
        "pack_8": compressed(weight, "pack-quantized", bits=8, **int4),
        "pack_zeros": compressed(weight, "pack-quantized", symmetric=False, **int4),
        "awq": awq(weight, arguments.autoawq),
        "gptq_2": gptq(weight, arguments.auto_gptq, 2, True),
        "gptq_4": gptq(weight, arguments.auto_gptq, 4, True),
        "gptq_8": gptq(weight, arguments.auto_gptq, 8, True),
        "gptq_order": gptq(weight, arguments.auto_gptq, 4, False),
    }
    arrays = {f"{case}/{name}": x for case, tensors in found.items() for name, x in tensors.items()}
    for case, tensors in found.items():
        alike = np.corrcoef(
            np.sort(tensors["values"], axis=1).ravel(), weight.sort(1).values.numpy().ravel()
        )[0, 1]
        assert alike > (0.9 if case == "gptq_2" else 0.99), (case, alike)
    np.savez_compressed(GOLDEN / "quantised.npz", **arrays)
