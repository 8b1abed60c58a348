"""The trainer on a model of one's own: any loss, any rows, any optax transformation, and the same bits after a stop."""

import itertools
import json
from typing import NamedTuple

import chex
import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import write_own

import jaxfb
from jaxfb.callbacks import Callback, callback
from jaxfb.checkpoint.store import CheckpointStore
from jaxfb.cli.commands import main
from jaxfb.data.loader import row_order
from jaxfb.metrics import read_jsonl
from jaxfb.schedules import make
from jaxfb.training.custom import Custom
from jaxfb.training.rows.own_rows import own_rows

ROWS, UPDATES = 24, 6


def rows():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 5))
    return {"x": x, "y": np.tanh(x @ rng.normal(size=(5, 2)))}


def init(key):
    return {"w": 0.3 * jax.random.normal(key, (5, 2), jnp.float64)}


def loss_fn(params, microbatch, rng):
    error = jnp.square(jnp.tanh(microbatch["x"] @ params["w"]) - microbatch["y"]).sum(-1)
    real = jnp.any(microbatch["y"] != 0, axis=-1)
    return jaxfb.Sum(jnp.where(real, error, 0).sum(), real.sum())


def counting_all(params, microbatch, rng):
    """A mean over all rows, rows of zeros too."""
    error = jnp.square(microbatch["x"] @ params["w"] - microbatch["y"])
    return jaxfb.Sum(error.sum(), error.size)


def trainer(directory, **changes):
    given = {
        "model": loss_fn,
        "params": init,
        "data": rows(),
        "optimizer": optax.adam(1e-2),
        "dir": directory / "run",
        "rows": 8,
        "rows_per_microbatch": 2,
        "updates": UPDATES,
        "mesh": {"data": 2},
        "checkpoint": {"every": 2},
    }
    return jaxfb.Trainer(**{**given, **changes})


def losses(directory):
    return {r["step"]: r["loss"] for r in read_jsonl(directory / "run" / "metrics.jsonl") if "loss" in r}


def saved(directory, update=UPDATES):
    store = CheckpointStore(directory / "run" / "checkpoints", keep_best=None)
    shapes = {"params": jax.eval_shape(init, jax.random.key(0))}
    return jax.device_get(store.restore(shapes, update, partial=True)[0]["params"])


def by_hand(order, skipped=()):
    """The losses of a plain optax loop over whole batches on one device."""
    optimizer, data = optax.adam(1e-2), rows()
    params = init(jax.random.fold_in(jax.random.key(0), 0))
    state, found = optimizer.init(params), []
    for update in range(UPDATES):
        batch = jax.tree.map(lambda leaf: leaf[[order(update * 8 + k) for k in range(8)]], data)  # noqa: B023
        if update + 1 in skipped:
            continue
        loss, grads = jax.value_and_grad(lambda p: loss_fn(p, batch, None).value)(params)  # noqa: B023
        updates, state = optimizer.update(grads, state, params)
        params, found = optax.apply_updates(params, updates), [*found, float(loss)]
    return found


def test_it_trains_as_a_loop_by_hand_would(tmp_path):
    result = trainer(tmp_path).train()
    assert (result.status, result.updates) == ("finished", UPDATES)
    np.testing.assert_allclose(list(losses(tmp_path).values()), by_hand(row_order(ROWS, 0)), rtol=1e-12)
    record = read_jsonl(tmp_path / "run" / "metrics.jsonl")[-1]
    phases = ("data_wait", "update", "evaluation", "saving", "logging")
    assert {"grad_norm", "rows", *(f"{phase}_seconds" for phase in phases)} <= record.keys()


