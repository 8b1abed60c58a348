"""The guards in a run: spikes that are undone, updates that are repeated, copies that are compared."""

import dataclasses
import errno
import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfb
from jaxfb.chaos.injectors import AfterUpdate, with_flipped_bit
from jaxfb.metrics import read_jsonl
from jaxfb.training.guard import DeviceFault, SpikeAbort
from jaxfb.training.guarding.rerun import Verdict

SPIKE = 20


class BeforeUpdate(jaxfb.Callback):
    """Changes the rows of one update, in place, before they are computed with. change: (batch) -> None."""

    def __init__(self, update, change):
        self._update, self._change = update, change

    def before_update(self, step, batch):
        if step == self._update:
            self._change(batch)


def loss_fn(params, microbatch, rng):
    error = microbatch["x"] @ params["w"] - microbatch["y"]
    return jaxfb.Sum((error**2).sum(), 1.0 * microbatch["x"].shape[0])


def rows():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(256, 4)).astype(np.float32)
    return {"x": x, "y": (x @ np.arange(4.0) + 0.3 * rng.normal(size=256)).astype(np.float32)}


def trainer_of(directory, updates=30, callbacks=(), mesh=None, sections=None, **guard):
    return jaxfb.Trainer(
        model=loss_fn,
        params={"w": np.zeros(4, np.float32)},
        optimizer=optax.adam(0.03),
        dir=str(directory),
        updates=updates,
        rows=8,
        rows_per_microbatch=2,
        mesh=mesh or {"data": 2},
        guard={"spike_window": 8, **guard},
        callbacks=list(callbacks),
        **{"data": rows(), "checkpoint": {"every": 4}, **(sections or {})},
    )


def train(directory, *, resume=False, **settings):
    trainer = trainer_of(directory, **settings)
    result = trainer.train(resume=resume)
    return result, read_jsonl(directory / "metrics.jsonl")


def bad_row(batch):
    batch["y"] += 1e3


def weights(directory):
    from jaxfb.checkpoint.store import CheckpointStore

    abstract = {"params": {"w": jax.ShapeDtypeStruct((4,), jnp.float32)}}
    return CheckpointStore(directory / "checkpoints").restore(abstract, partial=True)[0]["params"]["w"]


def test_a_spike_is_reported_and_training_goes_on(tmp_path, capsys):
    result, records = train(tmp_path, callbacks=[BeforeUpdate(SPIKE, bad_row)])
    assert result.status == "finished"
    flagged = [record["step"] for record in records if "spike/loss" in record]
    assert flagged == [SPIKE]
    assert f"update {SPIKE}: loss" in capsys.readouterr().out


def test_rolling_back_undoes_the_spike_and_continues_behind_its_rows(tmp_path):
    result, records = train(tmp_path / "a", callbacks=[BeforeUpdate(SPIKE, bad_row)], spikes="rollback")
    assert result.status == "finished" and result.updates == 30
    assert [record["step"] for record in records if "loss" in record] == list(range(1, 31))
    # as a run that never sees the rows from the checkpoint to the spike: updates 17 to 20 change nothing
    applied = [record["applied_updates"] for record in records if "loss" in record]
    assert applied[SPIKE - 1] == SPIKE - 1 and applied[SPIKE] == 16
    calm, _ = train(tmp_path / "b", updates=30)
    after = [record["loss"] for record in records if record["step"] > SPIKE and "loss" in record]
    assert max(after) < 50


class Numbered:
    """Rows that come one by one, each with its number."""

    def __init__(self, count=10**6):
        self._data, self._next, self._count = rows(), 0, count

    def __iter__(self):
        return self

    def __next__(self):
        if self._next == self._count:
            raise StopIteration
        self._next += 1
        row = {name: leaf[(self._next - 1) % 256] for name, leaf in self._data.items()}
        return {**row, "number": np.int32(self._next - 1)}


class PutBack(Numbered):
    def get_state(self):
        return {"next": self._next}

    def set_state(self, state):
        self._next = state["next"]


class Seen(jaxfb.Callback):
    """The numbers of the rows that each update was given last."""

    def __init__(self):
        self.rows = {}

    def before_update(self, step, batch):
        self.rows[step] = batch["number"].tolist()


def of_update(step):
    return list(range(8 * (step - 1), 8 * step))


