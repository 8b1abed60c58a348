"""The trainer as a library: what a run leaves behind, how it goes on, and what it refuses."""

import json
import os
import signal
import stat
import warnings

import jax
import numpy as np
import pytest
from tiny import write_tiny

import jaxfb
from jaxfb import trainer
from jaxfb.batch_plan import BatchPlan, RunPlan
from jaxfb.callbacks import HOOKS, callback
from jaxfb.checkpoint.store import CheckpointStore
from jaxfb.cli.commands import main
from jaxfb.config import config_from_dict, config_to_dict, load_config
from jaxfb.metrics import read_jsonl
from jaxfb.training.compile_cache import use_compile_cache
from jaxfb.training.persistence.changes import other_text
from jaxfb.training.reporting import report
from jaxfb.training.rows.batches import WindowReader
from jaxfb.training.run_dir import RunDirectory
from jaxfb.training.setup import make_setup


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A finished run of 12 updates, and the hooks that were called."""
    directory = tmp_path_factory.mktemp("done")
    calls = []
    spies = callback(**{hook: lambda *args, hook=hook: calls.append((hook, args)) for hook in HOOKS})
    config = load_config(write_tiny(directory))
    return config, trainer.train(config, callbacks=[spies]), calls


def losses(result, name="loss"):
    return {r["step"]: r[name] for r in read_jsonl(result.directory / "metrics.jsonl") if name in r}


def saved(config, update=None):
    """Every leaf of a checkpoint on one device, and its host values."""
    setup = make_setup(config)
    abstract = setup.train_step(setup.plan.train).abstract_state(setup.init_params)
    state, host = CheckpointStore(RunDirectory.of(config).checkpoints).restore(abstract, update)
    leaves = jax.tree_util.tree_leaves_with_path(state)
    plain = [
        (p, jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
        for p, x in leaves
    ]
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in plain}, host


def assert_same_bits(one, other):
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


def test_what_a_run_leaves(done):
    config, result, _ = done
    files = {path.name for path in result.directory.iterdir()}
    assert files >= {
        "config.yaml",
        "plan.json",
        "tokenizer.json",
        "metrics.jsonl",
        "summary.json",
        "loss.png",
        "sample.txt",
    }
    assert load_config(result.directory) == config
    summary = json.loads((result.directory / "summary.json").read_text())
    assert summary == result.summary
    assert summary["applied_updates"] == summary["updates"] == 12
    assert (
        summary["nats_per_token"].keys()
        == {"held_out", "unigram", "bigram"}
        == summary["bits_per_byte"].keys()
    )
    assert summary["sample"].startswith("def ")
    train, held_out = losses(result), losses(result, "eval/loss")
    assert list(train) == list(range(1, 13)) and list(held_out) == [4, 8, 12]
    assert train[12] < train[1] - 0.5 and held_out[12] < held_out[4]
    assert list(losses(result, "applied_updates").values()) == list(range(12))


def test_hooks_come_in_order(done):
    _, _, calls = done
    names = [name for name, _ in calls]
    assert names[0] == "on_train_start" and names[-1] == "on_train_end"
    for step in range(1, 13):
        of_step = [name for name, args in calls[1:] if args[0] == step]
        assert of_step[:3] == ["on_step_start", "before_update", "on_step_end"]
        assert of_step[3:5] == (["on_eval", "on_save"] if step % 4 == 0 else [])
    first = next(args for name, args in calls if name == "on_step_end")[1]
    assert {"loss", "grad_norm", "learning_rate", "tokens", "accuracy", "skipped", "epoch"} <= first.keys()


def test_an_evaluation_on_another_text_says_so(done, tmp_path, capsys):
    _, result, _ = done
    (tmp_path / "other.txt").write_text("\n".join(f"line {k}" for k in range(4000)))
    trainer.evaluate(result.directory, ["data.source=text", f"data.path={tmp_path / 'other.txt'}"])
    assert "[eval] this is not the text that the run was trained on" in capsys.readouterr().err


@pytest.mark.parametrize(
    "override, told",
    [("data.seed=1", True), ("data.held_out_path=mine.txt", False), ("data.packing=best_fit", False)],
)
def test_rows_to_train_on_tell_of_another_text_only_where_they_are_cut_alike(override, told):
    saved = load_config("quickstart", ["data.source=text", "data.path=a.txt"])
    record = {"config": config_to_dict(saved), "data": {"fingerprint": "1"}}
    config = config_from_dict(record["config"], [override])
    assert (other_text(record, config, "2") is not None) == told
    assert other_text(record, config, "1") is None and other_text({**record, "data": {}}, config, "2") is None


def test_eval_and_generate_read_the_run(done, capsys):
    config, result, _ = done
    metrics = trainer.evaluate(result.directory)
    assert metrics["eval/loss"] == pytest.approx(result.summary["nats_per_token"]["held_out"], rel=1e-6)
    out = capsys.readouterr().out
    assert "unigram" in out and "held-out tokens of python-stdlib\n" in out
    assert main(["eval", str(result.directory), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["scores"]["held_out"] == metrics and "not the text" not in err
    assert main(["eval", str(result.directory), "--length", "8"]) == 2
    assert "--length is the context of --text and --task" in capsys.readouterr().err
    text = trainer.generate(result.directory, "import ", tokens=5, temperature=0)
    assert text.startswith("import ") and text == trainer.generate(
        result.directory, "import ", tokens=5, temperature=0
    )


@pytest.mark.slow
def test_seconds_of_forward_backward_and_optimizer_are_apart_where_they_are_asked_for(done, tmp_path):
    """The same bits, in two programs."""
    config, whole, _ = done
    apart = load_config(
        write_tiny(tmp_path, data={"cache_dir": config.data.cache_dir}), ["log.split_update=true"]
    )
    result = trainer.train(apart)
    assert losses(result) == losses(whole)
    assert_same_bits(saved(apart)[0], saved(config)[0])
    for record in read_jsonl(result.directory / "metrics.jsonl"):
        if "loss" in record:
            parts = record["forward_backward_seconds"], record["optimizer_seconds"]
            assert min(parts) > 0 and sum(parts) <= record["update_seconds"]


def test_a_finished_run_stays_as_it_is(done, capsys):
    config, result, _ = done
    before = (result.directory / "metrics.jsonl").read_bytes()
    for resume in (False, True):
        again = trainer.train(config, resume=resume)
        assert (again.status, again.updates) == ("finished", 12)
    assert "is finished: 12 updates" in capsys.readouterr().out
    assert (result.directory / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
def test_a_signal_saves_and_resuming_is_bitwise(done, tmp_path):
    """Stopped in update 6, which no checkpoint falls on; then another config may not take its place."""
    config, whole, _ = done
    stop = callback(
        before_update=lambda step, batch: os.kill(os.getpid(), signal.SIGTERM) if step == 6 else None
    )
    part = load_config(write_tiny(tmp_path, data={"cache_dir": config.data.cache_dir}))
    result = trainer.train(part, callbacks=[stop])
    assert (result.status, result.updates) == ("interrupted", 6)
    with pytest.raises(ValueError, match=r"contains a run saved at update 6; continue it with --resume"):
        trainer.train(part)
    with pytest.raises(ValueError, match=r"resuming would train on other rows .* rows 8 vs 16"):
        trainer.train(load_config(tmp_path / "tiny.yaml", ["batch.rows=16"]), resume=True)
    rest = trainer.train(part, resume=True)
    assert rest.status == "finished"
    assert_same_bits(saved(part)[0], saved(config)[0])
    assert losses(rest) == losses(whole) and losses(rest, "eval/loss") == losses(whole, "eval/loss")


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ["mesh.dp=2", "mesh.fsdp=2", "mesh.tp=2", "optimizer.sharding=data"],
        ["mesh.pp=2", "mesh.dp=2", "schedule=1f1b"],
    ],
    ids=["data-fsdp-tensor", "pipe-data"],
)
def test_another_mesh_restores_the_same_bits_and_goes_on_with_the_same_rows(done, tmp_path, overrides):
    config, whole, _ = done
    path = write_tiny(tmp_path, data={"cache_dir": config.data.cache_dir})
    stop = callback(on_save=lambda step, directory: os.kill(os.getpid(), signal.SIGINT))
    trainer.train(load_config(path), callbacks=[stop])
    other = load_config(path, overrides)
    assert_same_bits(saved(other, 4)[0], saved(load_config(path), 4)[0])
    rest = trainer.train(other, resume=True)
    np.testing.assert_allclose(list(losses(rest).values()), list(losses(whole).values()), rtol=2e-5)


@pytest.mark.slow
def test_fresh_moves_the_old_run_aside(tmp_path):
    constant = {"name": "constant"}  # one program for both lengths
    path = write_tiny(tmp_path, run={"updates": 3}, lr=constant, eval={"every": None, "prompt": ""})
    trainer.train(load_config(path))
    result = trainer.train(load_config(path, ["run.updates=4"]), fresh=True)
    assert result.updates == 4
    assert (tmp_path / "run.old1" / "summary.json").is_file()


@pytest.mark.slow
def test_ramp_up_and_a_short_last_window(tmp_path):
    sizes = {"rows": 8, "rows_per_microbatch": 2, "ramp_up": "0:4 8:8"}
    run = {"updates": None, "samples": 19}
    config = load_config(write_tiny(tmp_path, batch=sizes, run=run, data={"held_out_fraction": 0}))
    result = trainer.train(config)
    assert list(losses(result, "rows").values()) == [4, 4, 8, 3]
    tokens = losses(result, "tokens")
    assert tokens[4] == 3 / 4 * tokens[1]
    state, host = saved(config)
    assert state[".samples"] == host["data"]["consumed_rows"] == 19
    assert result.summary["nats_per_token"] == {}


def test_windows_of_epochs_read_every_row_once_an_epoch(tmp_path):
    setup = make_setup(load_config(write_tiny(tmp_path)))
    rows = setup.corpus.train.select(np.arange(10))
    plan = RunPlan(BatchPlan(rows=4, rows_per_microbatch=2), epochs=2, dataset_rows=10)
    reader = WindowReader(rows, plan, seed=1, mesh=jaxfb.make_mesh())
    read = [reader.read(window)["tokens"][: window.rows] for window in plan.windows()]
    assert [len(batch) for batch in read] == [4, 4, 2] * 2
    for epoch in (read[:3], read[3:]):
        seen = {row.tobytes() for row in np.concatenate(epoch)}
        assert seen == {row.tobytes() for row in rows.gather(np.arange(10))["tokens"]}
    dropping = RunPlan(BatchPlan(rows=4, rows_per_microbatch=2), epochs=2, dataset_rows=10, remainder="drop")
    reader = WindowReader(rows, dropping, seed=1, mesh=jaxfb.make_mesh())
    kept = [reader.read(window)["tokens"] for window in dropping.windows()]
    np.testing.assert_array_equal(np.concatenate(kept), np.concatenate([*read[:2], *read[3:5]]))


@pytest.mark.slow
def test_horizon_is_the_run_and_a_mismatch_warns_with_both_numbers(tmp_path):
    path = write_tiny(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        setup = make_setup(load_config(path))
    assert float(setup.optimizer.learning_rate(12)) < 1e-9 < float(setup.optimizer.learning_rate(11))
    with pytest.warns(UserWarning, match=r"schedule ends at 9, run makes 12 updates: lr is 0 for the last 3"):
        make_setup(load_config(path, ["lr.total=9"]))


def test_compiled_programs_are_kept_for_this_user_alone(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        assert use_compile_cache(open_to_all) is None and not jax.config.jax_compilation_cache_dir
        assert stat.S_IMODE(use_compile_cache(tmp_path / "mine").stat().st_mode) == 0o700
        jax.config.update("jax_compilation_cache_dir", str(open_to_all))  # as if inherited
        with pytest.warns(UserWarning, match="other users can write programs into it"):
            assert use_compile_cache() is None and not jax.config.jax_compilation_cache_dir
        (tmp_path / "shown").mkdir(mode=0o755)
        jax.config.update("jax_compilation_cache_dir", str(tmp_path / "shown"))
        assert use_compile_cache() == tmp_path / "shown"
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_refusals_before_anything_is_compiled(tmp_path):
    path = write_tiny(tmp_path)
    refused = {
        "model.vocab_size=100": r"\[model\] vocab_size=100 is below the 257 ids of the tokenizer; use 384",
        "batch.rows=9": r"\[train\] 9 rows per update is not a multiple of dp 1 × 2",
        "mesh.tp=3": r"tensor",
        "data.sequence_length=1": r"sequence_length=1 must be at least 2",
    }
    for override, sentence in refused.items():
        with pytest.raises(ValueError, match=sentence):
            make_setup(load_config(path, [override]))


def test_no_table_is_printed_where_no_text_was_held_out():
    assert not list(report.loss_lines({"nats_per_token": {}, "bits_per_byte": {}}))