@pytest.mark.slow
def test_updates_that_are_left_out_consume_their_rows_and_limits_end_a_run_to_be_resumed(tmp_path):
    whole, parts, left_out = tmp_path / "whole", tmp_path / "parts", [2, 5]
    trainer(whole, run={"skip_updates": left_out}, log={"count_zeros": True}).train()
    expected = by_hand(row_order(ROWS, 0), left_out)
    assert list(losses(whole)) == [1, 3, 4, 6]
    assert [r["num_zeros"] for r in read_jsonl(whole / "run" / "metrics.jsonl") if "loss" in r] == [0] * 4
    np.testing.assert_allclose(list(losses(whole).values()), expected, rtol=1e-12)
    stopped = trainer(parts, run={"minutes": 1e-9, "skip_updates": left_out}).train()
    assert (stopped.status, stopped.updates) == ("interrupted", 1)
    stopped = trainer(parts, run={"stop_at": 5, "skip_updates": left_out}).train(resume=True)
    assert (stopped.status, stopped.updates) == ("interrupted", 5)
    with pytest.raises(
        ValueError, match=r"stop_at=5 is not after update 5, which is saved; use run.stop_at=6"
    ):
        trainer(parts, run={"stop_at": 5}).train(resume=True)
    assert trainer(parts, run={"skip_updates": left_out}).train(resume=True).status == "finished"
    assert losses(parts) == losses(whole)
    chex.assert_trees_all_equal(saved(parts), saved(whole))


class Stop(Callback):
    """Stops the run from a callback, as early stopping would."""

    def on_train_start(self, run):
        self.run = run

    def on_step_end(self, step, metrics):
        if step == 3:
            self.run.stop("good enough")


class StopAtEvaluation(Stop):
    """Stops the run when the numbers of an evaluation say so."""

    def on_step_end(self, step, metrics): ...

    def on_eval(self, step, metrics):
        self.run.stop(f"held-out {metrics['eval/loss']}")


def test_a_run_that_an_evaluation_stops_is_saved_and_says_how_to_continue(tmp_path, capsys):
    evaluated = {
        "evaluate": lambda params: {"loss": 0.25},
        "eval": {"every": 3},
        "checkpoint": {"every": None},
    }
    stopped = trainer(tmp_path, callbacks=[StopAtEvaluation()], **evaluated).train()
    assert (stopped.status, stopped.updates) == ("stopped", 3)
    out = capsys.readouterr().out
    assert "held-out 0.25: saved after update 3 of 6; continue with: trainer.train(resume=True)" in out, out
    assert "held-out loss 0.2500\n" in out  # of your own evaluation the unit is not known
    assert " s/update " in out and "tokens/s" not in out and "lr nan" not in out
    assert trainer(tmp_path, **evaluated).train(resume=True).status == "finished"


class Stream:
    """Rows that never end, whose iterator has no state."""

    def __iter__(self):
        data = rows()
        return ({"x": data["x"][k % ROWS], "y": data["y"][k % ROWS]} for k in itertools.count())


def from_grain():
    data = rows()
    return (
        grain.MapDataset.source([{"x": x, "y": y} for x, y in zip(data["x"], data["y"], strict=True)])
        .shuffle(seed=3)
        .repeat()
        .to_iter_dataset()
    )


def mixed(weights=(3, 1)):
    """Two sources, one of them a sequence."""
    data = rows()
    second = [{"x": x, "y": y} for x, y in zip(data["x"][:4], data["y"][:4], strict=True)]
    return jaxfb.data.Mixture({"a": data, "b": second}, dict(zip("ab", weights, strict=True)))