@pytest.mark.parametrize("source", [Numbered, PutBack])
def test_rows_of_a_stream_are_those_of_their_update_after_a_rollback(tmp_path, source):
    """Those of the update that was read while the spike was computed were passed over."""
    seen, spike = Seen(), BeforeUpdate(SPIKE, bad_row)
    sections = {"data": source(8 * 24), "checkpoint": {"every": 7}}  # no row is left over
    train(tmp_path, updates=24, callbacks=[seen, spike], spikes="rollback", sections=sections)
    assert seen.rows == {step: of_update(step) for step in range(1, 25)}


@pytest.mark.parametrize("source", [Numbered, PutBack])
def test_rows_of_a_stream_that_were_read_for_an_update_that_was_not_made_are_read_again(tmp_path, source):
    """The position that was saved when the rows ended was behind those that were read in vain."""
    with pytest.raises(ValueError, match="the rows ended after 43, .*saved after update 5 of 8"):
        train(tmp_path, updates=8, sections={"data": source(8 * 5 + 3)})
    seen = Seen()
    train(tmp_path, updates=8, callbacks=[seen], sections={"data": source()}, resume=True)
    assert seen.rows == {step: of_update(step) for step in (6, 7, 8)}


@pytest.mark.slow
def test_a_run_killed_after_a_rollback_ends_in_the_same_bits(tmp_path):
    class Kill(jaxfb.Callback):
        def on_step_start(self, step):
            if step == SPIKE + 2:  # nothing was saved since the rollback
                raise KeyboardInterrupt

    spike = BeforeUpdate(SPIKE, bad_row)
    train(tmp_path / "whole", callbacks=[spike], spikes="rollback")
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "killed", callbacks=[spike, Kill()], spikes="rollback")
    train(tmp_path / "killed", callbacks=[spike], spikes="rollback", resume=True)
    np.testing.assert_array_equal(weights(tmp_path / "whole"), weights(tmp_path / "killed"))


@pytest.mark.slow
def test_a_skipped_spike_changes_no_bit(tmp_path, capsys):
    _, records = train(tmp_path / "a", callbacks=[BeforeUpdate(SPIKE, bad_row)], spikes="skip")
    assert [record["step"] for record in records if record.get("spike")] == [SPIKE]
    applied = [record["applied_updates"] for record in records if "loss" in record]
    assert applied[SPIKE - 1 : SPIKE + 1] == [SPIKE - 1, SPIKE - 1]
    assert f"update {SPIKE} skipped as a spike: loss" in capsys.readouterr().out
    # as a run that is told to leave out these rows
    train(tmp_path / "b", sections={"run": {"skip_updates": [SPIKE]}})
    np.testing.assert_array_equal(weights(tmp_path / "a"), weights(tmp_path / "b"))


@pytest.mark.parametrize(
    "at",
    [SPIKE, pytest.param(SPIKE + 1, marks=pytest.mark.slow), pytest.param(SPIKE + 2, marks=pytest.mark.slow)],
)
def test_a_run_killed_around_a_skipped_spike_ends_in_the_same_bits(tmp_path, at):
    class Stop(jaxfb.Callback):
        def on_train_start(self, run):
            self.run = run

        def on_step_start(self, step):
            if step == at:  # saved, with the spike as the next, the last or the last but one of what was seen
                self.run.stop("for a test")

    bad = [BeforeUpdate(update, bad_row) for update in (SPIKE, SPIKE + 3)]
    train(tmp_path / "whole", callbacks=bad, spikes="skip")
    train(tmp_path / "killed", callbacks=[*bad, Stop()], spikes="skip")
    _, records = train(tmp_path / "killed", callbacks=bad, spikes="skip", resume=True)
    assert [record["step"] for record in records if record.get("spike")] == [SPIKE, SPIKE + 3]
    np.testing.assert_array_equal(weights(tmp_path / "whole"), weights(tmp_path / "killed"))


@pytest.mark.slow
def test_spikes_are_skipped_by_a_run_that_only_warned_before(tmp_path):
    bad = [BeforeUpdate(SPIKE, bad_row)]
    trainer_of(tmp_path, callbacks=bad, sections={"run": {"stop_at": SPIKE - 2}}).train()
    _, records = train(tmp_path, callbacks=bad, spikes="skip", resume=True)
    assert [record["step"] for record in records if record.get("spike")] == [SPIKE]


