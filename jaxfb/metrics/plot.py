"""A picture of a run out of its metrics file: the losses, what to beat, and the learning rate below."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxfb.metrics.writers import read_jsonl
from jaxfb.refusal import Refused

TRAIN, HELD_OUT, RATE, INK, GREY = "#9ec1e6", "#d1495b", "#2e6f95", "#333333", "#8a8a8a"


def plot_losses(
    metrics_path: str | Path, png_path: str | Path, baselines: Mapping[str, float] | None = None
) -> Path:
    """Draws train and held-out loss, baselines as dashed lines, and the learning rate in a panel below.

    Args:
      metrics_path: a metrics.jsonl with "loss", "eval/loss" and "learning_rate".
      png_path: the picture; its suffix chooses the format (png, svg, pdf).
      baselines: name -> nats a token, such as {"unigram": 6.9, "bigram": 4.9}.
    Raises:
      ValueError: the file holds no loss, or matplotlib (the extra "plot") is missing.
    """
    records = read_jsonl(metrics_path)
    train, held_out = _series(records, "loss"), _series(records, "eval/loss")
    if not train[0] and not held_out[0]:
        raise Refused(
            f"[plot] {metrics_path} contains no loss to draw; train first (every log.every updates one is written)"
        )
    figure, losses, rate = _panels()
    _draw_losses(losses, train, held_out, dict(baselines or {}))
    rate.plot(*_series(records, "learning_rate"), color=RATE, linewidth=1.5)
    rate.set(ylabel="learning rate", xlabel="update", ylim=(0, None))
    rate.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    figure.savefig(png_path)
    return Path(png_path)


def plot_policy(metrics_paths: Iterable[str | Path], png_path: str | Path) -> Path:
    """Draws reward of the rollouts and held-out accuracy by update, one thin line a run, and the entropy below.

    Args:
      metrics_paths: metrics.jsonl of one run, or of several seeds.
      png_path: the picture.
    Raises:
      ValueError: no accuracy was measured, or matplotlib is missing.
    """
    runs = [read_jsonl(path) for path in metrics_paths]
    held_out = [_series(records, "eval/accuracy") for records in runs]
    if not any(steps for steps, _ in held_out):
        raise Refused("[plot] there is no eval/accuracy to draw; it is written at each evaluation")
    figure, accuracy, entropy = _panels()
    for number, (records, series) in enumerate(zip(runs, held_out, strict=True)):
        first = number == 0
        accuracy.plot(
            *_series(records, "reward"),
            color=TRAIN,
            linewidth=1,
            label="reward of a rollout" if first else None,
        )
        if series[0]:  # a run may have ended before its first evaluation
            label = f"held-out accuracy, {series[1][0]:.2f} to {series[1][-1]:.2f}"
            accuracy.plot(*series, color=HELD_OUT, linewidth=1.8, marker="o", markersize=3, label=label)
        entropy.plot(*_series(records, "policy_entropy"), color=RATE, linewidth=1)
    accuracy.set(ylabel="share solved", ylim=(0, 1.02))
    accuracy.legend(frameon=False, labelcolor=INK, loc="upper left")
    entropy.set(ylabel="entropy (nats)", xlabel="update", ylim=(0, None))
    figure.savefig(png_path)
    return Path(png_path)


def draw_or_say(draw: Callable[[], Any], say: Callable[[str], None]) -> None:
    """Draws a picture of a run that is trained, or tells `say` why there is none: the run has ended well all the same.

    matplotlib may be installed wrongly, or configured by its user (matplotlibrc, MPLBACKEND) so that it cannot draw.

    Raises:
      OSError: the picture cannot be written.
    """
    try:
        draw()
    except OSError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        say(f"[plot] no picture of the run, since matplotlib failed ({type(error).__name__}: {reason})")


def _panels() -> tuple[Any, Any, Any]:
    """Returns a figure and its two panels, the large one above."""
    # The object interface, not pyplot: no window system, no global state in a user's notebook.
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise Refused("[plot] a picture needs matplotlib; pip install 'jaxfb[plot]'") from None
    figure = Figure(figsize=(8, 5.6), dpi=150, layout="constrained")
    panels = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
        axes.set_axisbelow(True)
    return figure, *panels


def _draw_losses(axes: Any, train, held_out, baselines: dict[str, float]) -> None:
    axes.plot(*train, color=TRAIN, linewidth=1, label="train")
    axes.plot(*_smoothed(*train), color=RATE, linewidth=1.8, label="train, smoothed")
    last = f" (last {held_out[1][-1]:.3f})" if held_out[1] else ""
    axes.plot(*held_out, color=HELD_OUT, linewidth=1.8, marker="o", markersize=4, label=f"held out{last}")
    for name, value in baselines.items():
        axes.axhline(value, color=GREY, linestyle="--", linewidth=1.1)
        axes.annotate(f"{name} {value:.3f}", (1, value), xycoords=("axes fraction", "data"), color=GREY,
                      ha="right", va="bottom", fontsize=9)  # fmt: skip
    axes.set(ylabel="loss (nats per token)")
    axes.legend(frameon=False, labelcolor=INK)


def _series(records: list[dict], name: str) -> tuple[list[int], list[float]]:
    points = [(r["step"], r[name]) for r in records if r.get(name) is not None and "step" in r]
    return [step for step, _ in points], [value for _, value in points]


def _smoothed(steps: list[int], values: list[float], share: float = 0.02) -> tuple[list[int], list[float]]:
    """Returns mean over about `share` of the points on either side, fewer at the ends: it does not lag behind."""
    reach = round(share * len(values))
    spans = [min(reach, k, len(values) - 1 - k) for k in range(len(values))]
    return steps, [sum(values[k - r : k + r + 1]) / (2 * r + 1) for k, r in enumerate(spans)]
