"""From the tensors of a checkpoint to the parameter tree: one error for all mismatches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from ml_dtypes import bfloat16
from rich.progress import track

from models.config import ModelConfig
from models.fp8_weights import packed, quantised
from models.mxfp4 import BLOCK, Mxfp4, dequantize_into
from models.packed_experts import pack_leaf
from models.params import Params, ParamSpec, param_specs
from models.sharding import param_shardings, rules_for
from models.weight_names import is_ignored, leaf_names, text_name
from pallas_kernels.fp8_products import Fp8Weights


class WeightMismatchError(ValueError):
    """A checkpoint does not fit its configuration; the message lists every mismatch."""


class TensorSource(Protocol):
    """The tensors of a checkpoint, in the layout of Hugging Face (matrices [out, in])."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor, by name."""
        ...

    def read(self, name: str) -> np.ndarray | Mxfp4:
        """One tensor, read when it is needed; Mxfp4 only for the weights of all experts of a GGUF file."""
        ...

    def in_mxfp4(self, name: str) -> bool:
        """Whether `read` gives Mxfp4."""
        ...

    def in_fp8(self, name: str) -> tuple[np.ndarray, np.ndarray] | None:
        """(codes f8e4m3fn[out, in], scales f32[out]) of a weight that is stored so; None of any other."""
        ...


class _Part(NamedTuple):
    shapes: tuple[tuple[int, ...], ...]  # of its tensors in the checkpoint
    place: Callable[..., None]  # (leaf, *tensors): writes the tensors into their part of the leaf


class _Piece(NamedTuple):
    """Tensors of a checkpoint, by name, and where they belong: in a part of a leaf, or of one expert's share of it."""

    names: tuple[str, ...]
    part: _Part
    expert: int | None

    def place(self, leaf: np.ndarray, *tensors: Any) -> None:
        """Writes them there."""
        self.part.place(leaf if self.expert is None else leaf[self.expert], *tensors)