@pytest.mark.slow
def test_the_dump_of_a_run_that_skipped_a_spike_replays_without_it(tmp_path):
    data = rows()
    data["y"][20::50] += 1e3
    sections = {"data": data, "checkpoint": {"every": None}}
    _, records = train(tmp_path / "a", spikes="skip", mesh={"data": 4}, sections=sections)
    spike = [record["step"] for record in records if record.get("spike")][-1]
    sections["checkpoint"] = {"every": spike - 2}
    settings = {"mesh": {"data": 4}, "sections": sections, "spikes": "skip", "compare_replicas_every": 1}
    with pytest.raises(DeviceFault):
        train(tmp_path / "b", callbacks=[AfterUpdate(spike + 1, flip(device=2))], **settings)
    dump = tmp_path / "b" / "dumps" / f"update-{spike + 1:06d}"
    assert json.loads((dump / "dump.json").read_text())["step"] == spike - 2
    assert trainer_of(tmp_path / "b", **settings).replay(dump).is_same


def test_spikes_without_end_end_the_run(tmp_path):
    bad = [BeforeUpdate(update, bad_row) for update in range(SPIKE, 31)]
    with pytest.raises(SpikeAbort, match="guard.max_rollbacks=2"):
        train(tmp_path, callbacks=bad, spikes="rollback", max_rollbacks=2)


class DamageNewest(jaxfb.Callback):
    """Removes the arrays of the newest checkpoint before each of the updates; its record can still be read."""

    def __init__(self, *updates):
        self._updates = updates

    def on_train_start(self, run):
        self._run = run

    def on_step_start(self, step):
        if step in self._updates:
            self._run.wait_saved()
            shutil.rmtree(self._run.directory.checkpoints / str(self._run.newest_saved) / "state")


def test_returns_to_a_checkpoint_count_where_newer_ones_are_damaged(tmp_path, capsys):
    """They counted for the damaged one, so a run returned to the older one more often than it may."""
    bad = [BeforeUpdate(update, bad_row) for update in (SPIKE, SPIKE + 1, SPIKE + 3)]
    damage = DamageNewest(SPIKE, SPIKE + 3)  # checkpoint 16, and 22, which was due at update 20
    with pytest.raises(SpikeAbort, match="spike number 3 after checkpoint 12"):
        train(tmp_path, callbacks=[*bad, damage], spikes="rollback", max_rollbacks=2)
    assert capsys.readouterr().out.count("rolled back to the state of update 12") == 2


def test_a_repeated_update_changes_no_bit(tmp_path):
    train(tmp_path / "plain", updates=6)
    _, records = train(tmp_path / "twice", updates=6, verify_every=2)
    assert [record.get("guard/repeated") for record in records if "loss" in record] == [
        None,
        1,
        None,
        1,
        None,
        1,
    ]
    assert not any(record.get("guard/differed") for record in records)
    np.testing.assert_array_equal(weights(tmp_path / "plain"), weights(tmp_path / "twice"))


def test_updates_to_skip_that_are_in_the_checkpoint_are_named(tmp_path, capsys):
    """Nothing told that they stay there; those that were skipped before are named no more."""
    for updates, skipped, late in (
        (4, [3], False),
        (5, [3, 6], False),
        (7, [2, 3, 4, 6], True),
        (8, [2, 3, 4, 6], False),
    ):
        train(tmp_path, updates=updates, sections={"run": {"skip_updates": skipped}}, resume=True)
        told = (
            "run.skip_updates=[2, 4]: the state saved after update 5 has their rows already"
            in capsys.readouterr().out
        )
        assert told == late


def test_the_first_update_of_a_resumed_run_can_be_repeated(tmp_path):
    """On one device the restored random key could not be copied, at each start again."""
    for updates in (2, 4):
        _, records = train(tmp_path, updates=updates, mesh={"data": 1}, verify_every=1, resume=updates == 4)
    assert [record["guard/differed"] for record in records if "loss" in record] == [0] * 4


def flip(name="w", device=1):
    def change(state):
        params = {**state.params, name: with_flipped_bit(state.params[name], device, element=1, bit=2)}
        return dataclasses.replace(state, params=params)

    return change


@pytest.mark.parametrize("device", [0, 1])
def test_a_fault_that_does_not_come_back_is_outvoted(tmp_path, capsys, device):
    train(tmp_path / "plain", updates=6)
    _, records = train(
        tmp_path / "fault", updates=6, verify_every=2, callbacks=[AfterUpdate(4, flip(device=device))]
    )
    assert [record["step"] for record in records if record.get("guard/differed")] == [4]
    assert ".params['w']; a third run agreed with one of them" in capsys.readouterr().out
    np.testing.assert_array_equal(weights(tmp_path / "plain"), weights(tmp_path / "fault"))


