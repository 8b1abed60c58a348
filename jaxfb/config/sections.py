"""The sections of a training config that define one update: frozen dataclasses, each checked alone. Plain Python.

Comes before all other steps: everything after it receives these as arguments. The section `model` is in `model.py`,
those of a run's operation (checkpoints, records, hosts) in `operation.py`, `data` beside the code that reads it
(`jaxfb.data.config`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from jaxfb.batch_plan.ramp_up import as_ramp_up
from jaxfb.config.checks import (
    at_least_zero,
    directory_is_named,
    expand_home,
    one_length,
    positive,
    seed_in_range,
)
from jaxfb.models.layout import stages_of
from jaxfb.parts import LEARNING_RATES, OPTIMIZERS
from jaxfb.refusal import Refused, shown
from jaxfb.schedules import check_name
from jaxfb.shared_options import Float, LayoutOptions, Normalization, OptimizerSharding, PrecisionOptions

Number = int | float | bool | str | None
LENGTHS = ("updates", "samples", "tokens", "epochs")


@dataclass(frozen=True)
class BatchConfig:
    """The rows of one update over all replicas, cut by rows_per_microbatch (on each) or num_microbatches.

    rows:      rows of one update, over all replicas.
    rows_per_microbatch: rows of one microbatch, on each replica; null: follows from num_microbatches.
    num_microbatches: microbatches of one update; null: follows from rows_per_microbatch.
    remainder: rows that do not fill their microbatches: "error" refuses them, "pad" adds rows of weight 0,
               "drop" leaves them out.
    normalize: "global" divides each term by its weight over all rows; "microbatch" and "none" are Megatron's
               mean of means and plain sums.
    ramp_up:   rows of an update by consumed rows, such as "0:16 10K:32"; the last is `rows`.
    """

    rows: int
    rows_per_microbatch: int | None = None
    num_microbatches: int | None = None
    remainder: Literal["error", "pad", "drop"] = "error"
    normalize: Normalization = "global"
    ramp_up: str | None = None

    def __post_init__(self):
        positive("batch", rows=self.rows)
        as_ramp_up(self.ramp_up)
        positive(
            "batch", rows_per_microbatch=self.rows_per_microbatch, num_microbatches=self.num_microbatches
        )
        if self.rows_per_microbatch is None and self.num_microbatches is None:
            raise Refused(
                "[batch] needs rows_per_microbatch or num_microbatches; use rows_per_microbatch=1",
                [{"rows_per_microbatch": 1}],
            )


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation on held-out rows, every `every` updates and at the end (null: at the end only).

    every: evaluates after each so many updates; null: at the end only.
    rows:        rows of one evaluation batch; null takes those of `batch`.
    rows_per_microbatch: rows of one microbatch of an evaluation batch, on each replica; null takes those of `batch`.
    batches:     at most so many evaluation batches; null takes all held-out rows.
    prompt:      a text of which the model prints a continuation at the end of the run; if empty, none is printed.
    tokens:      length of that continuation.
    temperature: temperature at which that continuation is sampled; 0 takes the likeliest token.
    """

    every: int | None = None
    rows: int | None = None
    rows_per_microbatch: int | None = None
    batches: int | None = None
    prompt: str = ""
    tokens: int = 128
    temperature: float = 0.8

    def __post_init__(self):
        positive("eval", every=self.every, rows=self.rows, rows_per_microbatch=self.rows_per_microbatch)
        positive("eval", batches=self.batches, tokens=self.tokens)
        at_least_zero("eval", temperature=self.temperature)


@dataclass(frozen=True)
class AnyRunConfig:
    """Gives the run's directory, its seed, and what may end it early.

    dir:           the run's directory: checkpoints, records, config.
    seed:          seed of parameters, dropout and all else that is drawn without another seed.
    max_nonfinite: end the run after so many updates in a row with gradients that are not finite; null: never.
    minutes:       end after the update in progress when so many have passed, saved and to be resumed; null: never.
    stop_at:       end after this update of the run, saved and to be resumed; learning rate and weight decay still
                   follow the length of the run.
    """

    dir: str
    seed: int = 0
    max_nonfinite: int | None = 10
    minutes: float | None = None
    stop_at: int | None = None

    def __post_init__(self):
        positive("run", max_nonfinite=self.max_nonfinite, minutes=self.minutes, stop_at=self.stop_at)
        seed_in_range("run", self.seed)
        directory_is_named("run", self.dir)
        expand_home(self, "dir")