def _parts(config: ModelConfig) -> dict[str, _Part]:
    V, E, F, D = config.vocab_size, config.hidden_size, config.intermediate_size, config.head_dim
    N, K, G = config.num_heads, config.num_kv_heads, config.group_size
    X, S = config.num_experts, config.expert_size

    def part(shape: tuple[int, ...], index: tuple, view: Callable[[np.ndarray], np.ndarray]) -> _Part:
        def place(leaf: np.ndarray, tensor: np.ndarray) -> None:
            leaf[index] = view(tensor)

        return _Part((shape,), place)

    def experts(shape: tuple[int, ...], index: tuple) -> _Part:
        """Of matrices [X, out, in], which may be in MXFP4."""

        def place(leaf: np.ndarray, tensor: np.ndarray | Mxfp4) -> None:
            out = leaf[index].swapaxes(1, 2)
            if isinstance(tensor, Mxfp4):
                dequantize_into(out, *tensor)
            else:
                out[...] = tensor

        return _Part((shape,), place)

    def mxfp4(rows: int, columns: int, view: Callable[[np.ndarray], np.ndarray]) -> _Part:
        """Of matrices [rows, columns], as which `view` shows the leaf; its rows may be of several axes."""

        def place(leaf: np.ndarray, blocks: np.ndarray, scales: np.ndarray) -> None:
            out = view(leaf)
            shape = (*out.shape[:-1], columns // BLOCK)
            dequantize_into(out, blocks.reshape(*shape, -1), scales.reshape(shape))

        scales = (X, rows, columns // BLOCK)
        return _Part(((*scales, BLOCK // 2), scales), place)

    def attn_out(leaf: np.ndarray, tensor: np.ndarray) -> None:
        leaf[...] = tensor.T.reshape(leaf.shape)

    every = slice(None)
    return {
        "embed": part((V, E), (...,), lambda x: x),
        "norm": part((E,), (...,), lambda x: x),
        "lm_head": part((V, E), (...,), lambda x: x.T),
        "q": part((N * D, E), (every, every, slice(0, G)), lambda x: x.T.reshape(-1, K, G, D)),
        "k": part((K * D, E), (every, every, G), lambda x: x.T.reshape(-1, K, D)),
        "v": part((K * D, E), (every, every, G + 1), lambda x: x.T.reshape(-1, K, D)),
        "q_bias": part((N * D,), (every, slice(0, G)), lambda x: x.reshape(K, G, D)),
        "k_bias": part((K * D,), (every, G), lambda x: x.reshape(K, D)),
        "v_bias": part((K * D,), (every, G + 1), lambda x: x.reshape(K, D)),
        "head_norm": part((D,), (...,), lambda x: x),
        "o": _Part(((E, N * D),), attn_out),
        "o_bias": part((E,), (...,), lambda x: x),
        "gate": part((F, E), (every, 0), lambda x: x.T),
        "up": part((F, E), (every, 1), lambda x: x.T),
        "down": part((E, F), (...,), lambda x: x.T),
        "router": part((X, E), (...,), lambda x: x.T),
        "expert_gate": part((S, E), (every, 0), lambda x: x.T),  # of one expert's part of the leaf
        "expert_up": part((S, E), (every, 1), lambda x: x.T),
        "expert_down": part((E, S), (...,), lambda x: x.T),
        "all_gate": experts((X, S, E), (every, every, 0)),
        "all_up": experts((X, S, E), (every, every, 1)),
        "all_gate_up": part((X, 2 * S, E), (...,), lambda x: x.reshape(X, 2, S, E).transpose(0, 3, 1, 2)),
        "all_down": experts((X, E, S), (...,)),
        "all_gate_bias": part((X, S), (every, 0), lambda x: x),
        "all_up_bias": part((X, S), (every, 1), lambda x: x),
        "all_down_bias": part((X, E), (...,), lambda x: x),
        "router_bias": part((X,), (...,), lambda x: x),
        "sinks": part((N,), (...,), lambda x: x.reshape(K, G)),
        # GPT-OSS: matrices [in, out], gate and up one column each in turn.
        "pairs": part((X, E, 2 * S), (...,), lambda x: x.reshape(X, E, S, 2).swapaxes(2, 3)),
        "pairs_bias": part((X, 2 * S), (...,), lambda x: x.reshape(X, S, 2).swapaxes(1, 2)),
        "down_in_out": part((X, S, E), (...,), lambda x: x),
        "mxfp4_gate_up": mxfp4(2 * S, E, lambda leaf: leaf.transpose(0, 3, 2, 1)),  # [X, S, 2, E]
        "mxfp4_down": mxfp4(E, S, lambda leaf: leaf.swapaxes(1, 2)),
    }


def _names_here(source: TensorSource) -> dict[str, str]:
    """Name here -> name in the checkpoint. Raises WeightMismatchError where two mean the same tensor."""
    names: dict[str, str] = {}
    for name in source.shapes:
        here = text_name(name)
        if here in names:
            raise WeightMismatchError(f"{names[here]} and {name} are the same tensor")
        names[here] = name
    return names


def has_own_head(source: TensorSource) -> bool:
    """Whether a Hugging Face checkpoint holds a head that is another matrix than its embedding."""
    names = _names_here(source)
    both = [names.get(f"{part}.weight") for part in ("lm_head", "model.embed_tokens")]
    if None in both:
        return False
    head, embedding = (np.asarray(source.read(str(name))) for name in both)
    return head.shape == embedding.shape and not np.array_equal(head, embedding)


def check_weights(source: TensorSource, config: ModelConfig, style: str) -> None:
    """Raises WeightMismatchError listing every missing tensor, unexpected tensor and wrong shape.

    Unless there are fewer tensors than layers: a million names would be gigabytes, for nobody to read.
    """
    if config.num_layers > len(source.shapes):
        raise WeightMismatchError(
            f"the configuration of {config.name} has {config.num_layers} layers, and its weights are {len(source.shapes)} "
            "tensors"
        )
    parts = _parts(config)
    found = {here: source.shapes[name] for here, name in _names_here(source).items()}
    wanted = {
        name: shape
        for pieces in leaf_names(config, style, found).values()
        for tensors in pieces
        for name, shape in zip(tensors.names, parts[tensors.part].shapes, strict=True)
    }
    problems = [
        f"{name}: expected shape {shape}, found {tuple(found[name])}"
        for name, shape in wanted.items()
        if name in found and tuple(found[name]) != shape
    ]
    problems += [
        f"{name}: missing (expected shape {shape})" for name, shape in wanted.items() if name not in found
    ]
    # A tied checkpoint may store the head a second time.
    tied_head = {"lm_head.weight", "output.weight"} if config.tie_embeddings else set()
    problems += [
        f"{name}: unexpected (shape {tuple(shape)})"
        for name, shape in found.items()
        if name not in wanted and name not in tied_head and not is_ignored(name)
    ]
    if problems:
        lines = "\n  ".join(problems)
        raise WeightMismatchError(
            f"the weights of {config.name} do not fit its configuration, {len(problems)} mismatches:\n  {lines}"
        )


def _in_mxfp4(*tensors: Any) -> Mxfp4:
    """Of a GGUF file one tensor, of a Hugging Face checkpoint blocks and scales."""
    return tensors[0] if len(tensors) == 1 else Mxfp4(*tensors)


def _in_fp8(source: TensorSource, pieces: Sequence[_Piece], spec: ParamSpec) -> Fp8Weights:
    """A leaf of pieces: their own codes and scales where these are of that kind, else the nearest."""
    stored = [source.in_fp8(piece.names[0]) for piece in pieces]
    own = [x for x in stored if x is not None]
    if len(own) == len(stored):
        codes, scales = np.empty(spec.shape, own[0][0].dtype), np.empty(spec.of_columns, np.float32)
        for piece, (of_piece, its_scales) in zip(pieces, own, strict=True):
            piece.place(codes, of_piece)
            piece.place(scales, its_scales[:, None])
        return packed(codes, scales, spec)
    leaf = np.empty(spec.shape, bfloat16)
    for piece in pieces:
        tensors = [source.read(name) for name in piece.names]
        if len(tensors) == 1 and isinstance(tensors[0], np.ndarray):
            # Rounded once, not to the parameters' dtype before. MXFP4 is as exact in bfloat16.
            leaf = leaf.astype(np.result_type(leaf, tensors[0]), copy=False)
        piece.place(leaf, *tensors)
    return quantised(leaf, spec)


def experts_in_mxfp4(source: TensorSource, config: ModelConfig, style: str) -> bool:
    """Whether a checkpoint has the weights of all experts in MXFP4."""
    names_here = _names_here(source)
    pieces = [
        piece
        for (leaf, _), pieces in leaf_names(config, style, names_here).items()
        if leaf in ("expert_gate_up", "expert_down")
        for piece in pieces
    ]
    return bool(pieces) and all(
        len(piece.names) > 1 or (piece.names[0] in names_here and source.in_mxfp4(names_here[piece.names[0]]))
        for piece in pieces
    )


def assemble_params(
    source: TensorSource,
    config: ModelConfig,
    dtype: DTypeLike,
    *,
    style: str = "huggingface",
    progress: bool = True,
    mesh: Mesh | None = None,
) -> Params:
    """Reads a checkpoint into the parameter tree, one leaf at a time.

    Args:
      style: whose tensor names the source has, "huggingface" or "gguf".
      mesh: over which every leaf is spread as soon as it is read (`models.sharding.rules_for`); None: the first device.
      dtype: dtype of all parameters but experts in MXFP4 and weights in FP8, if the configuration says that they are
        (`experts_mxfp4`, `weights_fp8`).

    Raises:
      WeightMismatchError: before anything is read, when names or shapes do not fit.
      NotImplementedError: for experts in MXFP4 that the kernel does not take.
    """
    check_weights(source, config, style)
    parts = _parts(config)
    names_here = _names_here(source)
    names = leaf_names(config, style, names_here)
    specs = param_specs(config)
    places = None if mesh is None else param_shardings(config, mesh, rules_for(config, mesh.size))
    flat: dict[tuple[str, int | None], Any] = {}
    items = track(names.items(), description="Reading weights", disable=not progress, transient=True)
    for (leaf_name, layer), pieces in items:
        spec: ParamSpec = specs[leaf_name] if layer is None else specs["layers"][layer][leaf_name]
        found = [_Piece(tuple(names_here[x] for x in p.names), parts[p.part], p.expert) for p in pieces]
        place = places and (places if layer is None else places["layers"][layer])[leaf_name]
        if spec.packed:
            held = [_in_mxfp4(*map(source.read, piece.names)) for piece in found]
            flat[leaf_name, layer] = jax.device_put(pack_leaf(held, spec.shape), place)
            continue
        if spec.fp8:
            flat[leaf_name, layer] = jax.device_put(_in_fp8(source, found, spec), place)
            continue
        leaf = np.empty(spec.shape, dtype)
        for piece in found:
            piece.place(leaf, *map(source.read, piece.names))
        flat[leaf_name, layer] = jax.device_put(leaf, place)
    layers = tuple({key: flat[key, i] for key in layer} for i, layer in enumerate(specs["layers"]))
    top = {key: flat[key, None] for key in specs if key != "layers"}
    return {**top, "layers": layers}
