"""Inputs that nobody thought of: whatever comes, the answer is a result or a UserError."""

import contextlib
import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared import chapters, cli, data, runs, training
from shared.console import UserError

SCRIPT = Path(__file__).with_name("small_build.py")
BPE = data.BytePairTokenizer(data.bpe4k_encoding())
# Code points without the halves of pairs, which no UTF-8 file holds.
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
FLAGS = [flag for action in cli.build_parser("")._actions for flag in action.option_strings]
WORDS = st.one_of(
    st.sampled_from([*FLAGS, "1", "0", "-1", "1e9", "char", "cpu", "docs", "=", "scale=2"]),
    st.text(max_size=8),
)
VALUES = st.one_of(
    st.integers(-(10**6), 10**6).map(str),
    st.floats().map(repr),
    st.sampled_from(["none", "true", "9" * 5000, "1_0", "٣", "1e400", "-0.0"]),
    st.text(min_size=1, max_size=6),
)
FIELDS = st.sampled_from(["block_size", "scale", "batch_size", "learning_rate", "warmup", "x", ""])

few = settings(
    max_examples=40,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def refused_in_a_line(function, *arguments):
    """What function returns, or None if it refuses; any other error fails the test."""
    try:
        return function(*arguments)
    except UserError as error:
        assert str(error)
        return None


# ---------------------------------------------------------------- flags


@few
@given(st.lists(WORDS, max_size=6))
def test_flags(argv):
    if {"-h", "--help"} & set(argv):
        return
    options = refused_in_a_line(cli.parse, "", argv, Path("here"))
    if options is not None:
        assert (options.seeds or 1) >= 1 and options.workers >= 1 and str(options.output_dir)


@few
@given(st.dictionaries(FIELDS, VALUES, min_size=1, max_size=3))
def test_set(changes):
    small = chapters.load_file(SCRIPT)
    found = refused_in_a_line(cli.with_changes, small.PRESET, small.VARIANTS[:1], changes)
    if found is not None:
        config, changed = found
        assert type(config.block_size) is int and type(config.scale) is float
        assert type(changed.batch_size) is int and changed.batch_size >= 1
        json.dumps([vars(config), vars(changed)], allow_nan=False)


# ---------------------------------------------------------------- tokenizers


@few
@given(TEXT, st.lists(TEXT, max_size=4))
def test_bpe4k_round_trip(text, texts):
    ids = BPE.encode(text)
    assert BPE.decode(ids) == text and all(0 <= i < BPE.vocab_size for i in ids)
    assert ids == BPE.encoding.encode_ordinary(text)
    assert list(BPE.encode_all(texts)) == [BPE.encode(t) for t in texts]


@few
@given(st.sampled_from(" \t\n\r\u3000"), st.integers(0, 40_000), TEXT)
def test_long_blanks(blank, length, text):
    long = text + blank * length + text
    assert BPE.decode(BPE.encode(long)) == long
    assert "".join(data.pieces_of(long)) == long


@few
@given(TEXT, TEXT)
def test_char_round_trip(corpus, text):
    tokenizer = data.CharTokenizer(corpus)
    assert tokenizer.decode(tokenizer.encode(corpus)) == corpus
    ids = refused_in_a_line(tokenizer.encode, text)
    assert (ids is not None) == (set(text) <= set(corpus))


# ---------------------------------------------------------------- corpora


@few
@given(st.binary(max_size=300) | TEXT.map(lambda text: text.encode("utf-8")), st.integers(1, 9))
def test_a_file_as_corpus(tmp_path, content, block_size):
    path = tmp_path / "file"
    path.write_bytes(content)
    for tokenizer in ("char", "bpe4k"):
        corpus = refused_in_a_line(data.load_corpus, path, tokenizer, block_size)
        if corpus is not None:
            ids = torch.cat([corpus.train, corpus.validation])
            text = content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
            assert corpus.tokenizer.decode(ids.tolist()) == text


@few
@given(st.text(max_size=30))
def test_a_name_as_corpus(name):
    if Path(name.replace("\0", "")).exists():
        return
    assert refused_in_a_line(data.load_corpus, Path(name), "char", 8) is None


# ---------------------------------------------------------------- stored files


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A store with one finished run: (store, run, the bytes of its files)."""
    folder = tmp_path_factory.mktemp("kept")
    (folder / "text.txt").write_text("the cat sat on the mat. " * 30, encoding="utf-8")
    small = chapters.load_file(SCRIPT)
    argv = ["--data", str(folder / "text.txt"), "--output-dir", str(folder / "out"), "--seeds", "1"]
    plan = small.plan_of(argv)
    store = runs.Store(plan, small.Small())
    run = store.wanted()[0]
    runs.train_one(runs.Context(small.Small(), plan), run, lambda *_: None)
    return store, run, store.path(run).read_bytes(), store.path(run, "pt").read_bytes()


KINDS = st.sampled_from(["cut", "flip", "insert"])
DAMAGE = st.tuples(KINDS, st.integers(0, 10**6), st.binary(max_size=4))


def damaged(content, damage):
    """The bytes after one accident: a shorter file, a flipped bit, bytes too many."""
    kind, at, more = damage
    at %= len(content)
    if kind == "cut":
        return content[:at]
    if kind == "flip":
        return content[:at] + bytes([content[at] ^ 1 << len(more)]) + content[at + 1 :]
    return content[:at] + more + content[at:]


WORD = st.text(max_size=5)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORD,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORD, inner, max_size=3),
    max_leaves=6,
)


OF_A_RUN = ["settings", "history", "parameters", "found", "source", "sha256"]
OF_A_CHECKPOINT = ["model", "optimizer", "scaler", "batches", "history", "milliseconds"]


def read_run(store, run, content):
    store.path(run).write_bytes(content)
    return refused_in_a_line(store.read, run)


@few
@given(DAMAGE)
def test_a_damaged_run(kept, damage):
    store, run, whole, _ = kept
    expected = read_run(store, run, whole)
    assert expected is not None
    found = read_run(store, run, damaged(whole, damage))
    assert found is None or found == expected  # a blank more between two numbers is no damage


@few
@given(JSON, st.sampled_from([None, *OF_A_RUN]))
def test_a_run_with_another_value(kept, value, field):
    store, run, whole, _ = kept
    record = json.loads(whole)
    if field is None:
        record = value
    else:
        record[field] = value
    if field in ("history", "settings", "source"):  # somebody who knows about the checksum
        record.pop("sha256")
        record["sha256"] = runs.sha256_of(record)
    found = read_run(store, run, json.dumps(record).encode("utf-8"))
    assert found is None or record == json.loads(whole)


@few
@given(DAMAGE)
def test_a_damaged_model(kept, damage):
    store, run, _, whole = kept
    path = store.path(run, "pt")
    path.write_bytes(whole)
    expected = training.load_checkpoint(path)["model"]
    path.write_bytes(damaged(whole, damage))
    found = refused_in_a_line(training.load_checkpoint, path)
    if found is not None:
        same = {name: torch.equal(value, expected[name]) for name, value in found["model"].items()}
        assert same == dict.fromkeys(expected, True)


@few
@given(JSON, st.sampled_from(OF_A_CHECKPOINT))
def test_a_checkpoint_with_another_value(kept, value, field):
    store, run, _, _ = kept
    path = store.unfinished(run)
    small = chapters.load_file(SCRIPT)

    def state():
        model = small.Bigrams(small.Config(), 9, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        return training.State(model, optimizer, scaler, torch.Generator(), training.History())

    state().save(path, training.Share())
    state().resume(path, training.Share())
    content = torch.load(path)
    content[field] = value
    with contextlib.suppress(TypeError, OverflowError):  # torch.save can't write every value
        path.write_bytes(training.as_bytes(content))
        resumed = state()
        refused_in_a_line(resumed.resume, path, training.Share())
    path.unlink()
