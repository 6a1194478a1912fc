"""Gemma 3 in GGUF files, and SentencePiece vocabularies: read as llama.cpp reads them."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from make_golden_texts import PIECE_TEXTS
from transformers import GemmaTokenizer

from models.attention import dense_attend
from models.config import RopeScaling, UnsupportedModelError
from models.gguf import GGUFFile
from models.gguf_tokenizer import merges_of_scores
from models.huggingface import HuggingFaceDirectory
from models.registry import load_model
from models.transformer import forward
from tests.models.checkpoints import GOLDEN, Tensors, golden_tensors
from tests.models.gguf_files import write_gguf

SENTENCEPIECE = json.loads((GOLDEN / "sentencepiece.json").read_text())
ROPE = {"gemma3.rope.scaling.factor": 8.0, "gemma3.rope.freq_base_swa": 50.0}
WINDOW = {"gemma3.attention.sliding_window": 24, "gemma3.attention.sliding_window_pattern": 3}


def pieces_of(name):
    """(token, score, type) as llama.cpp's converter writes them: added tokens with spaces for ▁ and a low score."""
    golden = SENTENCEPIECE[name]
    types = {"IsUnknown": 2, "IsControl": 3, "IsUnused": 5, "IsByte": 6, "": 1}
    return [
        (token.replace("▁", " "), -1000.0, 4)
        if token in golden["user_defined"]
        else (token, score, types[kind])
        for token, score, kind in zip(golden["pieces"], golden["scores"], golden["kinds"], strict=True)
    ]


@pytest.fixture(scope="module")
def gemma():
    return golden_tensors("tiny_gemma3")


def write(path, gemma, **changes):
    fields = {
        "architecture": "gemma3",
        "floats": ROPE,
        "ints": WINDOW,
        "texts": {"gemma3.rope.scaling.type": "linear"},
    }
    return write_gguf(path, *gemma, **(fields | changes))


def logits_of(params, config, tokens):
    tokens = jnp.asarray(tokens, jnp.int32)
    positions = jnp.arange(len(tokens), dtype=jnp.int32)
    return np.asarray(
        forward(params, config, tokens, positions, dense_attend(positions, config=config), None)[0]
    )


def test_logits_agree_with_transformers(gemma, tmp_path, cache):
    """Through the file's own names, norms with the offset in them and metadata; only the scale is not in it."""
    pieces = pieces_of("gemma")[:128]
    loaded = load_model(write(tmp_path / "g.gguf", gemma, pieces=pieces), progress=False)
    config = gemma[1].replace(name="g", bos_token_id=2, eos_token_ids=(1, 5), query_scale=16**-0.5)
    assert loaded.config.norm_eps == pytest.approx(1e-6)  # float32 in the file
    config = config.replace(norm_eps=loaded.config.norm_eps)
    assert loaded.config == config
    golden = np.load(GOLDEN / "tiny_gemma3.npz")
    logits = logits_of(loaded.params, config.replace(query_scale=24**-0.5), golden["tokens"])
    np.testing.assert_allclose(
        logits, golden["logits"], rtol=1e-4, atol=1e-4 * np.abs(golden["logits"]).max()
    )
    again = load_model(tmp_path / "g.gguf", progress=False)  # from the cache
    assert again.config == config and hash(again.config) == hash(config)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), loaded.params, again.params))
    assert all(again.tokenizer.encode(text) == loaded.tokenizer.encode(text) for text in PIECE_TEXTS)


def test_norms_do_not_carry_the_offset(gemma, tmp_path):
    file = GGUFFile(write(tmp_path / "g.gguf", gemma))
    stored = gemma[0].tensors["model.layers.3.self_attn.k_norm.weight"].astype(np.float32)
    np.testing.assert_allclose(file.read("blk.3.attn_k_norm.weight"), stored, atol=1e-6)
    np.testing.assert_array_equal(
        file.read("blk.3.attn_k.weight"),
        gemma[0].tensors["model.layers.3.self_attn.k_proj.weight"].astype(np.float32),
    )


@pytest.mark.parametrize(
    ("ints", "floats", "expected"),
    [
        (
            {"gemma3.attention.sliding_window": 24},
            {},
            {"sliding_layers": (0, 1, 2, 3, 4), "sliding_rope_theta": 1e4},
        ),
        ({}, {}, {"sliding_layers": (), "sliding_window": None, "sliding_rope_theta": None}),
        (WINDOW, ROPE, {"sliding_layers": (0, 1, 3, 4), "sliding_rope_theta": 50.0}),
        (WINDOW, ROPE, {"rope_scaling": RopeScaling(kind="linear", factor=8.0), "max_positions": 512}),
        (WINDOW | {"gemma3.attention.sliding_window_pattern": 1}, ROPE, {"sliding_layers": ()}),
    ],
)
def test_windows_as_llama_cpp_reads_them(gemma, tmp_path, ints, floats, expected):
    config = GGUFFile(write(tmp_path / "g.gguf", gemma, ints=ints, floats=floats)).config
    assert {key: getattr(config, key) for key in expected} == expected


