"""Estimates by formula the time of a step: operations, reads and writes, and communication."""

from __future__ import annotations

import math

from jaxfb.config import Config
from jaxfb.mesh import AXES
from jaxfb.models.adapted import lora_of
from jaxfb.models.config import TransformerConfig, flops_per_token
from jaxfb.models.pattern import stack_of
from jaxfb.planner.attends import context_method, runs_flash
from jaxfb.planner.chips import Chip
from jaxfb.planner.counts import (
    computed_bytes,
    flops_counted,
    gathers_before_use,
    gathers_layers,
    has_backward,
    held_experts,
    held_numbers,
    layers_by_remat,
    layers_here,
    mean_over_layers,
    num_microbatches,
    num_shards,
    reduced_bytes,
    reduces_beside,
    schedule_kind,
    share_ahead,
    share_gathered,
    share_of_layers,
    stored,
    summed_bytes,
    tokens_of_microbatch,
    trained_numbers,
    turns_of_layers,
)
from jaxfb.planner.formula import bias
from jaxfb.planner.formula.attention import flops_of_kernels, score_bytes
from jaxfb.planner.formula.by_device import waits
from jaxfb.planner.formula.memory import gradient_bytes
from jaxfb.planner.formula.tables import spared_bytes
from jaxfb.planner.formula.widths import hidden_width, inner_width, product_width, residual_width
from jaxfb.planner.topology import Topology
from jaxfb.platforms import compiler
from jaxfb.platforms.kinds import V6E

_FORWARDS_AGAIN = {"none": 0, "selective": 0, "layer": 1, "halves": 1, "offload": 1, "full": 2}
"""How often the forward of a layer runs again in a pipeline; in one stage "full" is "layer". The last time it leaves
out a dense MLP's last product, which no gradient needs."""
_MOVED, _MOVED_IN_PIPELINE = 24, 34
"""Reads and writes of as many numbers as a layer's products give, beside the products' own: 21 to 28 of one stage, 29
to 38 of a pipeline."""
_KEPT = {"tpu": 2.75, "gpu": 2.1}
_KEPT_IN_PIPELINE = {"tpu": 5.5, "gpu": 5.0}
"""How often what a layer keeps is read or written where every residual is kept: written and read, on TPUs in part
copied to its place too (8B on v5p, 1B on an H200, where such a step was also timed to be the longer one); in a pipeline
into a slot and out of it once more."""
_LOGIT_BYTES = 65
"""Read and written a token and entry of the vocabulary: 61 of one stage, 75 of a pipeline."""
_BESIDE_PRODUCTS = {"tpu": 0.14, "gpu": 0.35}
"""Share of these reads and writes that takes time of its own where the compiler fuses the others into products."""
_HIDDEN_OVER_TENSOR = 16
"""Reads and writes of the whole hidden state where `tensor` cuts a layer: of 70B and 405B, whose loops of products add
up what each turn gives."""
_RING_BYTES = 85
"""Read and written a query's number and turn of a ring of kernels, to cut and to sum: 79 and 102 of two lengths."""
_EXPOSED, _EXPOSED_BY_DEFAULT = 0.12, 0.6
"""Share of communication that nothing hides: with tensor shards or stages on TPUs whose compiler has options in
`jaxfb/platforms/compiler.py`; 0.61 of v5e, which has none; on H100 0.10 to 0.28 where layers are gathered ahead."""
_EXPOSED_A_LAYER_AHEAD, _EXPOSED_HALF_AHEAD = 0.05, 0.23
"""The same of the others of these TPUs: 0.03 to 0.08 of 8B and 70B on v5p and v6e, without context axis; half a layer
ahead 0.22 of 8B on both, of whose gradients those of a layer's second half are scattered in its own turn."""
_EXPOSED_IN_TURN, _EXPOSED_IN_TURN_OF_SHARDS = 0.25, 0.5
"""The same where layers are not gathered ahead, so that the compiler runs a gather beside products of the same layer:
0.19 of 8B on v5p and 0.31 on v6e; with a tensor axis 0.50 of 405B and 0.51 of a pipeline of 70B."""
_EXPOSED_ON_V6E_BESIDE_TENSOR = 0.46
"""Share of communication that nothing hides on v6e with a tensor axis: of FSDP's 0.45 of 70B and 0.47 of 8B, with two
chips on that axis."""
_EXPOSED_EXCHANGE = {"tpu": (1.0, 0.07), "gpu": (0.55, 0.27)}
"""Share of what experts exchange that nothing hides, and the same where a layer's halves run beside the exchange. Of
Mixtral 8x22B and a model like DeepSeek-V3: on v5p all, and 0.03 and 0.10; on H100 0.40 and 0.71, and 0.26 and 0.28."""
_EXPOSED_BESIDE_LAST = 0.35
"""The same on GPUs where all is gathered before the first microbatch and gradients are reduced beside the last: 0.31 of
8B on 64 H100."""
_EXPOSED_SCATTERS = 0.7
"""The same of ZeRO-2's scatters, which begin once all gradients of a microbatch are there: 0.73 of 1B on four v5p."""
_IN_TWO_STEPS = 0.87
"""Share of FSDP's communication over a whole slice of TPUs that a step cannot be shorter than: collectives are two
steps, of which one uses links that another leaves free (8B on v6e:8x8, memory used: 5.22 s in a step of 4.52 s)."""
_ACCUMULATED, _ACCUMULATED_IN_PRODUCTS, _SHARDS = 12, 2, 40
"""Bytes read and written a parameter and microbatch: the float32 sum there and back, and what is added; what is left of
them on TPUs, where products add up what they give, but for a tensor axis (8B and 70B on v5p); with FSDP's shards, what
gathers and scatters take too."""
_EXPOSED_OFFLOAD = 0.03
"""Share of the time in which layers' inputs travel to the host and back that nothing hides: 0 to 0.12 of nine rows."""
_SCATTERS_OF_KEPT = 0.5
"""Share of the scatters of gradients of layers whose weights stay gathered that nothing hides, on TPUs: 0.3 to 1 of 8B
on v5p with half of its layers gathered."""


