"""What the processes of a job compare before they begin: the files of weights and runs, own rows, and the state."""

import json
import shutil
from types import SimpleNamespace
from typing import NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from processes import finish, logs, start
from tiny import OWN, OWN_MODULE
from tiny_directory import make

import jaxfb
from jaxfb.chaos.injectors import with_flipped_bit
from jaxfb.data import Mixture
from jaxfb.data.stored.fingerprint import SAMPLE, SAMPLES, sampled_fingerprints
from jaxfb.inference.model import files_of
from jaxfb.refusal import Refused
from jaxfb.training.custom import make_custom
from jaxfb.training.guard import DeviceFault
from jaxfb.training.guarding.guards import Guards
from jaxfb.training.job.agreement import check_agreement
from jaxfb.training.origins import MISSING, of_run, origins
from jaxfb.training.rows import own_rows as rows_module
from jaxfb.training.rows import row_digits
from jaxfb.training.rows.own_rows import own_rows

SIZES = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "num_kv_heads": 1, "mlp_size": 16}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A directory of a tiny model's files."""
    return make(tmp_path_factory.mktemp("files") / "hf", **SIZES)


def flip_last_byte(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def beginning(weights=None, run=None, adapter=None):
    return SimpleNamespace(
        model=SimpleNamespace(from_=weights),
        start=SimpleNamespace(run=run),
        lora=SimpleNamespace(adapter=adapter),
    )


def test_other_weights_at_model_from_are_named(files, tmp_path):
    other = tmp_path / "hf"
    shutil.copytree(files, other)
    config = beginning(weights=str(other))
    one = origins(config)
    assert origins(config) == one
    flip_last_byte(other / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"differ in what the run begins with: model.from=.*hf, by its weights, is"
    ):
        check_agreement("what the run begins with", [one, origins(config)], ["a", "b"])
    shutil.rmtree(other)
    assert set(origins(config).values()) == {MISSING}


def test_other_adapters_are_named(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"12")
    one = origins(beginning(adapter=str(tmp_path)))
    flip_last_byte(tmp_path / "adapter_model.safetensors")
    other = origins(beginning(adapter=str(tmp_path)))
    assert one != other and set(one) == {f"lora.adapter={tmp_path}, by its weights,"}


def test_a_run_is_named_by_its_newest_checkpoint(tmp_path):
    for update in (2, 4):
        record = tmp_path / "checkpoints" / str(update) / "jaxfb" / "data.json"
        record.parent.mkdir(parents=True)
        record.write_text(json.dumps({"digest": update}))
    one = of_run(tmp_path)
    assert one.startswith("update 4, ") and origins(beginning(run=str(tmp_path))) == {
        f"start.run={tmp_path}, by what is saved there,": one
    }
    record.write_text(json.dumps({"digest": 5}))
    other = of_run(tmp_path)
    assert other.startswith("update 4, ") and other != one
    shutil.rmtree(tmp_path / "checkpoints" / "4")
    assert of_run(tmp_path).startswith("update 2, ")
    assert of_run(tmp_path / "none") not in (one, other)


def test_without_files_to_begin_with_there_is_nothing_to_compare():
    assert origins(beginning()) == {} and origins(SimpleNamespace(model="mine:model")) == {}


def test_a_model_that_is_scored_or_continued_is_named_by_weights_and_chat(files, tmp_path):
    other = tmp_path / "hf"
    shutil.copytree(files, other)
    one = files_of(other)
    flip_last_byte(other / "model.safetensors")
    two = files_of(other)
    assert one["weights"] != two["weights"] and one["tokenizer and chat"] == two["tokenizer and chat"]
    (other / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert two["tokenizer and chat"] != files_of(other)["tokenizer and chat"]
    shutil.rmtree(other)
    assert "hf" in files_of(other)["weights"]


def test_a_large_file_is_sampled_from_its_first_byte_to_its_last(tmp_path):
    size = 2 * SAMPLES * SAMPLE
    with (tmp_path / "x").open("wb") as file:
        file.truncate(size)
    seen = {sampled_fingerprints([tmp_path / "x"])[0]}
    for position in (0, size // 2, size - 1):
        with (tmp_path / "x").open("r+b") as file:
            for part in range(0, SAMPLE, SAMPLE // 4):  # a tensor's worth of changes, not one byte
                file.seek(max(0, min(size - 1, position - part)))
                file.write(b"1")
        seen.add(sampled_fingerprints([tmp_path / "x"])[0])
    assert len(seen) == 4


class Row(NamedTuple):
    x: np.ndarray


FORMS = {
    "arrays": lambda x: {"x": x},
    "named tuple of arrays": Row,
    "list": lambda x: [{"x": row} for row in x],
    "list of named tuples": lambda x: [Row(row) for row in x],
}


@pytest.mark.parametrize("form", FORMS)
def test_own_rows_have_a_fingerprint_of_their_values(form):
    def rows(changed=None):
        x = np.arange(12.0).reshape(6, 2)
        if changed is not None:
            x[changed] += 1
        return own_rows(FORMS[form](x), 0)

    assert rows().fingerprint() == rows().fingerprint()
    assert len({rows(changed).fingerprint() for changed in (None, 0, 3, 5)}) == 4


@pytest.mark.parametrize("is_mixed", [False, True])
def test_rows_that_no_process_has_whole_are_not_compared_with_those_of_a_checkpoint(monkeypatch, is_mixed):
    """Their fingerprint is that of the parts which a process has: with more processes it would be another one."""

    def rows(x):
        return own_rows(Mixture({"a": {"x": x}}, {"a": 1}) if is_mixed else {"x": x}, 0)

    saved, changed = rows(np.arange(6.0)).position(0), rows(np.arange(6.0) + 1)
    with pytest.raises(ValueError, match="other rows"):
        changed.check_same(saved)
    monkeypatch.setattr(rows_module, "is_whole", lambda known: False)
    changed.check_same(saved)
    changed.check_same(changed.position(0))


def test_of_many_own_rows_samples_are_read(monkeypatch):
    monkeypatch.setattr(row_digits, "MOST_BYTES", 40)
    x = np.arange(100.0)
    one = row_digits.fingerprint({"x": x}, 100)
    for changed, is_seen in ((0, True), (99, True), (1, False)):
        other = x.copy()
        other[changed] += 1
        assert (row_digits.fingerprint({"x": other}, 100) != one) == is_seen


def test_rows_that_may_be_others_when_read_again_have_none():
    class Augmented:
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return {"x": np.random.default_rng().normal(size=2)}

    assert own_rows(Augmented(), 0).fingerprint() is None
    assert own_rows(iter([{"x": np.ones(2)}]), 0).fingerprint() is None
    assert own_rows({"x": np.array([1.0, 2.0]), "name": np.array([object(), object()])}, 0).fingerprint()


def test_own_rows_are_compared_among_processes(tmp_path):
    def facts(scale):
        return make_custom(
            jaxfb.config.config_from_dict({**OWN, "run": {"dir": str(tmp_path), "updates": 4}}),
            model=lambda params, microbatch, rng: None,
            params={"w": np.zeros(3, np.float32)},
            data={"x": scale * np.ones((16, 3), np.float32)},
            evaluate=None,
        ).facts()

    assert facts(1) == facts(1)
    with pytest.raises(ValueError, match="values of the rows is"):
        check_agreement("text, plan or devices", [facts(1), facts(2)], ["a", "b"])


def guards_of(mesh, state):
    """The guards of a run whose state this is."""
    guards = Guards.__new__(Guards)
    guards._run = SimpleNamespace(work=SimpleNamespace(state=lambda: state), mesh=mesh, done=4)
    guards._compared = None
    return guards


def test_a_state_whose_copies_differ_is_neither_begun_with_nor_saved():
    mesh = jaxfb.make_mesh(data=2)
    sound = {"w": jax.device_put(np.ones(4, np.float32), NamedSharding(mesh, P())), "rows": np.ones(2)}
    guards_of(mesh, sound).check_start()
    guards_of(mesh, sound).check_copies()
    torn = guards_of(mesh, {**sound, "w": with_flipped_bit(sound["w"], 1, element=0, bit=3)})
    with pytest.raises(
        Refused, match=r"do not begin with the same state: copies differ in \['w'\], on device 0"
    ):
        torn.check_start()
    with pytest.raises(
        DeviceFault, match=r"update 4 is not saved: copies that must be equal differ in \['w'\]"
    ):
        torn.check_copies()


@pytest.mark.slow
@pytest.mark.processes
def test_processes_that_begin_with_other_parameters_leave_no_run(tmp_path, monkeypatch):
    """Of which no file tells: each process makes its own."""
    drawn = "jax.random.normal(key, (3,))"
    assert drawn in OWN_MODULE
    own = 'jax.numpy.full(3, float(os.environ["TINY_PARAMETERS"]))'
    (tmp_path / "tiny_own.py").write_text("import os\n" + OWN_MODULE.replace(drawn, own))
    (tmp_path / "tiny.yaml").write_text(
        json.dumps({**OWN, "run": {"dir": str(tmp_path / "run"), "updates": 4}})
    )
    monkeypatch.chdir(tmp_path)
    codes = finish(start(tmp_path, 2, 1, environments=[{"TINY_PARAMETERS": str(k)} for k in range(2)]))
    said = logs(tmp_path, 2)
    assert codes == [2, 2], said
    assert all("the processes do not begin with the same state: copies differ in" in text for text in said)
    assert not (tmp_path / "run" / "checkpoints").exists()
