"""Tokenizers give the text back, count its bytes, repeat themselves, take no special token from text."""

import json

import numpy as np
import pytest

from jaxfb.data.tokenizer import END_TOKEN, ByteTokenizer, absent_ids, load_tokenizer, train_bpe

TEXTS = [
    "def add(a, b):\n    return a + b\n" * 20,
    "for x in range(10):\n\tprint(x, 'Grüße, 日本語, \U0001f600')\n" * 9,
    f"a text that names {END_TOKEN} and <s>\r\n\0",
]


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(TEXTS, 300)


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_text_comes_back_and_its_bytes_are_counted(kind, bpe, tmp_path):
    tokenizer = ByteTokenizer() if kind == "bytes" else bpe
    for text, ids in zip(TEXTS, tokenizer.encode(TEXTS), strict=True):
        assert tokenizer.decode([tokenizer.start_id, *ids, tokenizer.eos_id]) == text
        assert tokenizer.token_bytes()[ids].sum() == len(text.encode())
        assert tokenizer.eos_id not in ids and ids.max() < tokenizer.vocab_size and ids.dtype == np.int32
    assert tokenizer.token_bytes()[tokenizer.eos_id] == 0
    tokenizer.save(tmp_path / "tokenizer.json")
    again = load_tokenizer(tmp_path)
    assert again.fingerprint == tokenizer.fingerprint
    np.testing.assert_array_equal(again.encode(TEXTS)[0], tokenizer.encode(TEXTS)[0])


def test_bpe_repeats_itself_and_knows_every_byte(bpe):
    assert bpe.vocab_size == 300 and train_bpe(iter(TEXTS), 300).fingerprint == bpe.fingerprint
    assert bpe.decode(bpe.encode(["Ωз\x01"])[0]) == "Ωз\x01"
    assert train_bpe(["ab"], 1000).vocab_size == 258  # all bytes, the end token, "ab"


def test_the_ends_of_a_document_are_found_by_name(tmp_path, bpe):
    bpe.save(tmp_path / "tokenizer.json")
    definition = json.loads((tmp_path / "tokenizer.json").read_text())
    names = {"id": 300, "content": "<|begin_of_text|>"}, {"id": 301, "content": "<|end_of_text|>"}
    definition["added_tokens"] += [{**definition["added_tokens"][0], **name} for name in names]
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    assert (tokenizer.start_id, tokenizer.eos_id, tokenizer.vocab_size) == (300, 301, 302)


def test_ids_that_no_token_has_are_found_in_ranges(tmp_path, bpe):
    assert absent_ids(ByteTokenizer(), 384) == ((257, 384),) and absent_ids(ByteTokenizer(), 257) == ()
    bpe.save(tmp_path / "tokenizer.json")
    definition = json.loads((tmp_path / "tokenizer.json").read_text())
    vocab = definition["model"]["vocab"]
    vocab[next(name for name, i in vocab.items() if i == 299)] = 305
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    holes = load_tokenizer(tmp_path / "tokenizer.json")
    assert absent_ids(holes, 384) == ((299, 305), (306, 384))


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_special_tokens_appear_in_text_by_name_where_asked(kind, bpe):
    tokenizer = ByteTokenizer() if kind == "bytes" else bpe
    one, two = tokenizer.encode(["1", "32"])
    ids = [*one, tokenizer.eos_id, *two]
    assert tokenizer.decode(ids) == "132" and tokenizer.decode(ids, keep_special=True) == f"1{END_TOKEN}32"


def test_what_is_no_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match="use 'bpe', 'bytes' or a tokenizer.json"):
        load_tokenizer("no-such-name")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot be read"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "names",
    [
        ("<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
        ("<|begin_of_text|>", "<|end_of_text|>"),
        ("<s>", "</s>"),
    ],
)
def test_documents_begin_and_end_with_the_tokens_of_published_models(tmp_path, names):
    from tokenizers import Tokenizer, models

    made = Tokenizer(models.BPE({"a": 0}, []))
    made.add_special_tokens(list(names))
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.start_id, tokenizer.eos_id) == (1, 2)


def test_special_tokens_begin_and_end_documents_before_words_of_such_names(tmp_path):
    from tokenizers import Tokenizer, models

    made = Tokenizer(models.BPE({"a": 0}, []))
    made.add_tokens(["<s>", "</s>"])  # as in Gemma's vocabulary, which has the tags of web pages
    made.save(str(tmp_path / "tokenizer.json"))
    assert (load_tokenizer(tmp_path).start_id, load_tokenizer(tmp_path).eos_id) == (1, 2)
    made.add_special_tokens(["<bos>", "<eos>"])
    made.save(str(tmp_path / "tokenizer.json"))
    assert (load_tokenizer(tmp_path).start_id, load_tokenizer(tmp_path).eos_id) == (3, 4)