def _flops_per_token(config: Config, sizes: TransformerConfig, topology: Topology) -> tuple[float, float]:
    """Returns (those of the layers, recomputation and bubble included; those of the head)."""
    again = forwards_again(config, sizes)
    of_layers = turns_of_layers(config) * waits(config, sizes, again)
    counted = flops_counted(config, sizes)
    forward = (
        flops_per_token(sizes, config.data.sequence_length) / 3 - 2 * sizes.hidden_size * sizes.vocab_size
    )
    left_out = min(again, 1) * 2 * sizes.hidden_size * inner_width(sizes) * sizes.num_layers
    layers = (
        counted.layers + again * forward - left_out + flops_of_kernels(config, sizes, topology, again / 3)
    )
    return layers * of_layers * share_of_layers(config, sizes) * config.mesh.pipe, counted.head


def forwards_again(config: Config, sizes: TransformerConfig) -> float:
    """Returns how often the forward of a layer runs again for its backward, in the mean."""
    if not has_backward(config, sizes):
        return 0.0
    in_pipeline = config.mesh.pipe > 1
    return mean_over_layers(
        config, sizes, lambda remat: _FORWARDS_AGAIN[remat if in_pipeline or remat != "full" else "layer"]
    )


def step_flops(config: Config, sizes: TransformerConfig, topology: Topology) -> float:
    tokens = config.batch.rows * config.data.sequence_length
    return sum(_flops_per_token(config, sizes, topology)) * tokens / topology.num_devices


