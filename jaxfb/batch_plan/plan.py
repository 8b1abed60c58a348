"""Cuts one update (or one evaluation batch) by arithmetic: rows -> microbatches -> replicas.

Part of the batch-plan step: rows = data_parallel * rows_per_microbatch * num_microbatches, decided once,
checked here, and read by everything after it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

from jaxfb.batch_plan.budget import BUDGET, NO_BUDGET, check_budget, shapes
from jaxfb.batch_plan.fit import SIZES, misfit, solve
from jaxfb.batch_plan.refusal import (
    PlanError,
    around,
    not_negative,
    offer,
    one_of,
    positive_int,
    positive_ints,
    true_or_false,
)
from jaxfb.refusal import only_legal, shown, with_nearest_keyword

Purpose = Literal["train", "critic", "logprob_old", "logprob_ref", "value", "eval"]
Remainder = Literal["error", "pad", "drop"]
PURPOSES: tuple[str, ...] = get_args(Purpose)
REMAINDERS: tuple[str, ...] = get_args(Remainder)
UPDATES = ("train", "critic")  # purposes of calls that make gradients

_DERIVED: Any = None  # of a size that follows from the others where it is not given

_BUDGET_SIZES = ("max_tokens_per_microbatch", "sequence_length", "max_context")
_FOR_EACH_ROW = ("logprob_old", "logprob_ref", "value")

_ELSEWHERE = {
    **dict.fromkeys(("batch_size", "global_batch_size"), "rows"),
    **dict.fromkeys(("micro_batch_size", "microbatch_size"), "rows_per_microbatch"),
    **dict.fromkeys(("accumulation_steps", "gradient_accumulation_steps"), "num_microbatches"),
}
"""What other trainers call a size -> the argument of `BatchPlan`."""

_SIZE_KEY = re.compile(r"batch_size|num_micro|per_micro|accumulation_steps|max_token_len|data_parallel")


@dataclass(frozen=True)
class BatchPlan:
    """Cuts the rows of one update into replicas x microbatches x rows. Frozen, hashable, one per purpose.

    Give two of `rows`, `rows_per_microbatch` and `num_microbatches`: the third is derived and filled in;
    given all three, they must agree. Microbatch m is rows [m*dp*b, (m+1)*dp*b) of the global batch, and
    replica d takes the d-th b rows inside it: contiguous, as in Megatron-LM.

    Or give `rows` and `max_tokens_per_microbatch`: then the lengths of the rows decide how many microbatches
    there are, `rows_per_microbatch` and `num_microbatches` stay None, and `jaxfb.batch_plan.arrange` makes a
    plan with both for the lengths at hand (the engine calls it).

    Args:
      purpose: which call may use this plan: train, critic (the update of a policy's value model), logprob_old,
        logprob_ref, value or eval.
      rows: rows of one update over all replicas (G); real rows, padding not counted.
      rows_per_microbatch: rows of one microbatch on one replica (b).
      data_parallel: number of replicas = data * fsdp * expert of the mesh (dp).
      num_microbatches: microbatches of one update on each replica (M).
      max_tokens_per_microbatch: instead of b, the most tokens (padding included) that one microbatch has on
        one replica. Strict: nothing is ever above it.
      sequence_length: with a budget, the longest row that may come.
      widths: with a budget, the widths that rows are padded to, rising to at least sequence_length; each
        compiles the program again. None: quarters of sequence_length.
      packing: with a budget, put several rows into one array row, distinguished by `segments`.
      max_context: with a budget, the size of the mesh's context axis, if rows of each width are to be cut over as few
        of its devices as hold them: the budget is then that of a microbatch cut over all of them, and one cut over
        fewer has as many tokens a device. See `group_by_context`. None: every row is cut over the whole axis.
      multiple_of: num_microbatches must be a multiple of it (interleaved pipelines ask for that).
      remainder: what happens when rows % (dp*b) != 0: "error" refuses, "pad" adds rows of zeros at the end, "drop"
        rounds the rows of an update down (Megatron's decrease_batch_size_if_needed). A loss function must give rows of
        zeros the weight 0, which is checked, and leave them out of its metrics, which is not. What divides by 0 for
        such a row, or takes the norm of zeros, makes the gradient NaN even where `jnp.where(mask, ...)` hides its
        value: replace the 0 before, x / jnp.where(mask, size, 1). A pass whose outputs are wanted for every row
        (logprob_old, logprob_ref, value) cannot drop any.

    Raises:
      PlanError: a ValueError naming the values, the arithmetic and, in `.choices`, the nearest legal changes.
    """

    purpose: Purpose = "train"
    _: KW_ONLY
    rows: int = _DERIVED
    rows_per_microbatch: int = _DERIVED
    data_parallel: int = 1
    num_microbatches: int = _DERIVED
    max_tokens_per_microbatch: int | None = None
    multiple_of: int = 1
    remainder: Remainder = "error"
    sequence_length: int | None = None
    widths: tuple[int, ...] | None = None
    packing: bool = False
    max_context: int | None = None

    def __post_init__(self) -> None:
        one_of("plan", "purpose", self.purpose, PURPOSES)
        one_of(self.purpose, "remainder", self.remainder, REMAINDERS)
        _check_exclusive(self)
        for name in (*SIZES, "data_parallel", "multiple_of", *_BUDGET_SIZES):
            if (value := getattr(self, name)) is not None or name in ("data_parallel", "multiple_of"):
                object.__setattr__(self, name, positive_int(self.purpose, name, value))
        true_or_false(self.purpose, "packing", self.packing)
        if self.widths is not None:
            object.__setattr__(self, "widths", positive_ints(self.purpose, "widths", self.widths))
        _check_given(self)
        object.__setattr__(self, "widths", check_budget(self))
        if self.by_tokens:
            return
        given = self.to_dict()
        _check_all_rows_come_back(given)
        sizes = solve(given)
        if sizes is None:
            raise misfit(given)
        for name, value in zip(SIZES, sizes, strict=True):
            object.__setattr__(self, name, value)

    @property
    def by_tokens(self) -> bool:
        """Returns whether a token budget cuts the rows, so that the microbatches follow from their lengths."""
        return self.max_tokens_per_microbatch is not None

    @property
    def rows_per_global_microbatch(self) -> int:
        """Returns the rows of one microbatch over all replicas: dp * b."""
        if self.by_tokens:
            raise self._no_cut()
        return self.data_parallel * self.rows_per_microbatch

    @property
    def padded_rows(self) -> int:
        """Returns the rows that are computed, dp * b * M: more than `rows` when padded, fewer when dropped."""
        return self.rows_per_global_microbatch * self.num_microbatches

    @property
    def real_rows(self) -> int:
        """Returns the rows of data that one full update consumes: `rows`, or fewer with remainder="drop"."""
        return self.rows if self.by_tokens else min(self.rows, self.padded_rows)

    @property
    def padding_rows(self) -> int:
        """Returns the number of rows of weight 0 at the end of the last microbatch."""
        return self.padded_rows - self.real_rows

    def rows_of(self, microbatch: int, replica: int) -> range:
        """Returns the rows of the (padded) global batch that `replica` computes in `microbatch`."""
        if self.by_tokens:
            raise self._no_cut()
        microbatch = not_negative(self.purpose, "microbatch", microbatch)
        replica = not_negative(self.purpose, "replica", replica)
        if not (0 <= microbatch < self.num_microbatches and 0 <= replica < self.data_parallel):
            raise PlanError(
                f"[{self.purpose}] no microbatch {microbatch} on replica {replica}: there are "
                f"{self.num_microbatches} microbatches on {self.data_parallel} replicas, counted from 0"
            )
        start = (microbatch * self.data_parallel + replica) * self.rows_per_microbatch
        return range(start, start + self.rows_per_microbatch)

    def replace(self, **changes: Any) -> BatchPlan:
        """Returns a new plan with some arguments changed; what follows from them is derived again, `rows` stays."""
        names = [f.name for f in dataclasses.fields(self)]
        for name in changes:
            one_of(self.purpose, "argument", name, names)
        derived = "num_microbatches" if changes.get("num_microbatches") is None else "rows_per_microbatch"
        return dataclasses.replace(self, **{derived: None, **changes})

    def shapes(self) -> tuple[tuple[int, int, int], ...]:
        """Returns every (width, rows_per_microbatch, num_microbatches) that a token budget can lead to.

        So many programs are compiled at most; with max_context, each once for every number of devices that rows of
        the width may be cut over.
        """
        return shapes(self) if self.by_tokens else ()

    def require(self, *purposes: Purpose, caller: str = "forward_backward") -> None:
        """Raises ValueError if the plan was not made for one of these purposes."""
        for purpose in purposes:
            one_of(caller, "purpose", purpose, PURPOSES)
        if self.purpose not in purposes:
            wanted = " or ".join(f'plans["{purpose}"]' for purpose in purposes)
            size = (
                f"{self.max_tokens_per_microbatch} tokens"
                if self.by_tokens
                else f"{self.rows_per_microbatch} rows"
            )
            own = f'"{self.purpose}" ({size} per microbatch)'
            raise PlanError(f"{caller} got plan {own}; pass {wanted}")

    def check_rows(self, rows: int) -> int:
        """Refuses a batch of another size; returns the rows of weight 0 still to add (negative: to drop).

        Legal are `plan.rows` and, padded or dropped beforehand, `plan.padded_rows`.
        """
        rows = not_negative(self.purpose, "rows", rows)
        if self.by_tokens and rows == self.rows:
            return 0
        if self.by_tokens or rows not in (self.rows, self.padded_rows):
            short = self.rows - rows
            fix = f"add {short} rows of weight 0" if short > 0 else f"pass {-short} fewer"
            raise PlanError(f'plan "{self.purpose}" covers {self.rows} rows, batch has {rows}; {fix}')
        return self.padded_rows - rows

    def check_keys(self, names: Iterable[Any]) -> None:
        """Refuses batches with keys for sizes: the plan alone defines sizes, and checks them."""
        for name in filter(lambda name: isinstance(name, str), names):
            if _SIZE_KEY.search(name):
                raise PlanError(
                    f'batch["{name}"] is a size, which is given in the BatchPlan; leave it out of the batch'
                )

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields, for saving with a run; `BatchPlan(**plan.to_dict()) == plan`."""
        names = (f.name for f in dataclasses.fields(self))
        return {name: getattr(self, name) for name in names if self.by_tokens or name not in BUDGET}

    def fingerprint(self) -> str:
        """Returns 16 hex digits, equal for equal plans on any host, in any process, under any Python."""
        return fingerprint_of(self.to_dict())

    def _no_cut(self) -> PlanError:
        return PlanError(
            f'plan "{self.purpose}" is cut by tokens: its microbatches follow from the lengths of the rows; '
            "use arrange(plan, lengths).plan"
        )

    def summary(self) -> str:
        """Returns the plan in a line: "256 rows on 2 replicas: 2 microbatches of 64 rows each"."""
        rows = f"{self.rows} rows on {self.data_parallel} replica{'s' * (self.data_parallel > 1)}"
        if self.by_tokens:
            packing = ", packed" if self.packing else ""
            packing += f", each row on 1 to {self.max_context} context devices" if self.max_context else ""
            return (
                f"{rows}: at most {self.max_tokens_per_microbatch} tokens a microbatch{packing}, "
                f"in at most {len(self.shapes())} shapes"
            )
        padding = f", padded by {self.padding_rows}" if self.padding_rows > 0 else ""
        microbatches = f"{self.num_microbatches} microbatch{'es' * (self.num_microbatches > 1)}"
        size = f"{self.rows_per_microbatch} row{'s' * (self.rows_per_microbatch > 1)}"
        return f"{rows}: {microbatches} of {size}{' each' * (self.num_microbatches > 1)}{padding}"


# not a decorator, since the dataclass makes this function
BatchPlan.__init__ = with_nearest_keyword(_ELSEWHERE)(BatchPlan.__init__)


def data_parallel_size(devices: int, *, tensor: int = 1, pipe: int = 1, context: int = 1) -> int:
    """Returns the number of replicas, devices / (tensor * pipe * context), and refuses a remainder."""
    sizes = {"devices": devices, "tensor": tensor, "pipe": pipe, "context": context}
    devices, tensor, pipe, context = (positive_int("mesh", name, value) for name, value in sizes.items())
    model = tensor * pipe * context
    if devices % model:
        choices = [{"devices": count} for count in around(devices, model)]
        raise PlanError(
            f"{devices} device{'s' * (devices != 1)} cannot form tp {tensor} × pp {pipe} × cp {context} = {model}; "
            f"dp would be {devices / model:.2f}{offer(choices)}",
            choices,
        )
    return devices // model


def plans_by_purpose(who: str, plans: Any) -> Mapping[str, BatchPlan]:
    """Returns a read-only copy of `plans`, each of which must stand under its own purpose."""
    if not isinstance(plans, Mapping):
        raise PlanError(
            f'[{who}] plans must be {{purpose: BatchPlan}} with at least "train", got {shown(plans)}'
        )
    for purpose, plan in plans.items():
        one_of(f"{who}.plans", "purpose", purpose, PURPOSES)
        if not isinstance(plan, BatchPlan):
            raise PlanError(
                f'[{who}] plans["{purpose}"] must be a BatchPlan, got {shown(plan)}; leave it out'
            )
        plan.require(purpose, caller=f'[{who}] plans["{purpose}"]')
    if "train" not in plans:
        raise PlanError(f'[{who}.plans] needs a plan for "train", got {", ".join(plans) or "none"}')
    return MappingProxyType(dict(plans))


def fingerprint_of(values: Mapping[str, Any]) -> str:
    """Returns 16 hex digits of a dict of plain values, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(dict(values), sort_keys=True).encode()).hexdigest()[:16]


def _check_all_rows_come_back(given: Mapping[str, Any]) -> None:
    """Refuses to drop rows in passes whose log-probs or values are needed for every row."""
    if given["purpose"] not in _FOR_EACH_ROW or given["remainder"] != "drop":
        return
    padded = {**given, "remainder": "pad"}
    choices = [{"remainder": "pad"}]
    if solve(padded) is None:
        choices = [{"remainder": "pad", **choice} for choice in misfit(padded).choices]
    raise PlanError(
        f'[{given["purpose"]}] remainder="drop" may give outputs for fewer rows than the batch has'
        f"{offer(choices, 'remainder')}",
        choices,
    )


def _check_exclusive(plan: BatchPlan) -> None:
    """Checks that either a budget cuts the rows, or a number of rows or of microbatches."""
    budget = plan.max_tokens_per_microbatch
    cuts = {name: getattr(plan, name) for name in ("rows_per_microbatch", "num_microbatches")}
    for name, cut in cuts.items():
        if budget is None or cut is None:
            continue
        choices = only_legal(
            [dict.fromkeys(cuts), NO_BUDGET], lambda choice: dataclasses.replace(plan, **choice)
        )
        why = ": lengths decide how many there are" if name == "num_microbatches" else ""
        raise PlanError(
            f"[{plan.purpose}] {name}={shown(cut)} and max_tokens_per_microbatch={shown(budget)} are exclusive{why}; "
            "leave one of them out",
            choices,
        )


def _check_given(plan: BatchPlan) -> None:
    """Checks that enough is given."""
    budget = plan.max_tokens_per_microbatch
    missing = [name for name in SIZES if getattr(plan, name) is None]
    if len(missing) > 1 and not (budget and plan.rows):
        cuts = "rows_per_microbatch or num_microbatches, or max_tokens_per_microbatch"
        needs = cuts if plan.rows else "rows (all rows of one update)"
        raise PlanError(f"[{plan.purpose}] needs {needs}; nothing is inherited from another plan")
