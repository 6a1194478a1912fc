"""Samples from a directory of one's own texts, and `--texts`."""

import json

import numpy as np
import pytest

from calibrate.__main__ import main
from calibrate.own_texts import LONG, TOKEN_CHARACTERS, OwnTexts, _starts
from models import registry
from models.registry import LoadedModel
from models.testing import random_params, tiny_config, tiny_tokenizer
from tangram_jax.profile import BudgetProfile

TOKENIZER = tiny_tokenizer()


def write(directory, **files):
    for name, text in files.items():
        path = directory / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return directory


@pytest.fixture
def texts(tmp_path):
    chat = [{"role": "user", "content": "8" * 30}, {"role": "assistant", "content": "9" * 30}]
    lines = [{"text": "6" * 90}, {"messages": chat}, {"prompt": "7" * 90}]
    return write(
        tmp_path / "own",
        a_dot_txt="\n\n".join(c * 25 for c in "1234"),
        b__c_dot_txt="5" * 100,
        d_dot_jsonl="\n".join(map(json.dumps, lines)) + "\n",
        ignored_dot_md="#",
    )


def test_samples_have_their_size_and_share_no_document(texts):
    own = OwnTexts.read(texts)
    assert own.provenance["files"] == 3 and own.provenance["documents"] == 5
    samples, heldout = own.samples(TOKENIZER, 12, 6, 80, seed=1)
    assert [len(samples), len(heldout)] == [12, 6]
    assert all(s.tokens.shape == (80,) and s.tokens.dtype == np.int32 for s in (*samples, *heldout))
    digits = [{c for s in group for c in TOKENIZER.decode(s.tokens.tolist())} for group in (samples, heldout)]
    apart = [found & set("123456789") for found in digits]
    assert apart[0] and apart[1] and not apart[0] & apart[1]
    again = OwnTexts.read(texts).samples(TOKENIZER, 12, 6, 80, seed=1)[0]
    assert [s.tokens.tolist() for s in again] == [s.tokens.tolist() for s in samples]
    assert {s.kind for s in own.samples(TOKENIZER, 12, 0, 80)[0]} == {"own text", "own chat"}


def test_what_begins_a_prompt_comes_once_in_a_sample(texts, monkeypatch):
    own, encode, chat = OwnTexts.read(texts), TOKENIZER.encode, TOKENIZER.apply_chat_template
    monkeypatch.setattr(TOKENIZER, "bos_token_id", 1000)
    monkeypatch.setattr(
        TOKENIZER, "encode", lambda text, add_special_tokens=True: [1000] * add_special_tokens + encode(text)
    )
    monkeypatch.setattr(TOKENIZER, "apply_chat_template", lambda *args, **how: [1000, *chat(*args, **how)])
    for sample in own.samples(TOKENIZER, 12, 0, 200)[0]:
        assert np.flatnonzero(sample.tokens == 1000).tolist() == [0]


def test_no_sample_begins_where_a_text_has_ended():
    assert _starts("a\n\nb c\n\n\n\n") == [0, 3]
    assert _starts("\n\n") == [0]


def test_a_mark_of_byte_order_is_no_text(tmp_path):
    """Editors on Windows write one."""
    (tmp_path / "a.txt").write_text("a" * 90, encoding="utf-8-sig")
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "b" * 90}), encoding="utf-8-sig")
    assert sorted(OwnTexts.read(tmp_path).documents) == ["a" * 90, "b" * 90]


def test_of_a_long_text_only_what_a_sample_needs_is_encoded(tmp_path, monkeypatch):
    """A book of 100 MB, encoded whole for each of 70 samples, took hours and all memory."""
    own = OwnTexts.read(
        write(tmp_path, a_dot_txt="\n\n".join("ab" * 400 for _ in range(300)), b_dot_txt="c" * 90)
    )
    lengths = []
    encode = TOKENIZER.encode
    monkeypatch.setattr(
        TOKENIZER, "encode", lambda text, **how: lengths.append(len(text)) or encode(text, **how)
    )
    samples, _ = own.samples(TOKENIZER, 6, 0, 50)
    assert max(lengths) == 50 * TOKEN_CHARACTERS
    texts = [TOKENIZER.decode(s.tokens.tolist()) for s in samples]
    assert all("ab" * 20 in text for text in texts)


def test_the_digest_is_that_of_the_texts_not_of_their_files(texts, tmp_path):
    digest = OwnTexts.read(texts).provenance["digest"]
    (texts / "a.txt").rename(texts / "z.txt")
    (texts / "copy.txt").write_text((texts / "z.txt").read_text())  # the same document twice
    assert OwnTexts.read(texts).provenance["digest"] == digest
    (texts / "z.txt").write_text("other")
    assert OwnTexts.read(texts).provenance["digest"] != digest


