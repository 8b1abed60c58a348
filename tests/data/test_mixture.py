"""Mixtures of sources: exact shares, an order that depends on the position alone, weights that change at a resume."""

import json
import sys
from collections import Counter
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from tiny import write_tiny

from jaxfb import trainer
from jaxfb.callbacks import Callback
from jaxfb.config import config_from_dict, config_to_dict, load_config
from jaxfb.data import DataConfig, Loader, prepare
from jaxfb.data.config import SourceConfig
from jaxfb.data.corpus import SplitStats, _sum
from jaxfb.data.mixture import MixedOrder, MixedRows, Mixture
from jaxfb.metrics import read_jsonl
from jaxfb.training.evaluate import HeldOut
from jaxfb.training.pretraining import Pretraining


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Three sources, of 40, 12 and 5 documents."""
    root = tmp_path_factory.mktemp("texts")
    for name, number in (("code", 40), ("web", 12), ("few", 5)):
        (root / name).mkdir()
        for k in range(number):
            (root / name / f"{k:02}.txt").write_text(f"{name} {k} " + f"{name[0]}{k} " * (20 + k))
    lines = [{"text": path.read_text()} for path in sorted((root / "web").iterdir())]
    (root / "web.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return root


def mixed(texts, **weights):
    """The data section of a mixture; the web is JSON lines in a file."""
    paths = {name: {"path": str(texts / name)} for name in weights}
    if "web" in paths:
        paths["web"] = {"source": "jsonl", "path": [str(texts / "web.jsonl")]}
    return {name: {**paths[name], "weight": weight} for name, weight in weights.items()}


def corpus(texts, **weights):
    settings = {"tokenizer": "bytes", "sequence_length": 32, "cache_dir": str(texts / "cache")}
    return prepare(
        config_from_dict({**SECTIONS, "data": {**settings, "mixture": mixed(texts, **weights)}}).data
    )


SECTIONS = {
    "model": {"num_layers": 1, "hidden_size": 8, "num_heads": 1},
    "batch": {"rows": 8, "rows_per_microbatch": 8},
    "run": {"dir": "run", "updates": 1},
    "optimizer": {"learning_rate": 0.1},
}


@pytest.mark.parametrize(
    "source, message",
    [
        ({"weight": 1}, r"^\[data.mixture.web\] source='text' needs path"),
        (
            {"weight": -1, "path": "a"},
            r"^\[data.mixture.web\] weight=-1.0 of a source must not be negative; use 1.0",
        ),
        ({"weight": 1, "path": "a", "column": "b"}, "unknown key data.mixture.web.column"),
    ],
)
def test_a_wrong_source_is_refused_by_its_name(source, message):
    with pytest.raises(ValueError, match=message):
        config_from_dict({**SECTIONS, "data": {"mixture": {"web": source}}})


def sources(order, positions):
    return Counter(order.place(p)[0] for p in positions)


def test_a_source_of_a_mixture_takes_paths_as_a_single_source_does():
    source = SourceConfig(weight=1, path=["a", "b"], held_out_path="c")
    alone = DataConfig(source="text", path=["a", "b"], held_out_path="c")
    assert (source.path, source.held_out_path) == (alone.path, alone.held_out_path)
    assert source == SourceConfig(weight=1, path=("a", "b"), held_out_path=("c",))


def test_every_source_has_its_share_and_each_of_its_rows_comes_once_a_pass(texts):
    rows = corpus(texts, code=5, web=3, few=2).train
    order = MixedOrder(rows, seed=0)
    assert sources(order, range(2048)) == {"code": 1024, "web": 614, "few": 410}
    for name, rank in order.consumed(1500).items():
        seen = [order.place(p)[1] for p in range(1500) if order.place(p)[0] == name]
        assert seen == list(range(rank))
    name, size, start = "few", len(rows.parts["few"]), rows.starts["few"]
    found = [order(p) - start for p in range(1024) if order.place(p)[0] == name]
    for k in range(0, len(found) - size, size):
        assert sorted(found[k : k + size]) == list(range(size))
    assert order.passes(1500)["few"] == order.consumed(1500)["few"] / size


@pytest.mark.parametrize("weights", [{"a": 1}, {"a": 1, "b": 1e-4}, {"a": 0.1, "b": 0.2, "c": 0.7, "d": 0}])
def test_the_place_is_a_function_of_the_position(texts, weights):
    part = corpus(texts, code=1).train.parts["code"]
    rows = MixedRows(dict.fromkeys(weights, part), weights)
    one, other = MixedOrder(rows, seed=3), MixedOrder(rows, seed=3)
    far = [10**12 + k for k in range(50)]
    assert [one(p) for p in far] == [other(p) for p in reversed(far)][::-1]
    total = sum(weights.values())
    shares = {name: count / 10**12 for name, count in one.consumed(10**12).items()}
    assert shares == pytest.approx({name: w / total for name, w in weights.items() if w}, abs=1e-8)
    assert sum(one.consumed(777).values()) == 777


def test_a_source_of_a_tiny_share_between_others_is_read_in_its_order(texts):
    """In no part of the stream are its rows fewer than none, as differences of rounded shares might be."""
    weights = {"a": 0.3, "b": 1e-4, "c": 0.7}
    part = corpus(texts, code=1).train.parts["code"]
    order = MixedOrder(MixedRows(dict.fromkeys(weights, part), weights), seed=0)
    counts = np.array([list(order.consumed(p).values()) for p in range(0, 60_000, 1024)])
    assert (np.diff(counts, axis=0) >= 0).all() and counts[-1, 1] in (5, 6)


def test_sources_of_equally_many_rows_are_read_in_different_orders(texts):
    part, names = corpus(texts, code=1).train.parts["code"], "abcdefgh"
    order = MixedOrder(MixedRows(dict.fromkeys(names, part), dict.fromkeys(names, 1)), seed=0)
    read = {name: [] for name in names}
    for name, row in map(order.row, range(8 * len(part))):
        read[name].append(row)
    assert len({tuple(rows[: len(part) // 2]) for rows in read.values()}) == 8


def test_the_bytes_of_a_mixture_are_known_where_those_of_all_its_sources_are():
    known, unknown = (SplitStats(1, 10, size, 2, 1.0) for size in (40, None))
    assert (_sum([known, known]).bytes, _sum([known, unknown]).bytes) == (80, None)


def test_the_fill_of_a_mixture_is_the_share_of_all_its_slots_that_are_used(texts):
    both, *each = (
        corpus(texts, **{name: 1 for name in names}).train_stats
        for names in (("code", "few"), ["code"], ["few"])
    )
    used = sum(one.fill * one.rows for one in each)
    assert 0 < both.fill < 1 and both.fill == pytest.approx(used / both.rows)
    assert [both.rows, both.tokens] == [sum(one.rows for one in each), sum(one.tokens for one in each)]


def test_the_held_out_loss_of_a_mixture_is_that_of_all_its_tokens():
    """Not the mean of the sources' losses; one without held-out rows has none."""
    sums = {"a": (6.0, 2.0, 4.0), "b": (3.0, 0.0, 1.0)}  # of the loss, of correct tokens, of tokens
    rows = MixedRows({"a": "xxx", "b": "x", "none": ""}, {"a": 1, "b": 1, "none": 1})
    held_out = SimpleNamespace(rows=rows, bits_per_byte=lambda nats: None)
    held_out._named = partial(HeldOut._named, held_out)
    held_out._sums = lambda params, part: sums["a" if len(part) == 3 else "b"]
    found = HeldOut.evaluate(held_out, None)
    assert found == pytest.approx(
        {"eval/loss": 1.8, "eval/accuracy": 0.4, "eval/tokens": 5, "eval/loss/a": 1.5, "eval/loss/b": 3.0}
    )