@pytest.mark.slow
def test_the_weights_of_own_rows_may_change_at_a_resume(tmp_path):
    trainer(tmp_path, data=mixed(), run={"stop_at": 3}).train()
    trainer(tmp_path, data=mixed((1, 0))).train(resume=True)
    record = CheckpointStore(tmp_path / "run" / "checkpoints", keep_best=None).host(UPDATES)
    assert record["data"]["mixture"]["spans"] == [[0, {"a": 3, "b": 1}], [24, {"a": 1, "b": 0}]]
    with pytest.raises(ValueError, match="a weight for each source; sources: 'a'; weights: 'b'"):
        jaxfb.data.Mixture({"a": rows()}, {"b": 1})
    with pytest.raises(ValueError, match="'s' of the Mixture must be arrays or a sequence"):
        trainer(tmp_path / "other", data=jaxfb.data.Mixture({"s": Stream()}, {"s": 1})).train()


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(rows, marks=pytest.mark.slow),
        Stream,
        pytest.param(from_grain, marks=pytest.mark.slow),
        pytest.param(mixed, marks=pytest.mark.slow),
    ],
    ids=["arrays", "iterable", "grain", "mixture"],
)
def test_a_stopped_run_goes_on_to_the_same_bits(tmp_path, data):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    trainer(whole, data=data()).train()
    stopped = trainer(parts, data=data(), callbacks=[Stop()]).train()
    assert stopped.status == "stopped" and 3 <= stopped.updates < UPDATES
    assert trainer(parts, data=data()).train(resume=True).status == "finished"
    assert losses(parts) == losses(whole)
    chex.assert_trees_all_equal(saved(parts), saved(whole))


def test_a_run_whose_last_update_was_short_is_not_made_longer(tmp_path):
    """The rows behind the short update were passed over without a word."""
    run = {"updates": None, "run": {"samples": 12}}
    trainer(tmp_path, **run).train()
    with pytest.raises(ValueError, match="consumed 12 rows in 2 updates, by this config they would be 16"):
        trainer(tmp_path, **{**run, "run": {"samples": 32}}).train(resume=True)


def test_a_run_saved_without_the_rows_consumed_goes_on(tmp_path, monkeypatch):
    """Older versions did not save them for rows that can be asked for by number."""
    with monkeypatch.context() as older:
        older.setattr(Custom, "host", lambda self, done: {"data": {"num_rows": ROWS}})
        assert trainer(tmp_path, callbacks=[Stop()]).train().status == "stopped"
    assert trainer(tmp_path).train(resume=True).status == "finished"


@pytest.mark.slow
def test_a_model_and_a_loss_apart_and_an_evaluation(tmp_path):
    def predict(params, microbatch, rng):
        return jnp.tanh(microbatch["x"] @ params["w"])

    def loss(predicted, microbatch):
        error = jnp.square(predicted - microbatch["y"]).sum(-1)
        real = jnp.any(microbatch["y"] != 0, axis=-1)
        return jaxfb.Sum(jnp.where(real, error, 0).sum(), real.sum())

    def size(params):
        return {"size": optax.global_norm(params), "w": np.asarray(params["w"])}

    found, runs = {}, []

    def keep(step, metrics):
        found[step] = metrics["eval/size"], runs[0].outputs["eval/w"]

    hooks = callback(on_eval=keep, on_train_start=runs.append)
    together = trainer(tmp_path / "a", evaluate=size, eval={"every": 3}, callbacks=[hooks])
    together.train()
    trainer(tmp_path / "b", model=predict, loss=loss).train()
    assert losses(tmp_path / "a") == losses(tmp_path / "b") and list(found) == [3, 6]
    np.testing.assert_array_equal(found[6][1], saved(tmp_path / "a")["w"])
    assert not any("eval/w" in record for record in read_jsonl(tmp_path / "a" / "run" / "metrics.jsonl"))


def test_a_mean_over_all_rows_is_trained_where_no_window_is_short(tmp_path):
    trainer(tmp_path, model=counting_all, updates=None, epochs=1).train()
    assert len(losses(tmp_path)) == 3


def test_metrics_named_as_a_record_names_its_own_numbers_are_beside_them(tmp_path):
    names = ("loss", "rows", "grad_norm", "step", "update_seconds", "mine")

    def model(params, microbatch, rng):
        return jaxfb.LossOutput(
            {"l": loss_fn(params, microbatch, rng)}, {name: jaxfb.Max(jnp.float32(777)) for name in names}
        )

    trainer(tmp_path, model=model, updates=1).train()
    record = next(r for r in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "terms/l" in r)
    assert record["step"] == 1 and record["rows"] == 8 and record["loss"] == record["terms/l"]
    assert 777 not in (record["grad_norm"], record["update_seconds"]) and record["mine"] == 777
    assert all(record[f"metrics/{name}"] == 777 for name in names[:-1])