def work_seconds(config: Config, sizes: TransformerConfig, topology: Topology) -> float:
    chip, length = topology.chip, config.data.sequence_length
    assert chip is not None  # times are asked of chips with a known peak alone
    tokens = config.batch.rows * length / topology.num_devices
    of_layers = turns_of_layers(config) * waits(config, sizes, forwards_again(config, sizes))
    moved = _MOVED_IN_PIPELINE if config.mesh.pipe > 1 else _MOVED
    share = _BESIDE_PRODUCTS.get(topology.platform, 1.0)
    each = computed_bytes(config)
    read = each * moved * share * product_width(sizes) * sizes.num_layers
    read += _residual_bytes(config, sizes, topology)
    read += score_bytes(config, sizes, topology) + _adapter_bytes(config, sizes)
    read *= 1 if has_backward(config, sizes) else 1 / 3
    read += bias.traffic(config, sizes, topology, forwards_again(config, sizes))
    if config.mesh.tensor > 1:
        read += each * _HIDDEN_OVER_TENSOR * config.mesh.tensor * sizes.hidden_size * sizes.num_layers
    read = (
        read * of_layers * share_of_layers(config, sizes) * config.mesh.pipe
        + _LOGIT_BYTES * share * sizes.vocab_size
    )
    if context_method(config, sizes, topology) == "ring" and runs_flash(config, sizes, topology):
        turns = (config.mesh.context - 1) * sizes.num_layers
        read += _RING_BYTES * turns * sizes.num_heads * sizes.head_size
    beside = (
        _accumulated_bytes(config, sizes, topology)
        + _expert_bytes(config, sizes)
        + _copied_bytes(config, sizes)
        + _copied_head_bytes(config, sizes)
    )
    return step_flops(config, sizes, topology) / chip.flops + (tokens * read + beside) / chip.bandwidth


def _residual_bytes(config: Config, sizes: TransformerConfig, topology: Topology) -> float:
    """Counts what is read and written for one token of residuals, in layers that keep every one."""
    passes = _KEPT_IN_PIPELINE if config.mesh.pipe > 1 else _KEPT
    layers = mean_over_layers(config, sizes, lambda remat: remat == "none") * sizes.num_layers
    kept = computed_bytes(config) * layers * residual_width(config, sizes, topology)
    # the width is that of one of the devices of `tensor`, all of which have the token
    return passes.get(topology.platform, 2.0) * kept * config.mesh.tensor


def _accumulated_bytes(config: Config, sizes: TransformerConfig, topology: Topology) -> float:
    """Counts what is read and written to add each microbatch's gradient to the sums."""
    scattered = config.optimizer.sharding == "gradients"  # before they are added
    in_products = topology.platform == "tpu" and config.mesh.tensor == 1 and not scattered
    whole = _ACCUMULATED_IN_PRODUCTS if in_products else _ACCUMULATED
    each = _SHARDS if gathers_layers(config) else whole
    return each / 4 * gradient_bytes(config, sizes) * num_microbatches(config)


def _adapter_bytes(config: Config, sizes: TransformerConfig) -> float:
    """Counts what is read for one token's adapters, whose products are too small for their reads to be hidden: what a
    projection reads once for A in each forward and once for the gradient of A, and its answer's gradient once.
    """
    if (lora := lora_of(sizes)) is None:
        return 0.0
    runs = 2 + forwards_again(config, sizes)
    adapted = [sides for name, sides in _projections(sizes).items() if lora.adapts(name)]
    numbers = sum((runs * read + given) * layers for read, given, layers in adapted)
    return computed_bytes(config) * numbers / config.mesh.tensor