@dataclass(frozen=True)
class RunConfig(AnyRunConfig):
    """Gives the run's length (exactly one of updates, samples, tokens, epochs), its seed and its directory.

    updates:       the length in updates.
    samples:       the length in rows.
    tokens:        the length in tokens: data.sequence_length for each row.
    epochs:        the length in passes through the data; a fraction is legal.
    remainder:     a last update of an epoch or of the run with too few rows: "pad" fills it up with rows of
                   zeros, which a loss of your own must not count, "drop" leaves it out, "error" refuses it.
    skip_updates:  numbers of updates, counted from 1, that consume their rows and change nothing.
    """

    updates: int | None = None
    samples: int | None = None
    tokens: int | None = None
    epochs: float | None = None
    remainder: Literal["error", "pad", "drop"] = "pad"
    skip_updates: tuple[int, ...] = ()

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "skip_updates", tuple(self.skip_updates))
        for number in self.skip_updates:
            positive("run", skip_updates=number)
        given = {name: getattr(self, name) for name in LENGTHS if getattr(self, name) is not None}
        positive("run", **given)
        one_length("run", LENGTHS, given, {"updates": 1000})


@dataclass(frozen=True)
class OptimizerConfig:
    """The arguments of `jaxfb.make_optimizer`, the clipping before it and where its state lives.

    learning_rate: the peak of the learning rate; the section `lr` sets its course over the run.
    name:          the optimizer.
    weight_decay_initial: the weight decay at the start; null: `weight_decay`.
    weight_decay_ramp: the course of the weight decay over the run.
    weight_decay:  the weight decay at the end of the run; it changes from `weight_decay_initial` to this value along
                   `weight_decay_ramp`.
    options:       further arguments of the optimizer, such as b1, b2, eps.
    max_grad_norm: global norm to clip to; null does not clip.
    clip:          "exact" divides by the norm, "torch" by the norm + 1e-6, as torch and Megatron do.
    sharding:      "data" cuts the state over the data replicas too (ZeRO-1), "gradients" the sum of gradients as
                   well (ZeRO-2: a reduce-scatter in every microbatch); "none" does neither.
    memory:        "host" keeps the state in the host's memory; each update moves it through the devices, layer by
                   layer for adamw, lion, muon and sgd: less memory, more time (docs/parallelism.md).
    """

    learning_rate: float
    name: Annotated[str, OPTIMIZERS] = "adamw"
    weight_decay: float = 0.1
    weight_decay_initial: float | None = None
    weight_decay_ramp: Literal["constant", "linear", "cosine"] = "constant"
    options: dict[str, Number] = field(default_factory=dict)
    max_grad_norm: float | None = 1.0
    clip: Literal["exact", "torch"] = "exact"
    sharding: OptimizerSharding = "none"
    memory: Literal["device", "host"] = "device"

    def __post_init__(self):
        positive("optimizer", learning_rate=self.learning_rate, max_grad_norm=self.max_grad_norm)
        at_least_zero("optimizer", weight_decay=self.weight_decay)
        ramps = self.weight_decay_initial not in (None, self.weight_decay)
        if ramps and self.weight_decay_ramp == "constant":
            raise Refused(
                f"[optimizer] weight_decay from {self.weight_decay_initial} to {self.weight_decay} is not "
                "constant; use weight_decay_ramp=linear or cosine",
                [{"weight_decay_ramp": "linear"}, {"weight_decay_ramp": "cosine"}],
            )


@dataclass(frozen=True)
class LearningRateConfig:
    """The arguments of `jaxfb.lr_schedule` other than the peak, which is `optimizer.learning_rate`.

    name:          the course of the rate after the warmup.
    warmup:        length of the warmup, in `unit`.
    total:         length of the whole course, warmup included, in `unit`; null: the length of the run.
    warmup_shape:  the course of the rate during the warmup.
    initial:       the rate of the first update of a warmup.
    final:         the rate at the end.
    unit:          what warmup and total count: updates, or rows ("samples").
    options:       further arguments of one schedule, such as decay and tail of wsd.
    """

    name: Annotated[str, LEARNING_RATES] = "cosine"
    warmup: int = 0
    warmup_shape: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "linear"
    initial: float = 0.0
    final: float = 0.0
    total: int | None = None
    unit: Literal["updates", "samples"] = "updates"
    options: dict[str, Number] = field(default_factory=dict)

    def __post_init__(self):
        at_least_zero("lr", warmup=self.warmup, initial=self.initial, final=self.final)
        positive("lr", total=self.total)


@dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh axes (pp, dp, ep, cp, tp for short); one may be -1 and takes all remaining devices.

    Parameters and optimizer state are stored in shards over fsdp, expert and context together; parallel.fsdp_gather
    applies to all three.

    pipe:    devices that the layers are spread over, as stages of a pipeline.
    data:    replicas that the rows are divided among, each with a whole copy of the parameters.
    fsdp:    replicas that the rows are divided among, with the parameters cut over them.
    expert:  replicas that the rows are divided among, with the experts of each layer cut over them.
    context: parts that each sequence is cut into.
    tensor:  parts that each layer's matrices are cut into.
    """

    pipe: int = 1
    data: int = -1
    fsdp: int = 1
    expert: int = 1
    context: int = 1
    tensor: int = 1

    def __post_init__(self):
        filled = [name for name, size in vars(self).items() if size == -1]
        positive("mesh", **{name: size for name, size in vars(self).items() if size != -1})
        if len(filled) > 1:
            raise Refused(
                f"[mesh] only one size may be -1 (all remaining devices), got {', '.join(filled)}; "
                f"give {' and '.join(f'mesh.{name}' for name in filled[:-1])} a number",
                [dict.fromkeys(filled[:-1], 1)],
            )

    @classmethod
    def of_word(cls, word: str) -> MeshConfig:
        """Refuses a word in place of the sizes, in the jobs that do not declare `AutoMesh` beside this class."""
        if word == AutoMesh.WORD:
            raise Refused(
                f"[mesh] mesh={word} is for `jaxfb train` and `jaxfb plan` of a built-in model; give sizes, such as "
                "mesh.data=-1"
            )
        raise Refused(f"[mesh] mesh={shown(word)} must be sizes, such as mesh.data=-1")


@dataclass(frozen=True)
class AutoMesh(MeshConfig):
    """The word `auto` instead of sizes: `jaxfb train` and `jaxfb plan` take the fastest layout that fits by the
    planner's formula, and print it (docs/planner.md). What the config gives of a layout stays: rows a microbatch, and
    remat, fsdp_gather, schedule and chunks where they are not their defaults.
    """

    WORD: ClassVar[str] = "auto"

    @classmethod
    def accepts(cls, values: Any) -> bool:
        """Tells whether what stands in place of a section is meant for this class."""
        return isinstance(values, str)

    @classmethod
    def of_word(cls, word: str) -> AutoMesh:
        """Returns the section that the word stands for; refuses any other."""
        if word != cls.WORD:
            raise Refused(
                f"[mesh] mesh={shown(word)} must be sizes, such as mesh.fsdp=8, or the word {cls.WORD}",
                [{"mesh": cls.WORD}],
            )
        return cls()


@dataclass(frozen=True)
class PrecisionConfig(PrecisionOptions):
    """Master params are float32, or float64 with compute_dtype=float64.

    compute_dtype: params are cast to it once an update, before the microbatch loop.
    frozen_dtype: dtype of parameters that are not trained, in memory and in checkpoints; null: as the others. They are
                  never updated, so bfloat16 loses nothing if they were 16-bit numbers to begin with.
    loss_scale: "auto" is dynamic for float16 and none otherwise; a number is a scale that never changes.
    """

    compute_dtype: Float = "float32"
    frozen_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    loss_scale: Literal["auto", "none", "dynamic"] | float = "auto"

    def __post_init__(self):
        if not isinstance(self.loss_scale, str):
            positive("precision", loss_scale=self.loss_scale)


@dataclass(frozen=True)
class ParallelConfig(LayoutOptions):
    """Settings of how the work is laid out, never of what is computed. The last three apply to a pipeline.

    layers_per_stage: the layers of each of the mesh.pipe * chunks stages, where they do not divide evenly: a list
                 of numbers (of periods, with a pattern), or a layout such as "Ett|tt|tttL" (docs/pipeline.md), which
                 counts layers.
    pieces:      equal pieces of each sequence that go through the pipeline one after the other (schedule seq1f1b or
                 seq_abreast): with few microbatches of long sequences stages wait less, and keep less.
    """

    SECTION: ClassVar[str] = "[parallel]"

    layers_per_stage: tuple[int, ...] | str | None = None
    pieces: int = 1

    def __post_init__(self):
        super().__post_init__()
        positive("parallel", pieces=self.pieces)
        if self.layers_per_stage == ():
            raise Refused(
                "[parallel] layers_per_stage=[] has no stage; use layers_per_stage=null for stages of equal length",
                [{"layers_per_stage": None}],
            )
        if isinstance(self.layers_per_stage, str):
            stages_of(self.layers_per_stage)


def check_pipeline(mesh: MeshConfig, schedule: str | None, chunks: int) -> None:
    """Refuses a schedule that does not exist, and a schedule or chunks where there is no pipeline."""
    positive("config", chunks=chunks)
    if schedule is not None:
        check_name(schedule)
    if isinstance(mesh, AutoMesh):
        return
    if mesh.pipe == 1 and (schedule is not None or chunks != 1):
        given = [f"schedule={schedule}"] * (schedule is not None) + [f"chunks={chunks}"] * (chunks != 1)
        are, them = ("is a setting", "it") if len(given) == 1 else ("are settings", "both")
        raise Refused(
            f"[config] {' and '.join(given)} {are} of a pipeline, but mesh.pipe=1; use mesh.pipe=2, or leave "
            f"{them} out",
            [{"mesh.pipe": 2}, {"schedule": None, "chunks": 1}],
        )