def test_a_generator_is_an_iterable_of_rows(tmp_path):
    data = rows()
    each = ({name: leaf[index] for name, leaf in data.items()} for index in range(ROWS))
    trainer(tmp_path, data=each, updates=3).train()
    assert len(losses(tmp_path)) == 3


def test_a_state_that_an_evaluation_overwrote_is_named_and_not_saved(tmp_path):
    doubled = jax.jit(lambda params: jax.tree.map(lambda leaf: 2 * leaf, params), donate_argnums=0)
    wrong = trainer(
        tmp_path,
        evaluate=lambda params: {"w": doubled(params)["w"].sum()},
        eval={"every": 1},
        checkpoint={"every": 50},
    )
    with pytest.raises(ValueError, match=r"state.params\['w'\] is deleted"):
        wrong.train()


class OneBuffer:
    """Rows whose arrays are written anew for each; with a length, a sequence of them."""

    def __init__(self):
        self.row = {name: np.empty_like(leaf[0]) for name, leaf in rows().items()}

    def __getitem__(self, index):
        for name, leaf in rows().items():
            self.row[name][...] = leaf[index]
        return self.row

    def __iter__(self):
        return (self[index] for index in range(ROWS))


class CountedBuffer(OneBuffer):
    def __len__(self):
        return ROWS


@pytest.mark.parametrize("source", [OneBuffer, CountedBuffer])
def test_rows_may_be_read_into_one_buffer(tmp_path, source):
    apart = [{name: leaf[index] for name, leaf in rows().items()} for index in range(ROWS)]
    trainer(tmp_path / "one", data=source(), updates=3).train()
    trainer(tmp_path / "apart", data=iter(apart) if source is OneBuffer else apart, updates=3).train()
    assert losses(tmp_path / "one") == losses(tmp_path / "apart")


@pytest.mark.parametrize("other", [{"x": np.ones(4)}, {"more": 1.0}])
def test_rows_that_are_not_alike_are_refused(tmp_path, other):
    data = (
        {name: leaf[index] for name, leaf in rows().items()} | (other if index else {})
        for index in range(ROWS)
    )
    with pytest.raises(ValueError, match="rows of an update must be trees of the same shapes"):
        trainer(tmp_path, data=data, updates=1).train()


class Rows(NamedTuple):
    x: np.ndarray
    y: np.ndarray


def test_arrays_may_be_in_a_named_tuple_or_cut_over_the_axes_of_a_mesh(tmp_path):
    trainer(tmp_path / "a").train()
    trainer(
        tmp_path / "b", data=Rows(**rows()), model=lambda p, rows, rng: loss_fn(p, rows._asdict(), rng)
    ).train()
    explicit = jax.NamedSharding(jax.make_mesh((2,), ("rows",)), jax.P("rows"))
    trainer(tmp_path / "c", data=jax.device_put(rows(), explicit)).train()
    assert losses(tmp_path / "a") == losses(tmp_path / "b") == losses(tmp_path / "c")


def test_data_of_another_kind_does_not_continue_a_run(tmp_path, capsys):
    trainer(tmp_path, run={"stop_at": 2}).train()
    assert "continue with: trainer.train(resume=True), with run.stop_at=None" in capsys.readouterr().out
    with pytest.raises(ValueError, match="continue it with --resume .resume=True in a program."):
        trainer(tmp_path).train()
    each = [{name: leaf[index] for name, leaf in rows().items()} for index in range(ROWS)]
    with pytest.raises(ValueError, match="saved run read arrays or a sequence of rows, this is an iterable"):
        trainer(tmp_path, data=iter(each)).train(resume=True)