def test_only_the_largest_model_has_another_scale(gemma, tmp_path):
    """62 layers: that of 27B is (E / N) ** -0.5 and not D ** -0.5."""
    source, config = gemma
    assert GGUFFile(write(tmp_path / "s.gguf", gemma)).config.attention_scale == 16**-0.5
    deep = write(tmp_path / "d.gguf", (source, config.replace(num_layers=62)))
    assert GGUFFile(deep).config.attention_scale == (32 / 4) ** -0.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"floats": {"gemma3.final_logit_softcapping": 30.0}}, "final_logit_softcapping not supported"),
        ({"ints": WINDOW | {"gemma3.attention.sliding_window_pattern": 9}}, "sliding window in every layer"),
        ({"ints": WINDOW | {"gemma3.attention.sliding_window_pattern": 0}}, "sliding_window_pattern 0 not"),
        (
            {"architecture": "qwen3", "ints": {"qwen3.attention.sliding_window": 64}},
            "sliding window not supported",
        ),
    ],
)
def test_errors(gemma, tmp_path, changes, message):
    with pytest.raises(UnsupportedModelError, match=message):
        GGUFFile(write(tmp_path / "g.gguf", gemma, **changes))


@pytest.mark.parametrize("name", ["gemma", "llama"])
def test_pieces_agree_with_sentencepiece(name, tiny, gemma, tmp_path):
    source, config = gemma if name == "gemma" else tiny
    pieces = pieces_of(name)
    path = tmp_path / "t.gguf"
    if name == "gemma":
        prefix = {"tokenizer.ggml.add_space_prefix": False}
        write(path, gemma, pieces=pieces, flags=prefix)
    else:
        write_gguf(path, source, config, pieces=pieces)
    tokenizer = GGUFFile(path).tokenizer()
    for text, ids in zip(PIECE_TEXTS, SENTENCEPIECE[name]["ids"], strict=True):
        assert tokenizer.encode(text) == [2, *ids]
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        assert tokenizer.decode(ids) == text.replace("▁", " ")
    if name == "gemma":
        assert tokenizer.encode(" ▁a", add_special_tokens=False) == tokenizer.encode("  a")[1:]
        turn = "<start_of_turn>user\nHe<end_of_turn>\n"
        ids = tokenizer.encode(turn)
        assert (ids[:2], ids.count(5)) == ([2, 4], 1)
        assert tokenizer.decode(ids) == "user\nHe\n" and 5 in tokenizer.eos_token_ids


def test_html_does_not_end_a_text(gemma, tmp_path):
    """Gemma's vocabulary has the tag </s>, which is no control token; its turns end with another one."""
    pieces = [
        ("<eos>" if token == "</s>" else token, score, kind) for token, score, kind in pieces_of("gemma")
    ]
    pieces = [("</s>" if token == "<b>" else token, score, kind) for token, score, kind in pieces]
    tokenizer = GGUFFile(write(tmp_path / "t.gguf", gemma, pieces=pieces)).tokenizer()
    assert tokenizer.encode("a</s>")[-1] == 10 and tokenizer.decode([10]) == "</s>"
    assert tokenizer.eos_token_ids == (1, 5)  # <eos>, <end_of_turn>


def test_the_same_vocabulary_as_a_hugging_face_directory(gemma, tmp_path):
    """What transformers' own Gemma tokenizer saves is read, and splits texts as SentencePiece does."""
    pieces = pieces_of("gemma")
    tokens, scores, types = zip(*pieces, strict=True)
    saved = GemmaTokenizer(
        vocab={token: i for i, token in enumerate(tokens)}, merges=merges_of_scores(tokens, scores, types),
        bos_token="<s>", eos_token="</s>",
    )  # fmt: skip
    saved.add_tokens([token for token, _, kind in pieces if kind == 4])
    saved.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text((GOLDEN / "tiny_gemma3" / "config.json").read_text())
    tokenizer = HuggingFaceDirectory(tmp_path).tokenizer()
    for text, ids in zip(PIECE_TEXTS, SENTENCEPIECE["gemma"]["ids"], strict=True):
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        assert tokenizer.decode(ids) == text.replace("▁", " ")


def test_merges_follow_the_scores():
    """Whatever the order of the vocabulary; pieces that are not normal ones take no part."""
    tokens = ["a", "b", "c", "ab", "bc", "abc", "cc", "ca"]
    scores = [-9.0, -9.0, -9.0, -3.0, -1.0, -2.0, -0.5, -0.1]
    merges = merges_of_scores(tokens, scores, [1, 1, 1, 1, 1, 1, 4, 1])
    assert merges == [("c", "a"), ("b", "c"), ("a", "bc"), ("ab", "c"), ("a", "b")]


def test_tensors_for_images_are_left_out(gemma, tmp_path, cache):
    source = Tensors(
        gemma[0].tensors | {"v.patch_embd.weight": np.zeros(3), "mm.input_projection.weight": np.zeros(3)}
    )
    loaded = load_model(
        write(tmp_path / "i.gguf", (source, gemma[1]), pieces=pieces_of("gemma")[:128]), progress=False
    )
    assert set(loaded.params) == {"embed", "final_norm", "layers"}


def test_pieces_without_scores_are_refused(gemma, tmp_path):
    path = write(tmp_path / "t.gguf", gemma, pieces=pieces_of("gemma"))
    file = GGUFFile(path)
    field = file.field
    file.field = lambda key, default=None: None if key == "tokenizer.ggml.scores" else field(key, default)
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.ggml\.scores do not fit"):
        file.tokenizer()