def test_weights_change_from_the_saved_position_on_and_sources_come_and_go(texts):
    before = MixedOrder(corpus(texts, code=1, web=1).train, seed=0)
    now = MixedOrder(corpus(texts, web=1, few=3).train, seed=0).continued(before.to_dict(), 1000)
    assert [now.place(p) for p in range(1000)] == [before.place(p) for p in range(1000)]
    assert sources(now, range(1000, 1000 + 1024)) == {"web": 256, "few": 768}
    first_web = next(now.place(p)[1] for p in range(1000, 2000) if now.place(p)[0] == "web")
    assert first_web == before.consumed(1000)["web"]
    same = before.continued(json.loads(json.dumps(before.to_dict())), 1000)
    assert same.spans == [(0, {"code": 1, "web": 1})] or same.spans == [[0, {"code": 1, "web": 1}]]
    scaled = MixedOrder(corpus(texts, code=2, web=2).train, seed=0).continued(before.to_dict(), 1000)
    assert len(scaled.spans) == 1
    changed = before.to_dict() | {"sources": {"code": "other"}}
    with pytest.raises(ValueError, match="the source 'code' of the mixture has other rows"):
        before.continued(changed, 1000)


def test_processes_read_the_rows_of_one(texts):
    rows = corpus(texts, code=5, web=3, few=2).train
    whole = Loader(rows, 8, seed=1, prefetch=0)
    halves = [
        Loader(rows, 8, seed=1, prefetch=0, local_rows=lambda start, n, k=k: np.arange(k, n, 2))
        for k in (0, 1)
    ]
    for _ in range(5):
        batch, parts = next(whole), [next(half) for half in halves]
        for name, leaf in batch.items():
            np.testing.assert_array_equal(leaf[0::2], parts[0][name])
            np.testing.assert_array_equal(leaf[1::2], parts[1][name])