def _projections(sizes: TransformerConfig) -> dict[str, tuple[int, int, int]]:
    """Maps the name of a projection to the numbers of a token that it reads and gives, and the layers that have it; of
    latent attention and of experts none.
    """
    width, few, middle = sizes.hidden_size, sizes.num_kv_heads * sizes.head_size, sizes.mlp_size
    heads, layers = sizes.num_heads * sizes.head_size, 0 if sizes.latent else sizes.num_layers
    dense = sum(number for one, number in stack_of(sizes).counted() if not one.num_experts)
    return {
        "attention.query": (width, heads, layers),
        "attention.key": (width, few, layers),
        "attention.value": (width, few, layers),
        "attention.output": (heads, width, layers),
        "mlp.gate": (width, middle, dense),
        "mlp.up": (width, middle, dense),
        "mlp.down": (middle, width, dense),
    }


def _copied_bytes(config: Config, sizes: TransformerConfig) -> float:
    """Counts the copies of weights that stay gathered while others do not: of each layer
    forward and backward, as measured of 8B on v5p (0.18 s of 8.66 s with half of the layers).
    """
    kept = held_numbers(config, sizes)[0] * share_gathered(config, sizes)
    return computed_bytes(config) * 4 * kept * num_microbatches(config)


def _copied_head_bytes(config: Config, sizes: TransformerConfig) -> float:
    """Counts the copies of the sum of the head's gradients under a schedule by device, where each tick has a branch
    that may add to it: one of the branch and one of the loop.
    """
    if config.mesh.pipe == 1 or not schedule_kind(config).by_device:
        return 0.0
    # F, B and W of each chunk are ticks
    ticks = 3 * config.chunks * num_microbatches(config) * turns_of_layers(config)
    head = sizes.hidden_size * sizes.vocab_size / (config.mesh.pipe * config.mesh.tensor)
    return 2 * 2 * summed_bytes(config) * head * ticks


def _expert_bytes(config: Config, sizes: TransformerConfig) -> float:
    """Counts what layers with experts read and write beside products, which no product hides.

    Rows of a token's choices: cut from tokens and added up to them (2 and 3 times forward, 2 and
    3 backward, 2 in the forward's second run), a sum of two products' gradients (3), and for each way of the exchange
    read, laid out for it and back, and written (4).
    """
    if not sizes.num_experts:
        return 0.0
    again = mean_over_layers(config, sizes, lambda remat: 0 if remat == "none" else 1)
    ways = _exchange_ways(config, sizes) if config.mesh.expert > 1 else 0
    rows = tokens_of_microbatch(config) * sizes.experts_per_token
    passes = 13 + 2 * again if has_backward(config, sizes) else 5
    passes += 4 * ways
    return computed_bytes(config) * sizes.hidden_size * rows * passes * _expert_runs(config, sizes)


def _expert_runs(config: Config, sizes: TransformerConfig) -> float:
    """Returns how often a device runs a layer with experts forward in an update, without a second run."""
    of_layers = turns_of_layers(config)
    with_experts = sum(number for one, number in stack_of(sizes).counted() if one.num_experts)
    return num_microbatches(config) * of_layers * with_experts * share_of_layers(config, sizes)


def _exchange_ways(config: Config, sizes: TransformerConfig) -> float:
    """Returns how often rows travel: there and back, forward and backward, and there once more where a layer is
    computed again.
    """
    if not has_backward(config, sizes):
        return 2
    return mean_over_layers(config, sizes, lambda remat: 4 if remat in ("none", "selective") else 5)