def other_rows():
    return {**rows(), "y": 1 - rows()["y"]}


def test_other_rows_of_the_same_number_do_not_continue_a_run_unasked(tmp_path):
    """They were taken for the saved run's without a word."""
    trainer(tmp_path, run={"stop_at": 2}).train()
    with pytest.raises(ValueError, match="the saved run had other rows .fingerprint .* --allow-changes"):
        trainer(tmp_path, data=other_rows()).train(resume=True)
    store = CheckpointStore(tmp_path / "run" / "checkpoints", keep_best=None)
    assert store.latest() == 2
    done = trainer(tmp_path, data=other_rows()).train(resume=True, allow_changes=True)
    assert done.status == "finished"


def test_a_damaged_checkpoint_is_read_and_reported_once(tmp_path, caplog):
    """The one before it was read twice too, with memory for one state alone given back in between."""
    trainer(tmp_path, run={"stop_at": 4}).train()
    arrays = (tmp_path / "run" / "checkpoints" / "4" / "state").rglob("d/*")
    largest = max(arrays, key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-8])
    assert trainer(tmp_path).train(resume=True).status == "finished"
    assert caplog.text.count("skipping a checkpoint") == 1


def test_other_rows_of_a_source_are_refused_by_its_name():
    def position(data):
        return json.loads(json.dumps(own_rows(data, 0).position(8)))

    half = {name: leaf[:4] for name, leaf in rows().items()}
    other = jaxfb.data.Mixture({"a": other_rows(), "b": half}, {"a": 3, "b": 1})
    again = jaxfb.data.Mixture({"a": rows(), "c": half}, {"a": 3, "c": 1})
    saved = position(jaxfb.data.Mixture({"a": rows(), "b": half}, {"a": 3, "b": 1}))
    own_rows(again, 0).check_same(saved)
    own_rows(other, 0).check_same({"mixture": saved["mixture"]})  # of an earlier version
    with pytest.raises(
        ValueError, match="the source 'a' of the Mixture has other rows than in the saved run"
    ):
        own_rows(other, 0).check_same(saved)


@pytest.mark.slow
def test_callbacks_change_the_gradients_before_the_clip(tmp_path):
    """Halved twice, then clipped: a run with a quarter of the loss; the norm in the record is that of the changed."""

    class Halved(Callback):
        def change_gradients(self, gradients, state):
            return jax.tree.map(lambda leaf: leaf / 2, gradients)

    def quarter(params, microbatch, rng):
        found = loss_fn(params, microbatch, rng)
        return jaxfb.Sum(found.total / 4, found.weight)

    options = {"max_grad_norm": 0.1, "optimizer": optax.sgd(0.1)}
    once = callback(change_gradients=lambda gradients, state: jax.tree.map(lambda leaf: leaf / 2, gradients))
    trainer(tmp_path / "a", callbacks=[Halved(), once], **options).train()
    trainer(tmp_path / "b", model=quarter, **options).train()
    chex.assert_trees_all_close(saved(tmp_path / "a"), saved(tmp_path / "b"), rtol=1e-12)
    norms = [
        [r["grad_norm"] for r in read_jsonl(tmp_path / name / "run" / "metrics.jsonl") if "loss" in r]
        for name in "ab"
    ]
    np.testing.assert_allclose(*norms, rtol=1e-12)