def test_rows_are_those_of_the_sources(texts):
    prepared = corpus(texts, code=1, few=1)
    rows, part = prepared.train, prepared.train.parts["few"]
    start = rows.starts["few"]
    for name, leaf in rows.gather(np.array([start + 1, -1, 0])).items():
        np.testing.assert_array_equal(leaf[0], part[1][name])
        assert not leaf[1].any()
    assert len(rows.spread(7)) == 7 and rows.num_tokens == prepared.train_stats.tokens


class Stop(Callback):
    def on_train_start(self, run):
        self.run = run

    def on_step_end(self, step, metrics):
        if step == 3:
            self.run.stop("enough")


def losses(directory):
    return {r["step"]: r["loss"] for r in read_jsonl(directory / "run" / "metrics.jsonl") if "loss" in r}


@pytest.mark.parametrize("allow_changes", [False, True])
def test_a_run_goes_on_in_its_mixture_where_other_changes_are_allowed_too(texts, allow_changes):
    """With --allow-changes the rows went on as if the newest weights had held from the start."""

    def reader(**weights):
        return Loader(corpus(texts, **weights).train, 8, total_rows=64, prefetch=0)

    old, new = {"code": 3, "web": 1}, {"code": 1, "web": 3}
    first = reader(**old)
    for _ in range(2):
        next(first)
    changed = reader(**new)
    changed.restore(first.state())
    for _ in range(2):
        next(changed)
    state, expected = json.loads(json.dumps(changed.state())), [batch["tokens"] for batch in changed]

    def resumed(state):
        work = SimpleNamespace(_reader=reader(**new), _report_rate=lambda config: None)
        Pretraining.restore(work, None, {"data": state, "config": {}}, allow_changes)
        return work._reader

    continued = resumed(state)
    np.testing.assert_array_equal([batch["tokens"] for batch in continued], expected)
    assert continued.state()["mixture"]["spans"] == [[0, old], [16, new]]
    other = {**state, "seed": 7}
    with nullcontext() if allow_changes else pytest.raises(ValueError, match="seed=7, these have seed=0"):
        assert resumed(other).consumed_rows == state["consumed_rows"]


@pytest.mark.slow
def test_a_mixture_trains_and_goes_on_to_the_same_bits_also_with_other_weights(texts, tmp_path):
    def config(name, *overrides, **weights):
        (tmp_path / name).mkdir(exist_ok=True)
        data = {
            "source": "python-stdlib",
            "tokenizer": "bpe",
            "vocab_size": 300,
            "mixture": mixed(texts, **weights),
        }
        path = write_tiny(
            tmp_path / name, data={**data, "max_bytes": None}, run={"updates": 8}, eval={"every": 8}
        )
        return load_config(path, ["data.cache_dir=" + str(tmp_path / "cache"), *overrides])

    whole = trainer.train(config("whole", code=2, web=1))
    stopped = trainer.train(config("parts", code=2, web=1), callbacks=[Stop()])
    assert stopped.status == "stopped"
    trainer.train(config("parts", code=2, web=1), resume=True)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert {"eval/loss", "eval/loss/code", "eval/loss/web"} <= whole.metrics.keys()
    for name in ("a", "b"):
        trainer.train(config(name, code=2, web=1), callbacks=[Stop()])
    trainer.train(config("a", "data.mixture.web.weight=9", code=2, web=1), resume=True)
    trainer.train(config("b", "data.mixture.web.weight=9", code=2, web=1), callbacks=[Stop()], resume=True)
    trainer.train(config("b", "data.mixture.web.weight=9", code=2, web=1), resume=True)
    assert losses(tmp_path / "a") == losses(tmp_path / "b") != losses(tmp_path / "whole")
    records = [r for r in read_jsonl(tmp_path / "a" / "run" / "metrics.jsonl") if "loss" in r]
    assert records[-1]["epoch/web"] > records[-1]["epoch/code"] > 0