def test_a_device_that_fails_again_is_named(tmp_path, monkeypatch):
    counter = iter(range(100))

    def worse(state):
        return flip_bit_number(state, next(counter))

    def flip_bit_number(state, bit):
        params = {"w": with_flipped_bit(state.params["w"], 0, element=1, bit=bit)}
        return dataclasses.replace(state, params=params)

    monkeypatch.setattr("jaxfb.training.guarding.rerun.failed_self_test", lambda mesh: [1])
    with pytest.raises(DeviceFault, match="device 1 fails a fixed computation"):
        train(tmp_path, updates=6, verify_every=2, callbacks=[AfterUpdate(4, worse, times=9)])


def test_a_program_that_is_not_deterministic_is_said_to_be(tmp_path, capsys):
    counter = iter(range(100))

    def noise(state):
        bit = next(counter)
        return dataclasses.replace(
            state, params={"w": with_flipped_bit(state.params["w"], 0, element=1, bit=bit)}
        )

    result, _ = train(tmp_path, updates=6, verify_every=4, callbacks=[AfterUpdate(4, noise, times=3)])
    assert result.status == "finished"
    assert "the program is not deterministic" in capsys.readouterr().out


def test_copies_that_differ_are_named_with_leaf_and_device(tmp_path):
    with pytest.raises(DeviceFault) as error:
        train(
            tmp_path, mesh={"data": 4}, compare_replicas_every=2, callbacks=[AfterUpdate(5, flip(device=2))]
        )
    text = str(error.value)
    assert "update 6: copies that must be equal differ since update 4, in" in text
    assert ".params['w']" in text and "device 2 (data 2)" in text


def test_the_dump_of_differing_copies_replays_without_the_updates_that_the_run_skipped(tmp_path):
    fault, skips = AfterUpdate(6, flip(device=2)), {"run": {"skip_updates": [5]}}
    with pytest.raises(DeviceFault):
        train(tmp_path, mesh={"data": 4}, compare_replicas_every=2, callbacks=[fault], sections=skips)
    dump = tmp_path / "dumps" / "update-000006"
    written = json.loads((dump / "dump.json").read_text())
    assert (written["step"], written["past"]) == (4, 4) and written["numbers"]
    assert trainer_of(tmp_path, mesh={"data": 4}, sections=skips).replay(dump).is_same


