"""Text in, tokens out: encodings, line ends, splits, batches, and every way in which a file can be wrong."""

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import tiktoken
import torch

from shared import cli, data
from shared.console import UserError
from shared.randomness import generator
from shared.training import TrainingSettings

TEXT = "the cat sat on the mat; çà et là, the cat sat.\n" * 20


def write(path, content: bytes):
    path.write_bytes(content)
    return path


# ---------------------------------------------------------------- reading


def test_byte_order_mark_and_line_ends_make_no_difference(tmp_path):
    plain = data.load_corpus(write(tmp_path / "a.txt", TEXT.encode("utf-8")), "char", 8)
    for name, content in {
        "bom": b"\xef\xbb\xbf" + TEXT.encode("utf-8"),
        "crlf": TEXT.replace("\n", "\r\n").encode("utf-8"),
        "cr": TEXT.replace("\n", "\r").encode("utf-8"),
    }.items():
        other = data.load_corpus(write(tmp_path / name, content), "char", 8)
        assert torch.equal(other.train, plain.train) and torch.equal(other.validation, plain.validation)
        assert other.sha256 == plain.sha256 == hashlib.sha256(TEXT.encode("utf-8")).hexdigest()


def test_a_folder_is_read_in_the_order_of_names_without_hidden_files(tmp_path):
    (tmp_path / "b").mkdir()
    write(tmp_path / "b" / "one.txt", b"B" * 200)
    write(tmp_path / "a.txt", b"A" * 200)
    write(tmp_path / ".hidden", b"\xff")
    corpus = data.load_corpus(tmp_path, "char", 8)
    assert corpus.n_characters == 400
    assert corpus.tokenizer.decode(torch.cat([corpus.train, corpus.validation]).tolist()) == "A" * 200 + "B" * 200


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"abc\0def" * 100, "NUL byte at 3"),
        (b"abc\xff\xfe", "byte 0xff at 3"),
        (b"a" * 50, "give at least 90"),
    ],
)
def test_a_file_that_cannot_be_trained_on_is_refused_in_one_sentence(tmp_path, content, says):
    with pytest.raises(UserError, match=says) as error:
        data.load_corpus(write(tmp_path / "file", content), "char", 8)
    assert "\n" not in str(error.value)


def test_a_missing_path_and_an_empty_folder(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        data.load_corpus(tmp_path / "nowhere", "char", 8)
    with pytest.raises(UserError, match="is empty"):
        data.load_corpus(tmp_path, "char", 8)


def test_what_is_neither_file_nor_folder_and_what_has_no_possible_name(tmp_path):
    import os

    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="neither a file nor a folder"):
        data.load_corpus(tmp_path / "pipe", "char", 8)
    with pytest.raises(UserError, match=r"can't read --data .*too long"):
        data.load_corpus(Path("x" * 5000), "char", 8)


def test_the_shortest_text_that_will_do(tmp_path):
    """A tenth of it is one block and the token after it."""
    corpus = data.load_corpus(write(tmp_path / "file", b"ab" * 45), "char", 8)
    assert (len(corpus.train), len(corpus.validation)) == (81, 9)
    with pytest.raises(UserError, match="holds 89 tokens"):
        data.load_corpus(write(tmp_path / "file", b"a" * 89), "char", 8)


# ---------------------------------------------------------------- the default corpora


def test_the_default_corpus_is_the_same_text_for_everyone():
    corpus = data.load_corpus("docs", "char", 32)
    assert corpus.sha256 == "f96bde40c4dce80489982bcb9b76cd14ca790f744bdcbdb38fb9b31400871665"
    assert (corpus.n_characters, corpus.vocab_size, corpus.unseen) == (522_601, 95, 0)
    assert len(corpus.validation) == 52_260  # the last tenth, whole


def test_the_documentation_is_torchs_own():
    text = "".join(data.torch_docs())
    assert "Computes the absolute value of each element" in text  # torch.abs, from _torch_docs.py
    assert "See :func:`torch.abs`" in text  # Tensor.abs, from _tensor_docs.py
    assert "import torch" not in text.splitlines()[:50]  # documentation, not code


