"""Losses over per-token log-probs on a model cut for stages, wherever its vocabulary lives.

The bridge between a `Pipelined` model and a post-training loss: the model defines how hidden states become logits
(`Pipelined.unembed`), the loss what is made of log-probs and entropies. Tensor, pipeline and context parallelism,
and how the head is placed, are dealt with here and never seen by the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from jaxfb.losses.coupling import check_rows_uncoupled
from jaxfb.losses.sequences import Sequences, check_per_token
from jaxfb.losses.token_log_probs import check_temperature, token_log_probs
from jaxfb.losses.vocabulary.logits import IdRanges
from jaxfb.refusal import Refused, function_of, instance, integer, refuse
from jaxfb.types import LossOutput, Pipelined, Sum, Unembedding

# (unembedding, microbatch, axis) -> LossOutput; with an axis, the kernel's vocabulary is cut over it
UnembeddedLoss = Callable[[Unembedding, Mapping, "str | None"], "LossOutput | Sum"]
# (log_probs [rows, seq], entropy [rows, seq], microbatch) -> LossOutput
TokenLoss = Callable[[jax.Array, jax.Array, Mapping], "LossOutput | Sum"]


def policy_loss_fn(
    model: Pipelined, loss: TokenLoss, *, temperature: float = 1.0, absent_ids: IdRanges = ()
) -> Pipelined:
    """Replaces the loss of `model` by one over the log-probs and entropies of its targets.

    `loss(log_probs, entropy, microbatch)` receives float[rows, seq] arrays (float32 or wider, nats, 0 where
    `loss_mask` is 0; under context parallelism this device's tokens, so sums over a sequence go through
    `Sequences`), and returns sums over rows. `PolicyLoss` is such a loss. One that couples rows (a batch's mean, a
    top-k over the microbatch) is refused by a training call in more than one part: see `losses.coupling`.

    Make it once and keep it: every new object is compiled anew.

    Args:
      model: a Pipelined that offers `unembed`, such as `transformer(config)`.
      loss: see above.
      temperature: of the sampler whose policy this is; logits are divided by it.
      absent_ids: ranges (first, end) of ids that this sampler never draws, such as those that pad the vocabulary
        (`jaxfb.data.tokenizer.absent_ids`); their probability is 0.
    Returns:
      A Pipelined; its microbatches hold `targets` i32[rows, seq], `loss_mask` float[rows, seq], and what the
      embedding, the layers and the loss read.
    Raises:
      ValueError: the model offers no `unembed`, or temperature is not positive.
    """
    unembed_of(model)
    function_of("loss", loss, "(log_probs, entropy, microbatch)", who="[loss]")
    check_temperature(temperature)
    _check_ranges(absent_ids)

    def head_loss(unembedding: Unembedding, microbatch: Mapping, axis: str | None) -> LossOutput | Sum:
        _check_leaves(microbatch, ("loss_mask", "targets"))
        scores = token_log_probs(
            unembedding.hidden,
            unembedding.kernel if unembedding.table is None else unembedding.table,
            microbatch["targets"],
            microbatch["loss_mask"],
            chunk=unembedding.chunk,
            axis=axis,
            logit_softcap=unembedding.softcap,
            temperature=temperature,
            absent_ids=absent_ids,
        )
        return loss(scores.log_probs, scores.entropy, microbatch)

    def check(microbatch: Mapping, num_parts: int) -> None:
        _check_leaves(microbatch, ("loss_mask",))
        check_rows_uncoupled(loss, 2, microbatch, num_parts)

    return replace(with_head(model, head_loss), check=check)


def log_prob_fn(model: Pipelined, *, temperature: float = 1.0, absent_ids: IdRanges = ()) -> Pipelined:
    """Returns a model for `forward_only` passes that outputs the log-probs of its targets, and entropies.

    Its outputs are {"log_probs", "entropy"}, float[rows, seq] in row order.

    The term "nll" is the mean of -log p over counted tokens, the metric "entropy" theirs. temperature, absent_ids: as
    for `policy_loss_fn`.
    """
    return policy_loss_fn(model, _log_probs_out, temperature=temperature, absent_ids=absent_ids)


def _log_probs_out(log_probs: jax.Array, entropy: jax.Array, microbatch: Mapping) -> LossOutput:
    sequences = Sequences.of(microbatch)
    weight = sequences.mask.sum()
    return LossOutput(
        {"nll": Sum(-sequences.total(log_probs), weight)},
        {"entropy": Sum(sequences.total(entropy), weight)},
        {"log_probs": log_probs, "entropy": entropy},
    )


def with_head(model: Pipelined, head_loss: UnembeddedLoss) -> Pipelined:
    """Returns `model` with its head replaced by `head_loss(model.unembed(outer, hidden), microbatch, axis)`.

    Raises:
      ValueError: the model offers no `unembed`.
    """
    unembed = unembed_of(model)
    return with_head_of(
        model, lambda outer, hidden, microbatch, axis: head_loss(unembed(outer, hidden), microbatch, axis)
    )


def with_head_of(model: Pipelined, head_loss: Callable[..., LossOutput | Sum]) -> Pipelined:
    """Returns the same of `head_loss(outer, hidden, microbatch, axis)`; `outer` is this device's share under an axis.

    Its gradient of hidden must be equal on all devices of the axis.
    """

    def head(outer, hidden, microbatch, rng, axis=None):
        return head_loss(outer, hidden, microbatch, axis)

    vocabulary = model.vocabulary and replace(model.vocabulary, head=head)
    return replace(model, head=partial(head, axis=None), vocabulary=vocabulary, layer_piece=None, check=None)


def unembed_of(model: Any) -> Callable[..., Unembedding]:
    """Returns a model's `unembed`.

    Raises:
      ValueError: it is no `Pipelined`, or offers none.
    """
    instance("model", model, Pipelined, "a jaxfb.Pipelined, such as transformer(config)", who="[loss]")
    if model.unembed is None:
        raise Refused(
            "a loss on a model's last hidden states needs a model that defines how they become logits: give the "
            "Pipelined `unembed=lambda outer, hidden: jaxfb.types.Unembedding(normed_hidden, head_kernel)`"
        )
    return model.unembed


def _check_leaves(microbatch: Mapping, names: tuple[str, ...]) -> None:
    """Raises ValueError for a microbatch without leaves that every loss over log-probs reads."""
    for name in names:
        if name not in microbatch:
            raise Refused(
                f"[loss] a loss over log-probs reads the leaf {name!r} [rows, seq], the microbatch has "
                f"{', '.join(microbatch)}"
            )
    check_per_token("loss_mask", *[microbatch["loss_mask"]] * 2)


def _check_ranges(absent_ids: Any) -> None:
    pairs = absent_ids if isinstance(absent_ids, list | tuple) else [None]
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            refuse("absent_ids", absent_ids, "a tuple of ranges (first, end) of ids", who="[loss]")
        for end in pair:
            integer("each end of a range of absent_ids", end, who="[loss]", least=0)
