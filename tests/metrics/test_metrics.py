"""Numbers leave the run as they were: none lost by a kill, none doubled by a resume, none waited for."""

import io
import json
import math
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest
from fake_tensorboard import FakeTensorboard

from jaxfb.callbacks import HOOKS, Callback, callback, combine
from jaxfb.display import Progress, print_table, summary
from jaxfb.metrics import (
    Pending,
    Throughput,
    arrays,
    make_writers,
    plot_losses,
    plot_policy,
    read_jsonl,
    scalars,
)
from jaxfb.metrics.strict_json import strict_json
from jaxfb.metrics.writers import check_writers
from jaxfb.types import Last, Max, Sum


def test_jsonl_survives_a_kill_and_a_resume(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = make_writers((), tmp_path, {})
    for step in range(1, 6):
        writer.write(step, {"loss": np.float32(step), "skipped": np.bool_(False), "norm": float("nan")})
    assert [r["step"] for r in read_jsonl(path)] == [1, 2, 3, 4, 5]  # before close: a kill loses nothing
    assert json.loads(path.read_text().splitlines()[0]) == {
        "step": 1,
        "loss": 1.0,
        "skipped": False,
        "norm": None,
    }
    writer.write(3, {"eval/loss": 2.0})
    with path.open("a") as file:
        file.write('{"step": 6, "lo')  # torn by a kill

    resumed = make_writers((), tmp_path, {}, resume=3)
    resumed.write(4, {"loss": 40.0})
    resumed.close()
    assert [(r["step"], r.get("loss")) for r in read_jsonl(path)] == [
        (1, 1),
        (2, 2),
        (3, 3),
        (3, None),
        (4, 40),
    ]
    make_writers((), tmp_path, {}).close()
    assert read_jsonl(path) == []


def test_missing_extras_say_what_to_install(tmp_path, monkeypatch):
    for name, package in (("tensorboard", "tensorboardX"), ("wandb", "wandb")):
        monkeypatch.setitem(sys.modules, package, None)
        for use in (
            lambda name=name: check_writers([name]),
            lambda name=name: make_writers([name], tmp_path, {}),
        ):
            with pytest.raises(ValueError, match=rf"pip install 'jaxfb\[{name}\]'"):
                use()
    with pytest.raises(ValueError, match="no writer 'tensorbord'; use one of tensorboard, wandb"):
        make_writers(["tensorbord"], tmp_path, {})


def test_extras_receive_the_same_records(tmp_path, monkeypatch):
    calls = []

    class Run:
        dir = str(tmp_path)
        log = staticmethod(lambda record, step: calls.append((record, step)))
        finish = staticmethod(lambda: calls.append("finished"))

    inits = []
    wandb = types.SimpleNamespace(init=lambda **given: inits.append(given) or Run)
    events = FakeTensorboard(monkeypatch).events
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    for resume in (None, 7):
        writer = make_writers(["tensorboard", "wandb"], tmp_path, {"a": 1}, resume)
        writer.write(8, {"loss": jnp.float32(2), "load": [1.0, float("nan")]})
        writer.close()
    assert ({"loss": 2.0}, 8) in calls and calls[-1] == "finished"
    first, loss = {"file_version": "brain.Event:2"}, {"step": 8, "summary": ("loss", 2.0)}
    assert events == [first, loss, "closed", first, {"step": 8, "session_log": "START"}, loss, "closed"]
    assert read_jsonl(tmp_path / "metrics.jsonl")[-1]["load"] == [1.0, None]
    assert inits[0]["mode"] == "offline" and inits[0]["id"] == inits[1]["id"]
    assert (inits[0]["project"], inits[0]["name"], inits[0]["config"]) == ("jaxfb", tmp_path.name, {"a": 1})


def test_pending_is_one_step_behind():
    pending = Pending()
    assert pending.push(1, {"loss": jnp.float32(1)}) is None
    step, metrics = pending.push(2, {"loss": jnp.float32(2)})
    assert step == 1 and isinstance(metrics["loss"], np.ndarray | np.float32) and metrics["loss"] == 1
    assert pending.flush()[0] == 2 and pending.flush() is None


def test_scalars_flattens_what_is_one_number():
    metrics = {"loss": jnp.float32(3), "terms": {"lm": Sum(jnp.float32(6), jnp.float32(2))}, "max": Max(2)}
    metrics |= {"last": Last(jnp.float32(5)), "leaves": jnp.zeros(3, bool), "skipped": np.bool_(True)}
    expected = {"loss": 3.0, "terms/lm": 3.0, "max": 2, "last": 5.0, "skipped": True}
    assert scalars(metrics) == expected


def test_arrays_are_lists_and_their_extremes():
    metrics = {"load": Sum(jnp.array([[1, 2], [6, 3]]), jnp.full((2, 2), 2.0)), "loss": jnp.float32(3)}
    parts = {"load/min": 0.5, "load/mean": 1.5, "load/max": 3.0}
    assert arrays(metrics) == {"load": [[0.5, 1.0], [3.0, 1.5]], **parts}


def test_throughput_forgets_compilation_and_pauses():
    now = [0.0]
    meter = Throughput(window=2, clock=lambda: now[0])
    assert meter.tokens_per_second is None and meter.seconds_left(10) is None
    meter.start(0)
    assert (
        meter.tokens_per_second is None and meter.seconds_per_step is None and meter.seconds_left(10) is None
    )
    for step, seconds in [(1, 60), (2, 1), (3, 1)]:
        now[0] += seconds
        meter.update(step, tokens=100)
    assert meter.tokens_per_second == 100 and meter.seconds_left(10) == 7
    now[0] += 1000
    meter.start(3)
    now[0] += 2
    meter.update(4, tokens=100)
    assert meter.tokens_per_second == 50


@pytest.mark.parametrize("live", [False, True])
def test_progress(live):
    stream = io.StringIO()
    record = {"loss": 3.21, "learning_rate": 3e-3, "grad_norm": 0.5, "tokens_per_second": 11402.0}
    with Progress(total=400, stream=stream, live=live) as progress:
        progress.update(100, record, seconds_left=65)
        progress.update(101, record, line=False)
        progress.say("held-out loss 3.3 [nats]")
    text = stream.getvalue()
    assert "100/400" in text or live
    assert "held-out loss 3.3 [nats]" in text and "loss 3.2100" in text and "tokens/s 11,402" in text
    if not live:
        assert text.splitlines()[0].endswith("eta 0:01:05") and len(text.splitlines()) == 2
    assert summary({"loss": None}) == ""


def test_print_table(capsys):
    print_table("config", [("model.num_layers", 4), ("schedule", None)])
    assert capsys.readouterr().out == "config\n  model.num_layers  4\n  schedule\n"


@pytest.fixture
def drawn(monkeypatch):
    """The panels of each picture that is saved: {label: points of the line}."""
    from matplotlib.figure import Figure

    pictures, save = [], Figure.savefig

    def kept(figure, path):
        pictures.append(
            [{x.get_label(): x.get_xydata().tolist() for x in a.get_lines()} for a in figure.axes]
        )
        save(figure, path)

    monkeypatch.setattr(Figure, "savefig", kept)
    return pictures


def test_plot_losses(tmp_path, drawn):
    writer = make_writers((), tmp_path, {})
    for step in range(1, 41):
        writer.write(step, {"loss": 6 / step**0.2 if step != 7 else float("nan"), "learning_rate": 1e-3})
        if step % 20 == 0:
            writer.write(step, {"eval/loss": 6 / step**0.18})
    writer.close()
    path = plot_losses(tmp_path / "metrics.jsonl", tmp_path / "loss.png", {"unigram": 6.5, "bigram": 4.5})
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000
    (losses, rate) = drawn[0]
    assert losses["train"] == [[step, 6 / step**0.2] for step in range(1, 41) if step != 7]
    assert losses["held out (last 3.089)"] == [[step, 6 / step**0.18] for step in (20, 40)]
    assert [[[0, 4.5], [1, 4.5]] in losses.values(), [[0, 6.5], [1, 6.5]] in losses.values()] == [True, True]
    assert list(rate.values()) == [[[step, 1e-3] for step in range(1, 41)]]
    with pytest.raises(ValueError, match="no loss to draw"):
        plot_losses(tmp_path / "none.jsonl", tmp_path / "none.png")


def test_a_smoothed_line_does_not_lag_behind(tmp_path, drawn):
    """A straight one stays as it is, to both ends; one outlier is spread over its two neighbours too."""
    for name, outlier in (("straight", 0), ("bent", 3)):
        writer = make_writers((), tmp_path / name, {})
        for step in range(1, 51):
            writer.write(step, {"loss": 100 - step + outlier * (step == 20)})
        writer.close()
        plot_losses(tmp_path / name / "metrics.jsonl", tmp_path / "loss.png")
    straight, bent = (np.array(picture[0]["train, smoothed"]) for picture in drawn)
    np.testing.assert_allclose(straight[:, 1], 100 - straight[:, 0])
    np.testing.assert_allclose((bent - straight)[[17, 18, 19, 20, 21], 1], [0, 1, 1, 1, 0], atol=1e-12)


def test_plot_policy_draws_every_run_and_those_that_were_not_evaluated(tmp_path, drawn):
    paths = []
    for seed, accuracies in enumerate([(0.25, 0.75), (), (0.5, 1.0)]):
        writer = make_writers((), tmp_path / str(seed), {})
        for step in (1, 2):
            writer.write(step, {"reward": seed + step / 10, "policy_entropy": 2.0 - seed})
            for accuracy in accuracies[step - 1 : step]:
                writer.write(step, {"eval/accuracy": accuracy})
        writer.close()
        paths.append(tmp_path / str(seed) / "metrics.jsonl")
    plot_policy(paths, tmp_path / "policy.png")
    shares, entropies = drawn[0]
    assert shares["reward of a rollout"] == [[1, 0.1], [2, 0.2]]
    assert [[1, 1.1], [2, 1.2]] in shares.values() and [[1, 2.1], [2, 2.2]] in shares.values()
    assert shares["held-out accuracy, 0.25 to 0.75"] == [[1, 0.25], [2, 0.75]]
    assert shares["held-out accuracy, 0.50 to 1.00"] == [[1, 0.5], [2, 1.0]]
    assert sorted(line[0][1] for line in entropies.values()) == [0, 1, 2]
    with pytest.raises(ValueError, match="no eval/accuracy to draw"):
        plot_policy(paths[1:2], tmp_path / "none.png")


def test_callbacks_run_in_order_on_every_hook():
    heard = []

    class Recorder(Callback):
        def on_eval(self, step, metrics):
            heard.append(("class", step))

    both = combine([Recorder(), callback(on_eval=lambda step, metrics: heard.append(("function", step)))])
    both.on_eval(3, {})
    both.on_train_start(None)
    assert heard == [("class", 3), ("function", 3)]
    assert all(callable(getattr(both, hook)) for hook in HOOKS)
    with pytest.raises(ValueError, match="no hook on_stepend; use one of"):
        callback(on_stepend=print)
    with pytest.raises(ValueError, match="lacks on_train_start"):
        combine([print])


def test_json_has_null_for_what_is_not_finite():
    values = {"a": [1.5, math.nan, (math.inf,)], "b": {"c": -math.inf, "d": "text", "e": 1, "f": True}}
    found = {"a": [1.5, None, [None]], "b": {"c": None, "d": "text", "e": 1, "f": True}}
    assert json.loads(strict_json(values), parse_constant=pytest.fail) == found


def test_records_with_nan_of_another_program_do_not_keep_a_run_from_resuming(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": NaN}\n')
    make_writers((), tmp_path, {}, resume=1).close()
    assert read_jsonl(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": None}]