@pytest.mark.parametrize(
    "changes, wanted",
    [
        ({"updates": None}, "exactly one of updates"),
        ({"data": {"x": np.zeros((4, 2)), "y": np.zeros(5)}}, r"one number of rows, got \[4, 5\]"),
        ({"data": 3}, "must be arrays"),
        (
            {"data": (rows()["x"], rows()["x"])},
            r"a tuple of arrays could be either, got shapes \[\(24, 5\), ",
        ),
        ({"params": lambda: {}}, r"params must take \(key\)"),
        (
            {"params": {"w": "text"}},
            r"every parameter must be an array, params\['w'\] is 'text'; leave it out",
        ),
        (
            {"params": lambda key: {"w": np.array(["a"])}},
            r"a float array to have a gradient, params\['w'\] is <U1",
        ),
        ({"params": dict}, "a function from a key to one, got <class 'dict'>"),
        ({"callbacks": [Callback]}, r"Callback is a class; give an object of it, Callback\(...\)"),
        ({"evaluate": lambda params, batch: {}}, r"evaluate must take \(params\)"),
        ({"loss": lambda predictions: 0}, r"loss must take \(predictions, microbatch\)"),
        ({"data": iter([{"x": np.zeros(5), "y": np.zeros(2)}])}, "the rows ended after 1"),
        ({"data": Stream(), "updates": None, "epochs": 2}, "needs rows that can be counted"),
        ({"mesh": {"data": 2, "tensr": 2}}, "unknown key mesh.tensr"),
        ({"rows": 7}, "7 rows per update is not a multiple"),
        ({"optimizer": "adam"}, "optimizer"),
        ({"schedule": make("1f1b", 2, 2)}, 'schedule must be the name of a kind .*"package.module:function"'),
        ({"checkpoint": {"every": 0}}, "every=0 must be positive"),
        (
            {"model": counting_all, "updates": None, "epochs": 1, "rows": 20},
            'rows of zeros, and term \'loss\' counts .* use run=."remainder": "drop".',
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_in_a_sentence(tmp_path, changes, wanted):
    with pytest.raises(ValueError, match=wanted):
        trainer(tmp_path, **changes).train()
    assert not losses(tmp_path) if (tmp_path / "run" / "metrics.jsonl").exists() else True


@pytest.mark.parametrize("value", ["text", 1j, None], ids=str)
def test_an_evaluation_that_returns_no_real_number_is_refused(tmp_path, value):
    with pytest.raises(
        ValueError, match="evaluate must return real numbers by name, got {'it': .*; saved after"
    ):
        trainer(tmp_path, evaluate=lambda params: {"it": value}, eval={"every": 2}).train()


COMMANDS = [
    ["eval", "own.yaml"],
    ["check", "own.yaml"],
    ["plan", "own.yaml", "--topology", "cpu:2"],
    ["export-hf", "run", "there"],
    ["generate", "own.yaml", "--prompt", "a"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=[command[0] for command in COMMANDS])
def test_commands_that_need_the_built_in_model_refuse_another_in_a_sentence(
    command, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    config = write_own(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(config.read_text())
    assert main(command) == 2
    assert "[model] tiny_own:model is a model of your own: " in capsys.readouterr().err


def test_a_config_names_a_model_of_ones_own(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_own(tmp_path)
    assert main(["train", "own.yaml"]) == 0
    assert main(["train", "run", "--resume", "run.updates=6"]) == 0
    assert "resuming run after update 4 of 6" in capsys.readouterr().out
    assert sorted(losses(tmp_path)) == [1, 2, 3, 4, 5, 6]
    assert main(["train", "own.yaml", "model=tiny_own:modell", "run.dir=other"]) == 2
    assert "tiny_own has no modell" in capsys.readouterr().err and not (tmp_path / "other").exists()


class OfAnotherSource:
    """Rows whose position is only taken back by the object that gave it, as grain's DataLoader does."""

    def __iter__(self):
        return self

    def __next__(self):
        return {"x": np.ones(3)}

    def get_state(self):
        return {"source": repr(self)}

    def set_state(self, state):
        if state["source"] != repr(self):
            raise KeyError("another source")


def test_rows_that_do_not_take_their_position_back_are_refused_in_a_sentence():
    source, another = OfAnotherSource(), OfAnotherSource()  # both alive: their addresses differ
    saved = own_rows(source, 0).position(0)
    with pytest.raises(ValueError, match=r"do not take back the position.*another source.*__repr__"):
        own_rows(another, 0).restore(saved)