def test_the_environment_is_written_nowhere(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("WANDB_API_KEY", "a-secret-of-the-user")
    with pytest.raises(DeviceFault):
        fault = AfterUpdate(5, flip(device=2))
        train(tmp_path, mesh={"data": 4}, compare_replicas_every=2, callbacks=[fault])
    assert (tmp_path / "dumps").is_dir() and (tmp_path / "checkpoints").is_dir()
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"a-secret" not in written and "a-secret" not in "".join(capfd.readouterr())


def test_equal_copies_stop_nothing(tmp_path):
    assert train(tmp_path, updates=5, compare_replicas_every=1)[0].status == "finished"


@pytest.mark.parametrize(
    ("guard", "message"),
    (
        ({"spikes": "rollback"}, "checkpoint.every=null"),
        ({"spike_threshold": float("nan")}, "spike_threshold"),
        ({"spike_window": 3}, "use 8 or more"),
        ({"verify_every": 0}, "verify_every"),
        ({"spikes": "sometimes"}, "spikes"),
    ),
)
def test_impossible_guards_are_refused(tmp_path, guard, message):
    from tiny import write_tiny

    from jaxfb.config import load_config

    with pytest.raises(ValueError, match=message):
        load_config(write_tiny(tmp_path, guard=guard, checkpoint={"every": None}))


# dumps


def layered(width=4, layers=3):
    from jaxfb import LossOutput, Pipelined, Sum

    def layer(weights, hidden, microbatch, rng):
        return jnp.tanh(hidden @ weights["w"]) / microbatch["safe"][:, None]

    def head(outer, hidden, microbatch, rng):
        error = hidden @ outer["head"] - microbatch["y"]
        return LossOutput({"square": Sum((error**2).sum(), jnp.float32(error.shape[0]))})

    rng = np.random.default_rng(3)
    params = {
        "layers": {"w": rng.normal(size=(layers, width, width)).astype(np.float32)},
        "head": rng.normal(size=width).astype(np.float32),
    }
    return Pipelined(lambda outer, microbatch, rng: microbatch["x"], layer, head), params


def layered_trainer(directory, callbacks=(), **sections):
    model, params = layered()
    return jaxfb.Trainer(
        model=model,
        params=params,
        data=rows() | {"safe": np.ones(256, np.float32)},
        optimizer=optax.adam(0.03),
        dir=str(directory),
        updates=12,
        rows=8,
        rows_per_microbatch=2,
        mesh={"data": 2},
        callbacks=list(callbacks),
        **sections,
    )


def unsafe(batch):
    batch["safe"][5] = 0  # of the rows of both replicas, cut into two microbatches


@pytest.mark.slow
def test_the_dump_of_a_run_that_was_given_up_replays_to_the_same_bits(tmp_path):
    bad = [BeforeUpdate(update, unsafe) for update in (5, 6)]
    with pytest.raises(jaxfb.trainer.NonFiniteAbort, match="jaxfb replay .*update-000006") as error:
        layered_trainer(tmp_path, bad, run={"max_nonfinite": 2}).train()
    dump = tmp_path / "dumps" / "update-000006"
    assert str(dump) in str(error.value)
    found = layered_trainer(tmp_path).replay(dump)
    assert found.update == 6 and found.is_same
    assert set(found.causes) == {"loss", "gradients"}
    place, microbatch = found.place
    assert (place.part, place.layer, place.backward) == ("layer", 0, False)


def test_a_run_that_is_given_up_again_at_the_same_update_leaves_a_new_dump(tmp_path):
    """Continued, it ended with the refusal to write the state of its dump twice, with another exit code."""
    for resume in (False, True):
        bad = [BeforeUpdate(2, unsafe)]
        with pytest.raises(jaxfb.trainer.NonFiniteAbort, match="jaxfb replay .*update-000002"):
            layered_trainer(tmp_path, bad, run={"max_nonfinite": 1}, checkpoint={"every": 1}).train(
                resume=resume
            )
        dump = tmp_path / "dumps" / "update-000002"
        (dump / "rows-1.npz").touch(exist_ok=False)  # such as of a second process


@pytest.mark.parametrize("what", ["write_json", "_save_rows"])
def test_a_disk_that_does_not_take_the_dump_does_not_hide_why_a_run_has_ended(tmp_path, monkeypatch, what):
    """It ended with the exit code of the full disk, 74, and not a word of the updates that were not finite."""

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(f"jaxfb.training.guarding.dump.{what}", full)
    bad = [BeforeUpdate(update, unsafe) for update in (2, 3)]
    with pytest.raises(
        jaxfb.trainer.NonFiniteAbort, match="not finite.*no dump .* was written: .*No space left"
    ):
        layered_trainer(tmp_path, bad, run={"max_nonfinite": 2}).train()


@pytest.mark.slow
def test_the_dump_of_spikes_replays_from_the_checkpoint(tmp_path):
    bad = [BeforeUpdate(update, bad_row) for update in range(SPIKE, 31)]
    with pytest.raises(SpikeAbort, match="jaxfb replay"):
        train(tmp_path, callbacks=bad, spikes="rollback", max_rollbacks=1)
    (dump,) = (tmp_path / "dumps").iterdir()
    written = json.loads((dump / "dump.json").read_text())
    assert (written["step"], written["past"], written["update"]) == (16, SPIKE, SPIKE + 1)
    trainer = jaxfb.Trainer(
        model=loss_fn, params={"w": np.zeros(4, np.float32)}, data=rows(), optimizer=optax.adam(0.03),
        dir=str(tmp_path), updates=30, rows=8, rows_per_microbatch=2,
    )  # fmt: skip
    assert trainer.replay(dump).is_same
    with np.load(dump / "rows-0.npz") as arrays:
        changed = {name: array.copy() for name, array in arrays.items()}
    changed["a1"][3] += 1
    np.savez(dump / "rows-0.npz", **changed)
    assert trainer.replay(dump).is_same is False


@pytest.mark.parametrize("text", ("", "{}", '{"format": 9}', "[1]"))
def test_what_is_no_dump_is_refused(tmp_path, text):
    from jaxfb.training.guarding.dump import read_dump

    with pytest.raises(ValueError, match="not a dump"):
        read_dump(tmp_path / "nowhere")
    (tmp_path / "dump.json").write_text(text)
    with pytest.raises(ValueError, match="damaged, or of another version"):
        read_dump(tmp_path)


def test_a_verdict_says_what_was_seen():
    assert str(Verdict("device", (), (3,))).startswith("device 3 fails a fixed computation")
    assert str(Verdict("device", ("w",), (3,))).startswith(
        "two runs from one state differ in w; device 3 fails"
    )