def test_what_is_wrong_with_texts_is_said(tmp_path):
    def fault(**files):
        place = write(tmp_path / str(len(list(tmp_path.iterdir()))), **files)
        with pytest.raises(ValueError) as error:
            OwnTexts.read(place).samples(TOKENIZER, 1, 1, 50)
        return str(error.value)

    assert "x.jsonl, line 2 is not JSON" in fault(x_dot_jsonl='{"text": "a"}\n{')
    assert "x.jsonl, line 1 is not JSON" in fault(x_dot_jsonl="[" * 100_000)
    assert "line 1 has half of a character ('\\ud800')" in fault(x_dot_jsonl='{"text": "a\\ud800"}')
    assert "line 1 must be" in fault(x_dot_jsonl='{"messages": [{"role": "user"}]}')
    assert "has no text" in fault(a_dot_txt=" \n", b_dot_md="text")
    assert "a single document" in fault(a_dot_txt="a" * 999)
    assert "too little text for samples of 50" in fault(a_dot_txt="a" * 20, b_dot_txt="b" * 20)
    (tmp_path / "latin").mkdir()
    (tmp_path / "latin" / "a.txt").write_bytes(b"\xe9")
    for place, part in ((tmp_path / "latin", "is not UTF-8"), (tmp_path / "none", "is not a directory")):
        with pytest.raises(ValueError, match=part):
            OwnTexts.read(place)


def test_a_profile_records_which_texts_it_was_made_from(texts, tmp_path, monkeypatch, capsys):
    config = tiny_config(num_layers=1)
    model = LoadedModel(config, random_params(config, 0), TOKENIZER, "tiny")
    monkeypatch.setattr(registry, "load_model", lambda name, **options: model)
    out = tmp_path / "p.npz"
    options = ["--samples", "2", "--heldout", "1", "--sample-tokens", "64", "--method", "keydiff"]
    assert main([*options, "--texts", str(texts), "--out", str(out)]) == 0
    found = BudgetProfile.load(out).provenance
    assert found["texts"] == OwnTexts.read(texts).provenance
    assert set(found["sample_kinds"]) <= {"own text", "own chat"}
    assert found["tokenizer"]["vocab_size"] == 264
    assert str(texts) not in json.dumps(found)
    assert main([*options, "--texts", str(tmp_path / "none"), "--out", str(out)]) == 2
    assert "is not a directory" in " ".join(capsys.readouterr().err.split())


def test_samples_of_a_long_paragraph_begin_within_it(tmp_path):
    """All those of a log, which has no empty line, were its beginning, so that the budgets had no margin."""
    lines = [f"{i:05d} " + "x" * 40 for i in range(1000)]
    for name, text, ends in (
        ("lines", "\n".join(lines), "\n"),
        ("words", " ".join(lines), " "),
        ("neither", "x".join(lines).replace(" ", "x"), None),
    ):
        document = OwnTexts.read(write(tmp_path / name, a_dot_TXT=text))
        samples, _ = document.samples(TOKENIZER, 12, 0, 60)
        begins = {TOKENIZER.decode(sample.tokens.tolist())[:46] for sample in samples}
        assert len(begins) > 6
        assert all(text.startswith(b) or not ends or ends + b in text for b in begins)
        assert max(text.index(b) for b in begins) > LONG * 5


def test_samples_that_are_all_alike_are_told(tmp_path, monkeypatch, capsys):
    config = tiny_config(num_layers=1)
    model = LoadedModel(config, random_params(config, 0), TOKENIZER, "tiny")
    monkeypatch.setattr(registry, "load_model", lambda name, **options: model)
    options = ["--samples", "3", "--heldout", "0", "--sample-tokens", "64", "--method", "keydiff"]
    for name, text, told in (("one", "a" * 90, True), ("more", "\n\n".join("abcdef" * 40), False)):
        place = write(tmp_path / name, a_dot_txt=text)
        assert main([*options, "--texts", str(place), "--out", str(tmp_path / "p.npz")]) == 0
        err = " ".join(capsys.readouterr().err.split())
        assert ("only 1 of 3 samples are different" in err) == told


def test_heldout_samples_that_are_alike_count_once(tmp_path, monkeypatch, capsys):
    """A short document gave 95% intervals of no width, over 20 samples."""
    config = tiny_config(num_layers=1)
    model = LoadedModel(config, random_params(config, 0), TOKENIZER, "tiny")
    monkeypatch.setattr(registry, "load_model", lambda name, **options: model)
    rng = np.random.default_rng(0)
    contents = ["".join(rng.choice(list("abcdef "), 250)) for _ in range(4)]
    place = write(tmp_path / "own", a_dot_jsonl="\n".join(json.dumps({"text": text}) for text in contents))
    options = ["--samples", "4", "--heldout", "20", "--sample-tokens", "96", "--method", "snapkv"]
    assert main([*options, "--texts", str(place), "--out", str(tmp_path / "p.npz")]) == 0
    said = capsys.readouterr()
    assert "only 1 of 20 held-out samples are different" in " ".join(said.err.split())
    assert "against the mean of 1 held-out sample: " in said.out and "95% intervals" not in said.out
    found = BudgetProfile.load(tmp_path / "p.npz").provenance
    assert found["heldout_samples"] == 1
    for name in ("heldout", "heldout_single", "covered", "overflow"):
        assert np.isnan(found["stability"][name]["low"])