def test_the_source_leaves_out_what_differs_by_machine(tmp_path, monkeypatch):
    for name, content in {
        "b.py": "bb",
        "a/x.py": "ax",
        "version.py": "1.2",
        "a/generated/g.py": "no",
        "c.txt": "no",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content, encoding="utf-8")
    monkeypatch.setattr(data, "torch_folder", lambda: tmp_path)
    assert list(data.torch_source().items()) == [("a/x.py", "ax"), ("b.py", "bb")]


# ---------------------------------------------------------------- tokenizers


def test_characters_only_in_the_validation_part_are_counted_and_have_a_token(tmp_path):
    corpus = data.load_corpus(write(tmp_path / "file", b"ab" * 450 + b"xyxy" * 25), "char", 8)
    assert (corpus.vocab_size, corpus.unseen) == (4, 2)
    assert corpus.tokenizer.decode(corpus.validation.tolist()) == "xyxy" * 25


def test_a_character_outside_the_corpus_is_named():
    tokenizer = data.CharTokenizer("abc")
    assert tokenizer.decode(tokenizer.encode("cab")) == "cab"
    with pytest.raises(UserError, match="no character 'd'"):
        tokenizer.encode("bad")


def test_bpe4k_round_trips_and_says_more_per_token_than_characters():
    tokenizer = data.make_tokenizer("bpe4k", [])
    assert tokenizer.vocab_size == 4096 == len(data.BPE4K_FILE.read_text(encoding="ascii").splitlines())
    text = "def forward(self, x):\n    return self.proj(x)  # naïve ∑ 🙂 12345\n"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    code = text.partition("#")[0]
    assert len(tokenizer.encode(code)) < len(code) / 2.5
    assert tokenizer.encode(" self") == tokenizer.encode("x self")[-1:]  # a word and its space are one token


def test_bpe4k_file_holds_every_byte_and_no_entry_twice():
    encoding = data.bpe4k_encoding()
    entries = [encoding.decode_single_token_bytes(i) for i in range(encoding.n_vocab)]
    assert entries[:256] == [bytes([b]) for b in range(256)]
    assert len(set(entries)) == 4096


def test_r50k_out_of_reach_is_one_sentence_with_a_remedy(monkeypatch):
    def unreachable(name):
        raise ConnectionError("Max retries exceeded with url: ...")

    monkeypatch.setattr(tiktoken, "get_encoding", unreachable)
    with pytest.raises(UserError, match="use --tokenizer bpe4k") as error:
        data.make_tokenizer("r50k_base", [])
    assert "\n" not in str(error.value)


def test_r50k_is_padded_to_a_multiple_of_64():
    ranks = {bytes([b]): b for b in range(256)} | {b"ab": 256}
    tokenizer = data.BytePairTokenizer(tiktoken.Encoding("e", pat_str=r".+", mergeable_ranks=ranks, special_tokens={}))
    assert tokenizer.vocab_size == 320  # as 50,257 becomes 50,304
    assert tokenizer.decode([256, 300]) == "ab"  # a padding id, should a model emit one, says nothing


# ---------------------------------------------------------------- batches


def test_a_batch_is_windows_of_the_text_and_the_same_one_token_later():
    tokens = torch.arange(1000)
    idx, targets = data.sample_batch(tokens, 7, 5, generator(1, "batches"))
    assert idx.shape == targets.shape == (5, 7)
    assert torch.equal(targets, idx + 1)
    assert torch.equal(idx - idx[:, :1], torch.arange(7).expand(5, 7))
    again, _ = data.sample_batch(tokens, 7, 5, generator(1, "batches"))
    other, _ = data.sample_batch(tokens, 7, 5, generator(2, "batches"))
    assert torch.equal(idx, again) and not torch.equal(idx, other)


def test_batches_reach_both_ends_of_the_text():
    tokens = torch.arange(12)
    draws = generator(3, "batches")
    starts = {data.sample_batch(tokens, 8, 1, draws)[0][0, 0].item() for _ in range(100)}
    assert starts == {0, 1, 2, 3}  # the last window's last target is the text's last token


@pytest.mark.parametrize("length", [9, 16, 17, 18, 50, 65])
def test_validation_windows_ask_for_every_token_once(length):
    tokens = torch.arange(length)
    asked, seen = [], []
    for idx, targets in data.all_windows(tokens, 8, 3):
        assert torch.equal(targets, idx + 1) and idx.shape[1] <= 8 and idx.shape[0] <= 3
        asked += targets.flatten().tolist()
        seen += idx.flatten().tolist()
    assert asked == list(range(1, length)) and seen == list(range(length - 1))