def wire_seconds(config: Config, sizes: TransformerConfig, chip: Chip) -> float:
    """Returns the time of gathered weights, reduced gradients, sums over tensor shards, and what stages hand on."""
    mesh, held, microbatches = config.mesh, sum(held_numbers(config, sizes)), num_microbatches(config)
    trained = sum(trained_numbers(config, sizes))
    times = microbatches if config.parallel.fsdp_gather != "step" else 1
    of_kept = held_numbers(config, sizes)[0] * share_gathered(config, sizes)
    each = computed_bytes(config)
    hidden = each * tokens_of_microbatch(config) * sizes.hidden_size * microbatches
    of_layers = turns_of_layers(config)
    gathers = 2 * times if has_backward(config, sizes) else times
    gathered = each * (gathers * held - (gathers - 1) * of_kept)
    gathered += times * reduced_bytes(config) * trained
    gathered -= times * spared_bytes(config, sizes, chip.kind)
    experts = held_experts(config, sizes) / held
    seconds = gathered * experts * ring_seconds(config, chip, "fsdp", "context")
    seconds += gathered * (1 - experts) * ring_seconds(config, chip, "fsdp", "expert", "context")
    ways = 1 if config.optimizer.sharding == "gradients" else 2  # `scatter_seconds` counts the other
    sums = ways * summed_bytes(config) * sum(stored(trained_numbers, config, sizes))
    seconds += sums * ring_seconds(config, chip, "data")
    seconds += tensor_seconds(config, sizes, chip)
    if mesh.pipe > 1:
        # a stage's result there and its gradient back; around the head, sums of five hidden states, cut over `tensor`
        seconds += 2 * hidden * of_layers * config.chunks / _rate(config, chip, "pipe", neighbours=True)
        seconds += 10 / mesh.tensor * hidden * ring_seconds(config, chip, "pipe")
    return seconds


def scatter_seconds(config: Config, sizes: TransformerConfig, chip: Chip) -> float:
    """Returns the time in which ZeRO-2 scatters each microbatch's gradients over data: those of layers in the dtype of
    the computation.
    """
    if config.optimizer.sharding != "gradients":
        return 0.0
    layers, outer = stored(trained_numbers, config, sizes)
    sent = computed_bytes(config) * layers + summed_bytes(config) * outer
    return sent * num_microbatches(config) * ring_seconds(config, chip, "data")


def exposed_scatters(config: Config, sizes: TransformerConfig, topology: Topology) -> float:
    """Returns the time of `scatter_seconds` that nothing hides."""
    chip = topology.chip
    return _EXPOSED_SCATTERS * scatter_seconds(config, sizes, chip) if chip else 0.0


def tensor_seconds(config: Config, sizes: TransformerConfig, chip: Chip) -> float:
    """Returns the time of sums over tensor shards, of four of a layer's products."""
    tokens = tokens_of_microbatch(config) * num_microbatches(config)
    hidden = computed_bytes(config) * tokens * sizes.hidden_size
    of_layers = turns_of_layers(config)
    sums = 8 if has_backward(config, sizes) else 4
    return sums * hidden * of_layers * layers_here(config, sizes) * ring_seconds(config, chip, "tensor")


def exposed_exchange(config: Config, sizes: TransformerConfig, topology: Topology) -> float:
    """Returns the time of `exchange_seconds` that nothing hides."""
    if topology.chip is None:
        return 0.0
    overlaps = sizes.expert_overlap and "halves" in config.parallel.remat
    at_once, in_turns = _EXPOSED_EXCHANGE.get(topology.platform, (1.0, 1.0))
    return (in_turns if overlaps else at_once) * exchange_seconds(config, sizes, topology.chip)


def exchange_seconds(config: Config, sizes: TransformerConfig, chip: Chip) -> float:
    """Returns the time in which rows go to experts of other devices."""
    if config.mesh.expert == 1 or not sizes.num_experts:
        return 0.0
    rows = tokens_of_microbatch(config) * sizes.experts_per_token
    sent = (
        computed_bytes(config)
        * sizes.hidden_size
        * rows
        * _exchange_ways(config, sizes)
        * _expert_runs(config, sizes)
    )
    return sent * ring_seconds(config, chip, "expert")


def kept_scatter_seconds(config: Config, sizes: TransformerConfig, topology: Topology) -> float:
    """Returns the time that scatters of gradients of layers which stay gathered are waited for, on TPUs."""
    if topology.chip is None or topology.platform != "tpu":
        return 0.0
    kept = trained_numbers(config, sizes)[0] * share_gathered(config, sizes)
    sent = reduced_bytes(config) * kept * num_microbatches(config)
    return _SCATTERS_OF_KEPT * sent * ring_seconds(config, topology.chip, "fsdp", "expert", "context")