@pytest.mark.parametrize(
    "data, sentence",
    [
        (
            {"mixture": {"a": {"path": "x", "weight": -1}}},
            r"weight=-1.0 of a source must not be negative; use 1.0",
        ),
        (
            {"mixture": {"a": {"path": "x", "weight": 0}}},
            r"every weight of the mixture is 0; use data.mixture.a.weight",
        ),
        (
            {"mixture": {"a": {"path": "x", "weight": 1}}, "source": "text", "path": "y"},
            "source, path and mixture",
        ),
        ({"mixture": {"a": {"weight": 1}}}, "needs path"),
        (
            {"mixture": {"a": {"path": "x", "weight": 1e-9}, "b": {"path": "y", "weight": 2}}},
            r"weight 1e-09 of the source 'a' .* less than a millionth of all weights; use 2\.2e-06 or more",
        ),
        (
            {"mixture": {"a": {"path": "x", "wieght": 1}}},
            r"key data.mixture.a.wieght; did you mean data.mixture.a.weight",
        ),
        ({"mixture": {"a b": {"path": "x", "weight": 1}}}, "'a b' must be a name"),
        ({"mixture": ["a"]}, "data.mixture=.*must be a mapping of names to sections with weight, source"),
    ],
)
def test_an_impossible_mixture_is_refused(data, sentence):
    with pytest.raises(ValueError, match=sentence):
        config_from_dict({**SECTIONS, "data": data})


def test_the_least_weight_is_legal_and_large_ones_do_not_overflow():
    for weights in ({"a": 2.1e-6, "b": 2}, {"a": 1e308, "b": 1e308}, {"a": 0, "b": 1e9}):
        Mixture({"a": [1], "b": [2]}, weights)
    with pytest.raises(ValueError, match="weight 1 of the source 'a' .* use 1100.0 or more"):
        Mixture({"a": [1], "b": [2]}, {"a": 1, "b": 10**9})


def test_a_mixture_survives_the_config_file_and_has_no_epochs(texts):
    values = {**SECTIONS, "data": {"mixture": mixed(texts, code=1, web=0.5)}}
    config = config_from_dict(values)
    assert config_from_dict(config_to_dict(config)) == config
    with pytest.raises(ValueError, match="epochs=2.*use run.updates or run.tokens"):
        config_from_dict({**values, "run": {"dir": "run", "epochs": 2}})


@pytest.mark.parametrize("kind", ["parquet", "arrow", "stream"])
def test_columns_of_tables_are_documents(texts, tmp_path, kind):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts_ = [path.read_text() for path in sorted((texts / "code").iterdir())]
    table = pyarrow.table({"id": list(range(len(texts_) + 1)), "body": [*texts_, None]})
    path = tmp_path / f"t.{'parquet' if kind == 'parquet' else 'arrow'}"
    if kind == "parquet":
        parquet.write_table(table, path, row_group_size=7)
    else:
        opener = pyarrow.ipc.new_file if kind == "arrow" else pyarrow.ipc.new_stream
        with pyarrow.OSFile(str(path), "wb") as sink, opener(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=7)
    common = {"tokenizer": "bytes", "sequence_length": 32, "cache_dir": str(tmp_path / "cache")}
    source = path.suffix[1:]
    from_table = prepare(DataConfig(source=source, path=str(path), text_field="body", **common))
    from_files = prepare(DataConfig(source="text", path=str(texts / "code"), **common))
    assert from_table.train.fingerprint == from_files.train.fingerprint
    for field, wanted in (
        ("boddy", "has no column text_field='boddy'; it has: id, body"),
        ("id", "contains int64"),
    ):
        with pytest.raises(ValueError, match=wanted):
            prepare(DataConfig(source=source, path=str(path), text_field=field, **common))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="cannot be read to its end"):
        prepare(DataConfig(source=source, path=str(path), text_field="body", **common))


def test_tables_without_pyarrow_say_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        ValueError, match=r"source='parquet' needs the package pyarrow: pip install 'jaxfb\[data\]'"
    ):
        prepare(DataConfig(source="parquet", path=str(tmp_path / "x.parquet"), cache_dir=str(tmp_path)))


OVERLAPS = {
    "held_out_path": (
        {"held_out_path": "few"},
        {"path": "few"},
        "few.*trained on in the source 'b' .* held out, .* in 'a'",
    ),
    "fraction": (
        {"held_out_fraction": 0.5},
        {"path": "code"},
        "code.*trained on in the source 'b' .* held out, .* in 'a'",
    ),
    "alike": ({}, {"path": "code"}, None),
    "weight 0": ({"held_out_path": "few"}, {"path": "few", "weight": 0}, None),
    "apart": ({"held_out_path": "few"}, {"path": "web"}, None),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("a, b, message", OVERLAPS.values(), ids=OVERLAPS)
def test_a_file_held_out_in_one_source_and_trained_on_in_another_is_named(texts, a, b, message):
    sources = {"a": {"path": "code", "weight": 1, **a}, "b": {"weight": 1, **b}}
    for source in sources.values():
        source |= {key: str(texts / source[key]) for key in ("path", "held_out_path") if key in source}
    settings = {
        "tokenizer": "bytes",
        "sequence_length": 32,
        "cache_dir": str(texts / "cache"),
        "mixture": sources,
    }
    data = config_from_dict({**SECTIONS, "data": settings}).data
    with nullcontext() if message is None else pytest.warns(UserWarning, match=message):
        prepare(data)