def test_a_corpus_travels_between_processes_unchanged():
    import pickle

    corpus = data.Corpus("n", "s", 3, data.CharTokenizer("abc"), torch.arange(5), torch.arange(2))
    copy = pickle.loads(pickle.dumps(corpus))
    assert torch.equal(copy.train, corpus.train) and torch.equal(copy.validation, corpus.validation)
    assert (copy.vocab_size, copy.name) == (3, "n") and math.isclose(copy.n_characters, 3)


@pytest.mark.parametrize(("alphabet", "dtype"), [(5, torch.uint8), (300, torch.int16)])
def test_a_large_corpus_has_small_ids_and_gives_the_same_batches(alphabet, dtype, monkeypatch, tmp_path):
    path = tmp_path / "text"
    path.write_text("".join(chr(0x4E00 + i * 7 % alphabet) for i in range(4_000)), encoding="utf-8")
    plain = data.load_corpus(path, "char", 8)
    monkeypatch.setattr(data, "MANY_CHARACTERS", 3_999)
    packed = data.load_corpus(path, "char", 8)
    assert plain.train.dtype == torch.int64 and packed.train.dtype == packed.validation.dtype == dtype
    assert torch.equal(packed.train.long(), plain.train) and packed.unseen == plain.unseen
    pairs = [data.sample_batch(c.train, 8, 5, torch.Generator().manual_seed(1)) for c in (plain, packed)]
    pairs += zip(data.all_windows(plain.validation, 8, 3), data.all_windows(packed.validation, 8, 3), strict=True)
    for ours, theirs in zip(*pairs[:2], strict=True):
        assert torch.equal(ours, theirs) and theirs.dtype == torch.int64
    for ours, theirs in pairs[2:]:
        assert torch.equal(torch.stack(ours), torch.stack(theirs)) and theirs[0].dtype == torch.int64


def test_the_source_is_split_by_file_so_that_both_parts_hold_all_kinds(monkeypatch):
    texts = {f"folder_{i % 7}/file_{i}.py": f"line {i}\n" * 5 for i in range(1000)}
    monkeypatch.setattr(data, "torch_source", lambda: texts)
    corpus = data.load_corpus("source", "char", 4)
    assert corpus.split == data.FILES_BY_HASH
    held_out = [name for name in texts if data.is_held_out(name)]
    assert 70 <= len(held_out) <= 130  # one in ten, give or take three standard deviations
    assert corpus.tokenizer.decode(corpus.validation.tolist()) == "".join(texts[n] for n in held_out)
    assert len(corpus.train) + len(corpus.validation) == corpus.n_characters
    assert data.is_held_out("nn/modules/linear.py") is data.is_held_out("nn/modules/linear.py")


def test_a_long_text_is_encoded_in_parts_to_the_same_ids(monkeypatch, capsys, tmp_path):
    text = "a line of text é\n" * 40
    path = tmp_path / "text"
    path.write_text(text, encoding="utf-8")
    whole = data.load_corpus(path, "char", 8)
    monkeypatch.setattr(data, "PART", 7)
    monkeypatch.setattr(data, "MANY_CHARACTERS", 100)
    parts = data.load_corpus(path, "char", 8)
    assert torch.equal(parts.train, whole.train) and torch.equal(parts.validation, whole.validation)
    assert capsys.readouterr().out == f"Turning {len(text):,} characters into tokens ...\n"


@pytest.mark.parametrize("name", ["docs", "source"])
def test_a_folder_may_be_called_like_a_text_of_ours(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = cli.parse("", ["--data", name], tmp_path / "outputs")
    preset = cli.Preset(Shape(), TrainingSettings(), "docs", "char", seeds=1)
    variants = [cli.Variant("one", {"model": "one"}, {})]
    with pytest.raises(UserError, match=f"--data {name}: there is no such file or folder"):
        cli.make_plan("", preset, variants, flags)
    (tmp_path / name).mkdir()
    write(tmp_path / name / "text", b"abc" * 300)
    assert cli.make_plan("", preset, variants, flags).corpus.n_characters == 900


def test_a_name_of_no_text_of_ours_is_no_path():
    with pytest.raises(ValueError, match="no corpus is called 'sources'"):
        data.load_corpus("sources", "char", 8)


@dataclass(frozen=True)
class Shape:
    block_size: int = 8