def offload_seconds(config: Config, sizes: TransformerConfig, topology: Topology, work: float) -> float:
    """Returns the time that layers' inputs are waited for on their way to the host's memory and back."""
    if topology.chip is None:
        return 0.0
    layers = sum(number for remat, number in layers_by_remat(config, sizes) if remat == "offload")
    inputs = computed_bytes(config) * tokens_of_microbatch(config) * hidden_width(config, sizes) * layers
    moving = 2 * inputs * num_microbatches(config) / topology.chip.host_bandwidth
    return max(_EXPOSED_OFFLOAD * moving, moving - work)


def exposed_seconds(
    config: Config, sizes: TransformerConfig, topology: Topology, wire: float, work: float
) -> float:
    """Returns the communication that nothing hides: a share of it, and at least what is longer than the work."""
    is_tpu = topology.platform == "tpu"
    is_slice = is_tpu and num_shards(config) == topology.num_devices
    # on a torus tensor uses other links than fsdp; `loops.py` counts how long its collectives are waited for
    along_tensor = tensor_seconds(config, sizes, topology.chip) if is_tpu and topology.chip else 0.0
    least = _IN_TWO_STEPS * wire if is_slice else max(along_tensor, wire - along_tensor)
    return max(exposed_share(config, sizes, topology) * wire, least - work)


def exposed_share(config: Config, sizes: TransformerConfig, topology: Topology) -> float:
    """Returns the share of communication that nothing hides where there is work enough beside it."""
    if topology.chip is None or topology.platform == "cpu":
        return 1.0
    ahead = gathers_before_use(config, topology)
    if topology.platform == "gpu":
        beside = _EXPOSED_BESIDE_LAST if reduces_beside(config, topology) else 1.0
        return _EXPOSED if ahead and config.mesh.pipe == 1 else beside
    if topology.chip.kind not in compiler.TABLE:
        return _EXPOSED_BY_DEFAULT
    waits = num_shards(config) > 1 and config.parallel.fsdp_gather == "layer" and not ahead
    in_turn = _EXPOSED_IN_TURN_OF_SHARDS if config.mesh.tensor > 1 else _EXPOSED_IN_TURN
    return in_turn if waits else _exposed_ahead(config, sizes, topology)


def _exposed_ahead(config: Config, sizes: TransformerConfig, topology: Topology) -> float:
    """Returns `exposed_share` of TPUs whose compiler has options."""
    mesh, share = config.mesh, share_ahead(config, sizes, topology)
    if mesh.tensor > 1 and topology.chip is not None and topology.chip.kind == V6E:
        return _EXPOSED_ON_V6E_BESIDE_TENSOR
    if mesh.tensor * mesh.pipe > 1 or share == 0:
        return _EXPOSED
    return _EXPOSED_A_LAYER_AHEAD if share == 1 or mesh.context > 1 else _EXPOSED_HALF_AHEAD


def ring_seconds(config: Config, chip: Chip, *axes: str) -> float:
    """Returns the seconds that a byte of an array takes around a ring of all devices of those axes."""
    size = math.prod(getattr(config.mesh, axis) for axis in axes)
    return (size - 1) / size / _rate(config, chip, *axes)


def _rate(config: Config, chip: Chip, *axes: str, neighbours: bool = False) -> float:
    """Returns bytes a second along an axis, or several together."""
    sizes, group = {name: getattr(config.mesh, name) for name in AXES}, [0]
    for axis in axes:
        stride = math.prod(sizes[name] for name in AXES[AXES.index(axis) + 1 :])
        along = range(0, (2 if neighbours else sizes[axis]) * stride, stride)
        group = [place + step for place in group for step in along]
    return chip.group_bandwidth(group)
