"""Small mistakes, each of which a fast test must notice: `python -m tests.mutations` makes them in copies one by one.

    python -m tests.mutations                  all of them
    python -m tests.mutations signed_weight    those whose name contains one of the words
    python -m tests.mutations --list           their names, files and tests

A mutation replaces one short text that occurs once in its file. `tests/test_mutations.py` checks that it still does,
so a change of the code takes its mutations along.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINKED = ("configs", "docs", "examples", "pyproject.toml", "README.md")


@dataclass(frozen=True)
class Mutation:
    """name: unique. file: below jaxfb/. old, new: texts. test: file::function below tests/, which must turn red."""

    name: str
    file: str
    old: str
    new: str
    test: str

    @property
    def path(self) -> Path:
        """The file that it changes."""
        return ROOT / "jaxfb" / self.file

    def applied(self, text: str) -> str:
        """`text` with the mistake in it; ValueError unless the old text is there once."""
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.old!r} occurs {text.count(self.old)} times in {self.file}")
        return text.replace(self.old, self.new)


MUTATIONS = (
    # schedules
    Mutation(
        "backward_starts_late",
        "schedules/lockstep.py",
        "return (num_chunks - 1) * pitch + num_stages - 1",
        "return (num_chunks - 1) * pitch + num_stages",
        "schedules/test_built_in_schedules.py::test_loss_is_taken_in_the_tick_in_which_the_last_stage_runs",
    ),
    Mutation(
        "transport_takes_no_tick",
        "schedules/validate.py",
        "if tick >= ready + delay:",
        "if tick >= ready:",
        "schedules/test_custom_schedules.py::test_bad_cell_is_marked",
    ),
    Mutation(
        "slot_freed_in_the_tick_of_its_last_reader",
        "schedules/slots.py",
        "while busy and busy[0][0] < start:",
        "while busy and busy[0][0] <= start:",
        "schedules/test_built_in_schedules.py::test_program_executes_the_table_and_overwrites_no_live_slot",
    ),
    Mutation(
        "weights_of_a_table_without_w",
        "schedules/costs.py",
        'costs["B"] = self.backward',
        'costs["B"] = self.backward_input',
        "schedules/test_custom_schedules.py::test_own_table_has_phases_slots_and_costs_like_a_built_in_one",
    ),
    # batch plan
    Mutation(
        "rows_of_a_replica_stay_together",
        "batch_plan/plan.py",
        "(microbatch * self.data_parallel + replica) * self.rows_per_microbatch",
        "(replica * self.num_microbatches + microbatch) * self.rows_per_microbatch",
        "batch_plan/test_batch_plan.py::test_rows_of_partitions_the_rows_in_megatron_order",
    ),
    Mutation(
        "ramp_up_one_row_late",
        "batch_plan/ramp_up.py",
        "bisect_right(self.steps",
        "bisect_left(self.steps",
        "batch_plan/test_batch_plan.py::test_windows_are_those_of_a_plain_loop",
    ),
    Mutation(
        "epoch_without_its_rest",
        "batch_plan/run.py",
        'count = min(fit, divide(change - position, plan.real_rows, "pad"), update_limit - update)',
        'count = min(fit, divide(change - position, plan.real_rows, "drop"), update_limit - update)',
        "batch_plan/test_batch_plan.py::test_windows_are_those_of_a_plain_loop",
    ),
    Mutation(
        "budget_of_all_replicas",
        "batch_plan/budget.py",
        "most = plan.max_tokens_per_microbatch // width",
        "most = plan.data_parallel * plan.max_tokens_per_microbatch // width",
        "batch_plan/test_rollout_plan.py::test_a_token_budget_is_strict_and_loses_no_row",
    ),
    # forward_backward
    Mutation(
        "tensor_is_never_left_to_xla",
        "forward_backward/traced.py",
        "return cls._over(mesh, manual_axes(mesh), *given)",
        "return cls._over(mesh, mesh.axis_names, *given)",
        "forward_backward/test_contract.py::"
        "test_a_loss_may_constrain_an_array_over_tensor_where_that_axis_has_one_device_too",
    ),
    Mutation(
        "axes_are_all_manual_on_tpus",
        "forward_backward/traced.py",
        'if platform_of(mesh) == "cpu" and axis_size',
        "if axis_size",
        "planner/test_kernels.py::test_a_trace_counts_the_kernels_products",
    ),
    Mutation(
        "tensor_of_one_device_is_left_to_xla",
        "forward_backward/traced.py",
        "axis_size(mesh, *AUTOMATIC_AXES) == 1:",
        "axis_size(mesh, *AUTOMATIC_AXES) == 0:",
        "forward_backward/test_contract.py::"
        "test_a_loss_may_constrain_an_array_over_tensor_where_that_axis_has_one_device_too",
    ),
    Mutation(
        "inputs_are_read_late",
        "forward_backward/stage.py",
        "Reads(kept, self._places(layers), ahead=self._on_host)",
        "Reads(kept, self._places(layers), ahead=False)",
        "forward_backward/test_structure.py::test_the_input_of_a_layer_is_brought_from_the_host_a_turn_before_its_backward",
    ),
    Mutation(
        "grad_scale_dropped_per_microbatch",
        "forward_backward/weights.py",
        "* (scale / num_parts)",
        "* (jnp.asarray(1, dtype) / num_parts)",
        "forward_backward/test_seeds.py::test_gradients_carry_the_scale_and_the_loss_does_not",
    ),
    Mutation(
        "reciprocal_of_positive_weights",
        "forward_backward/weights.py",
        "return jnp.where(weight != 0, 1 / jnp.where",
        "return jnp.where(weight > 0, 1 / jnp.where",
        "forward_backward/test_seeds.py::test_a_negative_weight_divides_like_any_other",
    ),
    Mutation(
        "restore_reads_padding",
        "forward_backward/packed.py",
        "valid = (self._segment > 0) & (self._column < length)",
        "valid = self._column < length",
        "forward_backward/test_budget.py::test_outputs_at_padding_reach_no_row",
    ),
    Mutation(
        "row_keys_by_place_in_the_microbatch",
        "forward_backward/microbatches.py",
        "jnp.arange(plan.padded_rows))",
        "jnp.arange(plan.padded_rows) % plan.rows_per_microbatch)",
        "forward_backward/test_law.py::test_a_split_changes_nothing",
    ),
    Mutation(
        "sum_in_the_parameters_dtype",
        "forward_backward/accumulate.py",
        "wide = jax.tree.map(lambda leaf, dtype: leaf.astype(dtype), grads, accum_dtypes)",
        "wide = grads",
        "forward_backward/test_dtypes.py::test_the_accumulator_is_float32_unless_asked_and_asking_for_less_warns",
    ),
    # parallel
    Mutation(
        "sent_in_the_sums_dtype",
        "parallel/data.py",
        "gather_shard(leaf, spec, dtype, reduce_dtype, stored)",
        "gather_shard(leaf, spec, dtype, None, stored)",
        "forward_backward/test_precision.py::test_devices_are_summed_in_the_reduce_dtype_and_microbatches_exactly",
    ),
    Mutation(
        "a_further_round_waits_for_other_groups",
        "parallel/expert_rounds.py",
        "return route_back(answers, window, out), state",
        'return route_back(answers + 0 * lax.psum(answers, "fsdp"), window, out), state',
        "models/test_moe.py::test_devices_meet_in_a_loop_only_with_those_that_run_it_as_often",
    ),
    Mutation(
        "gradients_of_answers_sent_before_the_rows",
        "parallel/expert_exchange.py",
        "cotangent, _ = lax.optimization_barrier((cotangent, arrived))",
        "cotangent, _ = cotangent, arrived",
        "parallel/test_expert.py::test_gradients_of_answers_are_sent_after_the_rows_are_here",
    ),
    Mutation(
        "all_turns_sent_at_once",
        "parallel/expert.py",
        "out, rows = lax.optimization_barrier(together)",
        "out, _ = lax.optimization_barrier(together)",
        "parallel/test_expert.py::test_a_turn_is_sent_after_the_one_before_it_is_here",
    ),
    Mutation(
        "turns_end_whenever_they_like",
        "parallel/expert.py",
        "out, rows = lax.optimization_barrier(together)",
        "out, rows = together",
        "parallel/test_expert.py::test_a_turn_is_sent_after_the_one_before_it_is_here",
    ),
    Mutation(
        "the_second_turn_sent_beside_the_first",
        "parallel/expert.py",
        "here, rows, beside = all_computed((here, rows, beside))",
        "here, beside = all_computed((here, beside))",
        "parallel/test_expert.py::test_a_turn_is_sent_after_the_one_before_it_is_here",
    ),
    Mutation(
        "experts_begin_before_what_is_computed_beside_their_rows",
        "parallel/expert.py",
        "here, rows, beside = all_computed((here, rows, beside))",
        "here, rows = all_computed((here, rows))",
        "parallel/test_expert.py::test_rows_travel_while_something_else_is_computed",
    ),
    Mutation(
        "the_first_half_computed_again_whenever_it_likes",
        "forward_backward/half_passes.py",
        "unrounded(made.with_leaves(beside), trained, cotangent)",
        "unrounded(of_first, trained, cotangent)",
        "forward_backward/test_halves.py::test_the_first_halfs_gradients_come_from_what_the_second_handed_back",
    ),
    Mutation(
        "nothing_computed_again_beside_the_rows",
        "forward_backward/half_passes.py",
        "partial(self._second, made.leaves)",
        "lambda *args: (self._second((), *args)[0], made.leaves)",
        "forward_backward/test_halves.py::test_what_the_first_half_computes_again_is_handed_to_the_second",
    ),
    Mutation(
        "gradients_of_one_half_alone",
        "forward_backward/half_passes.py",
        "jax.tree.map(jnp.add, more, grads)",
        "more",
        "forward_backward/test_halves.py::test_gradients_are_those_of_one_device",
    ),
    Mutation(
        "experts_scatters_in_one_go",
        "parallel/collectives.py",
        "(on_v5p and kind in V5P)",
        "False",
        "parallel/test_collectives.py::test_steps_of_a_scatter_run_a_layer_apart_where_that_gains",
    ),
    Mutation(
        "attention_not_computed_again_beside_the_rows",
        "models/block.py",
        "answer, out, beside = self.moe(read, counted_RT, load_E, beside)",
        "answer, out, _ = self.moe(read, counted_RT, load_E)",
        "models/test_moe.py::test_a_layers_second_half_computes_what_it_is_given_while_rows_are_sent",
    ),
    Mutation(
        "rows_of_a_short_dtype_exchanged_as_they_are",
        "parallel/expert_exchange.py",
        "if number == 1 or",
        "if True or",
        "parallel/test_expert.py::test_rows_of_a_short_dtype_are_exchanged_as_words",
    ),
    Mutation(
        "experts_own_gradients_summed",
        "parallel/data.py",
        'if axis in ("pipe", "expert")}',
        'if axis in ("pipe",)}',
        "models/test_moe.py::test_a_split_changes_nothing",
    ),
    Mutation(
        "a_token_as_likely_as_one_before_it_counts_as_likeliest",
        "losses/cross_entropy.py",
        "(target_logit > before)",
        "(target_logit >= before)",
        "losses/test_cross_entropy.py::test_scores_are_those_of_the_counted_tokens",
    ),
    Mutation(
        "a_dim_of_experts_taken_for_shards",
        "parallel/sharding.py",
        "axes not in ((), (EXPERT,))",
        "axes",
        "parallel/test_sharding.py::test_an_expert_axis_is_more_fsdp_for_all_but_the_experts",
    ),
    Mutation(
        "experts_axis_stores_copies",
        "mesh.py",
        'SHARD_AXES = ("fsdp", EXPERT, ROWS, "context")',
        'SHARD_AXES = ("fsdp", ROWS, "context")',
        "parallel/test_sharding.py::test_each_device_stores_its_share_of_a_mixture",
    ),
    Mutation(
        "fsdp_pairs_apart_in_a_ring",
        "platforms/torus.py",
        "pair.size != 2 or",
        "pair.size == 2 or",
        "platforms/test_torus.py::test_pairs_of_fsdp_are_neighbours_in_longer_rings",
    ),
    Mutation(
        "pairs_not_turned_around",
        "platforms/torus.py",
        "(pair.of(along) + block) % 2",
        "pair.of(along)",
        "platforms/test_torus.py::test_in_a_ring_of_four_the_pairs_of_both_axes_are_neighbours",
    ),
    Mutation(
        "cores_of_a_chip_taken_for_one",
        "platforms/torus.py",
        'getattr(device, "core_on_chip", 0) or 0',
        "0",
        "platforms/test_torus.py::test_both_cores_of_a_chip_move_together",
    ),
    Mutation(
        "copies_on_gpus_without_a_tensor_axis",
        "planner/formula_memory.py",
        "min(mesh.fsdp, mesh.tensor) == 1",
        "mesh.fsdp == 1",
        "planner/test_formula.py::test_gpus_keep_copies_of_matrices_that_a_tensor_axis_leaves_no_rows_of",
    ),
    Mutation(
        "open_rings_taken_for_closed",
        "platforms/torus.py",
        "all(length % 4 == 0 for length in lengths)",
        "True",
        "platforms/test_torus.py::test_other_meshes_are_as_jax_places_them",
    ),
    Mutation(
        "gradients_of_experts_added_to_zeros",
        "models/grouped_matmul.py",
        "wide=or_empty(self.wide)",
        "wide=jnp.zeros(self.wide.shape, self.wide.dtype)",
        "models/test_grouped_matmul.py::test_no_zeros_are_written_to_add_a_gradient_to",
    ),
    Mutation(
        "gradients_of_experts_added_to_what_was_there",
        "models/grouped_matmul.py",
        "are_done=begun != 0",
        "are_done=True",
        "models/test_grouped_matmul.py::test_the_first_product_writes_the_gradient_and_the_others_add_to_it",
    ),
    Mutation(
        "first_tiles_of_experts_added_again",
        "models/grouped_matmul.py",
        "done=jnp.where(begun == 0, first.end - first.start, 0)",
        "done=0",
        "models/test_grouped_matmul.py::test_the_first_product_writes_the_gradient_and_the_others_add_to_it",
    ),
    Mutation(
        "first_tiles_of_experts_counted_twice",
        "hlo/calls.py",
        "({SELDOM}|{FIRST_TURNS})",
        "({SELDOM})",
        "hlo/test_hlo.py::test_a_loop_that_seldom_turns_is_known_where_it_is_in_something_differentiated",
    ),
    Mutation(
        "every_product_writes_its_gradient",
        "models/grouped_matmul.py",
        "jnp.ones_like(begun)",
        "begun",
        "models/test_grouped_matmul.py::test_the_first_product_writes_the_gradient_and_the_others_add_to_it",
    ),
    Mutation(
        "undefined_rows_in_a_gradient_of_the_kernels",
        "models/grouped_kernels.py",
        "right = tl.load(cotangent.at[at, right_columns], mask=there, other=0)",
        "right = tl.load(cotangent.at[at, right_columns])",
        "models/test_grouped_matmul.py::test_equals_a_loop_over_rows",
    ),
    Mutation(
        "kernels_add_to_what_was_there",
        "models/grouped_kernels.py",
        "begun[0] != 0, gradient.shape",
        "True, gradient.shape",
        "models/test_grouped_matmul.py::test_the_first_product_writes_the_gradient_and_the_others_add_to_it",
    ),
    Mutation(
        "kernels_address_by_too_few_bits",
        "models/grouped_kernels.py",
        "max(rows.shape[0] * max(widths), math.prod(shape))",
        "rows.shape[0]",
        "models/test_grouped_matmul.py::test_kernels_multiply_what_their_blocks_divide",
    ),
    Mutation(
        "kernels_in_float32",
        "models/grouped_kernels.py",
        "rows.dtype in (jnp.bfloat16, jnp.float16)",
        "True",
        "models/test_grouped_matmul.py::test_kernels_multiply_what_their_blocks_divide",
    ),
    Mutation(
        "answers_of_experts_computed_again",
        "planner/formula_time.py",
        "sizes.hidden_size * inner_width(sizes)",
        "sizes.hidden_size * 0",
        "planner/test_formula.py::test_a_layer_computed_again_needs_no_answers_of_its_experts",
    ),
    Mutation(
        "kernels_of_gpus_cost_nothing",
        "planner/hlo_products.py",
        "gpu_calls.kernel(instruction) or instruction.name",
        "instruction.name",
        "planner/test_kernels.py::test_a_kernel_of_gpus_is_known_by_its_name_and_counted_by_its_rows",
    ),
    Mutation(
        "raw_keys_are_refused",
        "models/transformer.py",
        "reshape(stack.num_periods, -1, *keys.shape[1:])",
        "reshape(stack.num_periods, -1)",
        "models/test_transformer.py::test_a_raw_key_draws_the_numbers_of_a_typed_one",
    ),
    Mutation(
        "rounds_of_experts_begin_with_zeros",
        "parallel/expert_rounds.py",
        "_state_or_empty(_like(of_state, moving[1]))",
        "_like(of_state, moving[1])",
        "parallel/test_expert.py::test_no_zeros_are_written_for_rounds_that_do_not_turn",
    ),
    Mutation(
        "empty_slots_filled_with_zeros",
        "parallel/expert.py",
        'axis=0, mode="clip")',
        'axis=0, mode="fill", fill_value=0)',
        "parallel/test_expert.py::test_slots_are_filled_without_a_pass_over_them",
    ),
    Mutation(
        "each_choice_becomes_words",
        "parallel/expert.py",
        "    if num_devices > 1:\n        x = packed(x)",
        "    if num_devices > 1:\n        x = x",
        "parallel/test_expert.py::test_rows_become_words_before_each_choice_has_one",
    ),
    Mutation(
        "experts_round_before_they_weight",
        "models/moe.py",
        "(gated(self.activation, gate, up) * weights_S1)",
        "(gated(self.activation, gate, up).astype(gate_SF.dtype) * weights_S1)",
        "models/test_moe.py::test_what_an_expert_reads_is_weighted_in_float32_and_rounded_once",
    ),
    Mutation(
        "experts_products_computed_again",
        "forward_backward/remat.py",
        "{splash.KEPT, grouped_matmul.KEPT}",
        "{splash.KEPT}",
        "models/test_moe.py::test_selective_computes_no_product_with_experts_again",
    ),
    Mutation(
        "columns_before_rows",
        "parallel/sharding.py",
        "dim == len(shape) - 2, ",
        "",
        "parallel/test_sharding.py::test_fsdp_cuts_rows_before_columns",
    ),
    Mutation(
        "tensor_shares_the_links_of_fsdp",
        "planner/formula_time.py",
        "max(along_tensor, wire - along_tensor)",
        "wire",
        "planner/test_formula.py::test_a_tensor_axis_uses_other_links_than_fsdp_on_a_torus_alone",
    ),
    Mutation(
        "zigzag_without_the_late_piece",
        "parallel/context.py",
        "pieces[[c, 2 * size - 1 - c]]",
        "pieces[[2 * c, 2 * c + 1]]",
        "parallel/test_context.py::test_zigzag_gives_every_device_an_early_and_a_late_piece",
    ),
    Mutation(
        "fsdp_cuts_the_layers",
        "parallel/sharding.py",
        "first_dim = int(stacked and in_layers(path))",
        "first_dim = 0",
        "parallel/test_sharding.py::test_the_stacked_dim_of_layers_is_never_cut_over_fsdp",
    ),
    # losses
    Mutation(
        "z_loss_scale_without_abs",
        "losses/cross_entropy.py",
        "scale = jnp.max(jnp.abs(jnp.stack(cotangents[0])))",
        "scale = jnp.max(jnp.stack(cotangents[0]))",
        "losses/test_regularizers.py::test_negative_cotangents_of_any_size_keep_their_gradient",
    ),
    Mutation(
        "clip_on_the_wrong_side",
        "losses/surrogates.py",
        "return jnp.maximum(free, clipped), clipped > free",
        "return jnp.minimum(free, clipped), clipped > free",
        "losses/test_surrogates.py::test_values_gradients_and_metrics_are_the_references",
    ),
    Mutation(
        "masked_tokens_counted",
        "losses/cross_entropy.py",
        "jnp.sum(jnp.where(mask != 0, mask * per_token, 0))",
        "jnp.sum(mask * per_token)",
        "losses/test_cross_entropy.py::test_masked_slots_are_inert_whatever_they_hold",
    ),
    # optim and the step
    Mutation(
        "norms_decay",
        "optim/weight_decay.py",
        'not has_word(path, "embed", "norm", "bias")',
        'not has_word(path, "embed", "bias")',
        "optim/test_optim.py::test_norms_biases_and_embeddings_do_not_decay_whatever_their_shape",
    ),
    Mutation(
        "warmup_one_late",
        "optim/learning_rate.py",
        "rise(jnp.minimum(count / max(warmup, 1), 1))",
        "rise(jnp.minimum(count / max(warmup + 1, 1), 1))",
        "optim/test_optim_schedules.py::test_rates_are_those_of_transformers",
    ),
    Mutation(
        "hysteresis_ignored",
        "optim/loss_scale.py",
        "scale=jnp.where(left == 0, smaller, state.scale)",
        "scale=smaller",
        "optim/test_loss_scale.py::test_backs_off_and_grows_like_megatron",
    ),
    Mutation(
        "clip_of_the_scaled_gradient",
        "gradients.py",
        "_wide(g) / jnp.asarray(loss_scale, _wide(g).dtype)",
        "_wide(g)",
        "test_gradients.py::test_clipping_sees_the_unscaled_gradient",
    ),
    Mutation(
        "skip_by_the_signed_sum_of_weights",
        "update/attempt.py",
        "jnp.any(jnp.stack([jnp.any(term.weight != 0) for term in divided.values()]))",
        "sum(jnp.sum(term.weight) for term in divided.values()) != 0",
        "update/test_train_step.py::test_weights_that_cancel_are_not_weights_that_are_zero",
    ),
    Mutation(
        "a_timed_update_has_no_limits",
        "update/train_step.py",
        "jax.block_until_ready(self._apply_as_stored(state, out, real_rows, bounds))",
        "jax.block_until_ready(self._apply_as_stored(state, out, real_rows, None))",
        "update/test_split_step.py::test_a_timed_update_is_that_of_the_step",
    ),
    Mutation(
        "a_config_without_the_dtype_of_reductions",
        "training/setup.py",
        "        **_of(config.precision, PrecisionOptions),\n",
        '        "accum_dtype": config.precision.accum_dtype,\n',
        "config/test_config.py::test_every_shared_option_reaches_the_engine",
    ),
    Mutation(
        "dropout_key_by_step",
        "update/programs.py",
        "jax.random.fold_in(state.rng, state.attempts)",
        "jax.random.fold_in(state.rng, state.step)",
        "update/test_train_step.py::test_a_skipped_update_does_not_repeat_its_dropout",
    ),
    Mutation(
        "torchs_clip_without_its_epsilon",
        "gradients.py",
        'norm + 1e-6 if convention == "torch" else norm',
        "norm",
        "test_gradients.py::test_clip_is_exact_or_torchs",
    ),
    Mutation(
        "norm_in_the_gradients_dtype",
        "gradients.py",
        "jnp.sum(jnp.square(_wide(leaf)))",
        "jnp.sum(jnp.square(leaf))",
        "test_gradients.py::test_norm_is_taken_in_at_least_float32",
    ),
    Mutation(
        "ways_of_other_platforms_in_a_mesh",
        "mesh.py",
        "for platform, way in ways.items() if platform in here}",
        "for platform, way in ways.items()}",
        "test_mesh.py::test_in_a_mesh_only_what_its_devices_can_run_is_traced",
    ),
    Mutation(
        "zeros_and_ones_for_parameters_that_are_not_finite",
        "update/attempt.py",
        "jnp.sum(~jnp.isfinite(jnp.where(jnp.isfinite(update), new, old)), dtype=jnp.float32)",
        "jnp.sum(jnp.where(jnp.isfinite(jnp.where(jnp.isfinite(update), new, old)), 0.0, 1.0))",
        "update/test_step_program.py::test_parameters_that_are_not_finite_are_counted_without_an_array_of_zeros",
    ),
    Mutation(
        "loss_unguarded",
        "update/attempt.py",
        "NonFinite(~jnp.isfinite(loss),",
        "NonFinite(jnp.isnan(loss),",
        "update/test_skipped_updates.py::test_a_loss_that_is_not_finite_skips_the_update_though_the_gradient_is",
    ),
    Mutation(
        "updates_unguarded",
        "update/attempt.py",
        "& ~jnp.any(of_gradients) & counted",
        "& False",
        "update/test_skipped_updates.py::test_a_moment_that_is_not_finite_skips_every_update_and_its_leaf_is_named",
    ),
    Mutation(
        "parameters_unguarded",
        "update/attempt.py",
        "jnp.isfinite(jnp.where(jnp.isfinite(update), new, old))",
        "jnp.isfinite(old)",
        "update/test_skipped_updates.py::test_a_finite_update_that_would_make_a_parameter_overflow_is_skipped",
    ),
    Mutation(
        "moments_of_a_skipped_update_kept",
        "update/conditional.py",
        "lambda same: same, arrays)",
        "lambda same: (same[0], change(same)[1]), arrays)",
        "update/test_skipped_updates.py::test_a_skipped_update_leaves_every_bit_and_the_next_is_what_it_would_have_been",
    ),
    Mutation(
        "zero_weight_by_the_number_of_parts",
        "update/attempt.py",
        'out.terms if normalize == "global" else',
        "out.terms if normalize else",
        "update/test_skipped_updates.py::test_rows_that_count_nothing_skip_the_update_in_every_normalization",
    ),
    Mutation(
        "pipelines_order_in_a_checkpoint",
        "checkpoint/store.py",
        "leaves = named_leaves(as_saved(state))",
        "leaves = named_leaves(state)",
        "update/test_layer_order.py::test_a_loop_of_ones_own_saves_and_restores_the_order_of_the_model",
    ),
    Mutation(
        "input_kept_for_a_frozen_kernel",
        "models/products.py",
        "kept = x.value if kernel.perturbed else None",
        "kept = x.value",
        "models/test_products.py::test_its_input_is_not_kept_for_a_frozen_kernel",
    ),
    Mutation(
        "callers_arrays_donated",
        "update/states.py",
        "self._copied = jax.jit(self._create)",
        "self._copied = jax.jit(self._create, donate_argnums=0)",
        "update/test_train_step.py::test_the_arrays_that_a_state_is_made_of_stay_the_callers",
    ),
    Mutation(
        "moments_whole_on_every_device",
        "parallel/sharding.py",
        "if shape == leaf.shape:",
        "if shape == ():",
        "update/test_step_law.py::test_whatever_of_the_state_is_like_a_parameter_lives_as_its_gradient",
    ),
    # data
    Mutation(
        "position_of_the_padding",
        "data/loader.py",
        "return min(stop, self._end), self._batch(start, stop - start)",
        "return stop, self._batch(start, stop - start)",
        "data/test_loader.py::test_a_short_last_window",
    ),
    Mutation(
        "target_of_the_next_document",
        "data/packing.py",
        "slots = np.maximum(np.asarray(lengths, np.int64) - 1, 0)",
        "slots = np.maximum(np.asarray(lengths, np.int64), 0)",
        "data/test_packing.py::test_rows_hold_every_pair_of_neighbours_once",
    ),
    Mutation(
        "neighbouring_seeds_share_epochs",
        "data/order.py",
        "mixed = int(np.random.SeedSequence(seed).generate_state(1)[0])",
        "mixed = seed",
        "data/test_loader.py::test_each_epoch_is_another_permutation",
    ),
    # checkpoint
    Mutation(
        "dtypes_unchecked",
        "checkpoint/manifest.py",
        "if name in saved and saved[name] != leaf",
        'if name in saved and saved[name]["shape"] != leaf["shape"]',
        "checkpoint/test_checkpoint.py::test_refuses_what_orbax_would_cast",
    ),
    # schedules by device, gathers ahead, slots in the host's memory
    Mutation(
        "late_weight_gradients_too_soon",
        "schedules/dualpipe_v.py",
        '"B" if i <= device else "b"',
        '"B" if i < device else "b"',
        "schedules/test_v_schedules.py::test_the_order_of_dualpipe_v_is_the_published_one",
    ),
    Mutation(
        "microbatches_one_after_the_other",
        "schedules/seq_abreast.py",
        "for piece in range(num_pieces) for m in range(group)",
        "for m in range(group) for piece in range(num_pieces)",
        "schedules/test_seq1f1b.py::test_abreast_only_the_last_pieces_are_waited_for",
    ),
    Mutation(
        "keys_before_a_piece_out_of_place",
        "models/splash_pieces.py",
        "jnp.roll(found, jnp.maximum(back - start, 0), axis=1)",
        "jnp.roll(found, 0, axis=1)",
        "models/test_splash_pieces.py::test_kernels_on_pieces_are_attention_of_the_sequence",
    ),
    Mutation(
        "slots_never_on_the_host",
        "forward_backward/slot.py",
        "host = jax.memory.Space.Host",
        "host = jax.memory.Space.Device",
        "forward_backward/test_structure.py::test_the_inputs_of_layers_wait_in_the_hosts_memory_where_they_are_asked_to",
    ),
    Mutation(
        "the_layer_itself_gathered_ahead",
        "forward_backward/ahead.py",
        "jnp.minimum(turn + 1, number - 1)",
        "jnp.minimum(turn, number - 1)",
        "forward_backward/test_ahead.py::test_gradients_are_those_of_one_device",
    ),
    Mutation(
        "the_next_turns_layer_gathered_early",
        "forward_backward/ahead.py",
        "step(*lax.optimization_barrier((carried, turns[1])))",
        "step(lax.optimization_barrier(carried), turns[1])",
        "forward_backward/test_ahead.py::test_it_is_the_default_on_accelerators_but_v5e",
    ),
    Mutation(
        "layers_that_are_no_loop_run_at_once",
        "forward_backward/stage.py",
        "lax.optimization_barrier((carry, place))",
        "(carry, place)",
        "forward_backward/test_pipeline_structure.py::test_layers_that_are_no_loop_wait_for_one_another",
    ),
    Mutation(
        "last_late_gradients_lost",
        "forward_backward/late_scatter.py",
        "sums = self.add(sums, _run(self._late_steps(sums)[number:], one))",
        "del number, one",
        "forward_backward/test_ahead.py::test_gradients_are_those_of_one_device",
    ),
    Mutation(
        "first_steps_of_scatters_lost",
        "forward_backward/late_scatter.py",
        "_run(self._late_steps(sums)[number:], one)",
        "_run(self._late_steps(sums)[-1:], one)",
        "forward_backward/test_ahead.py::test_steps_of_a_scatter_a_layer_apart_give_the_gradients_of_one_device",
    ),
    Mutation(
        "gradients_rounded_before_they_are_summed",
        "forward_backward/unrounded.py",
        "return before if rounds else var",
        "return var",
        "forward_backward/test_unrounded.py::test_gradients_are_those_before_the_last_rounding",
    ),
    Mutation(
        "integers_taken_for_wider_gradients",
        "forward_backward/unrounded.py",
        "_bits(before.aval) > _bits(var.aval)",
        "True",
        "forward_backward/test_unrounded.py::test_gradients_are_those_before_the_last_rounding",
    ),
    Mutation(
        "waiting_gradients_in_the_dtype_they_come_in",
        "parallel/data.py",
        "return grad.astype(given or dtype)",
        "return grad.astype(given or jnp.promote_types(grad.dtype, dtype))",
        "forward_backward/test_unrounded.py::test_sums_in_16_bits_take_gradients_in_16_bits",
    ),
    Mutation(
        "scopes_lost_where_calls_are_written_out",
        "platforms/compat.py",
        "name_stack=scopes)",
        "name_stack=source_info_util.current_name_stack())",
        "forward_backward/test_unrounded.py::test_what_is_written_out_keeps_its_named_scopes",
    ),
    Mutation(
        "gradients_of_another_layer_scattered_again",
        "forward_backward/overwriting.py",
        "return lax.dynamic_update_slice(buffer, grad, (0,) * grad.ndim)",
        "return buffer",
        "forward_backward/test_overwriting.py::test_gradients_are_those_of_one_device",
    ),
    Mutation(
        "parts_of_a_head_gathered_late",
        "losses/logits.py",
        "(earlier, *grads[:-2]) if",
        "(hidden_grad, *grads[:-1]) if",
        "forward_backward/test_vocabulary_parts.py::test_gathered_early_a_part_waits_for_fewer_products",
    ),
    Mutation(
        "gradients_overwritten_where_products_wait_for_it",
        "forward_backward/overwriting.py",
        'and remat in ("layer", "offload", "full")',
        "",
        "forward_backward/test_overwriting.py::test_it_is_the_default_where_it_was_measured_to_pay",
    ),
    Mutation(
        "gradients_overwritten_in_pipelines",
        "forward_backward/execution.py",
        "overwrites = not in_pipeline and self.ahead is True",
        "overwrites = self.ahead is True",
        "forward_backward/test_overwriting.py::test_it_is_the_default_where_it_was_measured_to_pay",
    ),
    Mutation(
        "buffers_of_adapters_many_times_their_size",
        "forward_backward/overwriting.py",
        "sizes[dim] >= _LEAST * _TILE[dim]",
        "sizes[dim] > 0",
        "forward_backward/test_overwriting.py::test_buffers_are_wider_where_that_is_little",
    ),
    Mutation(
        "gradients_overwritten_before_their_scatter",
        "forward_backward/late_scatter.py",
        "free, grads = lax.optimization_barrier((one.grads, further.grads))",
        "free, grads = one.grads, further.grads",
        "forward_backward/test_overwriting.py::test_a_layer_writes_the_buffer_of_the_layer_before_it_behind_its_scatter",
    ),
    Mutation(
        "second_half_gathered_ahead_too",
        "forward_backward/ahead.py",
        "return parted(self.in_turn, tree)",
        "return parted((), tree)",
        "forward_backward/test_half_ahead.py::test_loops_carry_no_whole_array_of_the_second_half",
    ),
    Mutation(
        "gradients_of_the_second_half_lost",
        "forward_backward/late_scatter.py",
        "return self.add(sums, _run(self._steps(sums)[1:], in_turn)), (late, *waiting)",
        "return sums, (late, *waiting)",
        "forward_backward/test_half_ahead.py::test_gradients_are_those_of_one_device",
    ),
    Mutation(
        "gathered_ahead_on_a_cpu",
        "forward_backward/ahead.py",
        'kind not in (None, "cpu", V5E)',
        "kind not in (None, _V5E)",
        "forward_backward/test_ahead.py::test_it_is_the_default_on_accelerators_but_v5e",
    ),
    Mutation(
        "an_embedding_summed_in_its_own_dtype",
        "parallel/look_up.py",
        "exact = jnp.promote_types(matrix.dtype, jnp.float32) == matrix.dtype",
        "exact = True",
        "parallel/test_look_up.py::test_a_narrow_gradient_is_the_sum_in_float32_rounded_once",
    ),
    Mutation(
        "what_a_chain_gathers_charged_in_every_fusion",
        "planner/hlo_bytes.py",
        "names if name not in handed_on)",
        "names)",
        "planner/test_hlo_cost.py::test_what_a_chain_of_fusions_gathers_is_moved_once_and_beside_their_products",
    ),
    Mutation(
        "a_permute_has_both_links_along_an_axis",
        "planner/hlo_cost.py",
        "rate /= 2",
        "rate /= 1",
        "planner/test_hlo_cost.py::test_a_permute_on_a_torus_takes_one_of_the_two_links_along_an_axis",
    ),
    Mutation(
        "only_every_second_slice_of_cubes_is_closed",
        "platforms/torus.py",
        "all(length % 4 == 0 for length in lengths)",
        "all(length % 8 == 0 for length in lengths)",
        "planner/test_tpu.py::test_the_compiler_is_told_which_sides_of_a_slice_are_closed",
    ),
    Mutation(
        "the_last_turn_of_a_loop_hides_a_permute_too",
        "planner/formula_loops.py",
        "(1 - 1 / turns) * product",
        "product",
        "planner/test_formula.py::test_short_products_in_loops_wait_for_permutes_over_tensor",
    ),
    Mutation(
        "rows_of_columns_in_the_order_of_the_devices",
        "parallel/columns.py",
        "(place * self.grid.across + row) * number",
        "device * number",
        "parallel/test_columns.py::test_rows_and_gradient_are_those_of_the_whole",
    ),
    Mutation(
        "columns_summed_over_tokens_in_their_own_dtype",
        "parallel/look_up.py",
        "found.shape[-1]), table.sum_dtype)",
        "found.shape[-1]), table.dtype)",
        "parallel/test_columns.py::test_a_narrow_gradient_is_summed_over_the_tokens_in_float32",
    ),
    Mutation(
        "tokens_of_no_row_have_a_gradient_in_columns",
        "parallel/columns.py",
        "jnp.where(device < self.grid.size, (",
        "jnp.where(device >= 0, (",
        "parallel/test_columns.py::test_negative_tokens_count_from_the_end_and_those_of_no_row_change_nothing",
    ),
    Mutation(
        "the_second_pass_over_a_head_gathered_at_once",
        "losses/logits.py",
        "for some in (before[-2:-1], before[-1:])",
        "for some in ((), ())",
        "forward_backward/test_vocabulary_parts.py::test_no_part_is_gathered_for_gradients_before_the_scores_are_nearly_there",
    ),
    Mutation(
        "both_steps_of_a_scatter_at_once_where_activations_are_kept",
        "forward_backward/execution.py",
        "self.layer_to_shards(overwrites or hands)",
        "self.layer_to_shards(overwrites)",
        "forward_backward/test_ahead.py::test_on_a_whole_slice_a_layer_waits_between_the_steps_of_its_scatter_but_on_v5e",
    ),
    Mutation(
        "nothing_is_handed_on",
        "forward_backward/execution.py",
        "return Ahead(self.gather_layer(), *steps, last, buffers, hands)",
        "return Ahead(self.gather_layer(), *steps, last, buffers)",
        "forward_backward/test_handed.py::test_it_is_the_default_where_it_was_measured_to_pay",
    ),
    Mutation(
        "gradients_that_were_handed_on_are_lost",
        "forward_backward/stage.py",
        "self._scatter(target).to_the_end(target.sums, handed.waiting)",
        "target.sums",
        "forward_backward/test_handed.py::test_gradients_are_those_of_one_device",
    ),
    Mutation(
        "the_backward_begins_with_the_first_layers_parameters",
        "forward_backward/stage.py",
        "None if handed is None else handed._replace(whole=whole)",
        "handed",
        "forward_backward/test_handed.py::test_gradients_are_those_of_one_device",
    ),
    Mutation(
        "handed_on_where_memory_is_short",
        "forward_backward/handed.py",
        'remat in ("none", "selective")',
        "bool(remat)",
        "forward_backward/test_handed.py::test_only_tpus_where_activations_are_kept_hand_on",
    ),
    Mutation(
        "a_token_is_looked_up_in_a_shards_width",
        "parallel/look_up.py",
        "table.whole_shape[1]",
        "table.shard.shape[1]",
        "forward_backward/test_vocabulary_parts.py::test_gradients_are_those_of_one_device",
    ),
    Mutation(
        "a_fused_scatter_is_work",
        "planner/hlo_cost.py",
        "hlo.is_collective(instruction, self._computations)",
        "hlo.collective_kind(instruction.opcode)",
        "planner/test_hlo_cost.py::test_a_scatter_that_is_a_fusion_is_communication_and_no_work",
    ),
    Mutation(
        "gradient_of_the_heads_input_whole_over_tensor",
        "losses/logits.py",
        'constrain(join_tokens(hidden_grad, hidden.shape), None, "tensor", None)',
        "join_tokens(hidden_grad, hidden.shape)",
        "parallel/test_tensor.py::test_the_gradient_of_the_heads_input_is_split_over_tensor",
    ),
    Mutation(
        "never_reduced_beside_the_last_microbatch_unless_asked_for",
        "forward_backward/resolved.py",
        'reduces = in_shards or axis_size(self.mesh, "data") > 1',
        "reduces = False",
        "forward_backward/test_overlap_grad_reduce.py::test_the_planner_and_the_step_have_the_same_default",
    ),
    Mutation(
        "sums_of_other_microbatches_lost",
        "forward_backward/target.py",
        "return read(before, self._at(of, grad), (1, 1, *grad.shape))[0, 0] + grad",
        "return 0 * read(before, self._at(of, grad), (1, 1, *grad.shape))[0, 0] + grad",
        "forward_backward/test_overlap_grad_reduce.py::test_gradients_are_those_of_one_device",
    ),
    Mutation(
        "zeros_reduced_for_nothing_are_added",
        "forward_backward/stage.py",
        "return LateScatter(self._ahead, target.put, target.of_all)",
        "return LateScatter(self._ahead, partial(target.add, padded=False), target.of_all)",
        "forward_backward/test_overlap_grad_reduce.py::test_gradients_are_those_of_one_device",
    ),
    Mutation(
        "shards_reduced_before_the_others_are_added",
        "forward_backward/late_scatter.py",
        "return [*firsts, lambda of: self.of_all(sums, last(of)), *map(_of_grads, self.ahead.reduce)]",
        "return [*firsts, last, *map(_of_grads, self.ahead.reduce[:-1]), *(\n"
        "            lambda of: self.of_all(sums, _of_grads(step)(of)) for step in self.ahead.reduce)]",
        "forward_backward/test_overlap_grad_reduce.py::test_gradients_are_those_of_one_device",
    ),
    Mutation(
        "zeros_that_wait_are_written_over_the_sums",
        "forward_backward/target.py",
        "jnp.where(of.real, grad, read(leaf, at, grad.shape))",
        "grad",
        "forward_backward/test_overlap_grad_reduce.py::test_gradients_are_those_of_one_device",
    ),
    Mutation(
        "nan_of_a_maximum_is_lost",
        "forward_backward/reduce.py",
        "return jnp.where(any_nan > 0, jnp.nan, value)",
        "return value",
        "forward_backward/test_metric_kinds.py::test_a_maximum_of_nan_is_nan",
    ),
    Mutation(
        "rows_of_zeros_in_a_short_window_count",
        "training/custom.py",
        "if self.run_plan.pads and not self._has_checked_padding:",
        "if False and not self._has_checked_padding:",
        "training/test_own_model.py::test_what_cannot_be_trained_is_refused_in_a_sentence",
    ),
    Mutation(
        "bubbles_of_the_last_tick_are_reduced",
        "forward_backward/target.py",
        "grad = jnp.where(self.valid, grad.astype(leaf.dtype), 0)\n            if before",
        "grad = grad.astype(leaf.dtype)\n            if before",
        "forward_backward/test_last_tick.py::test_gradients_are_those_of_one_device",
    ),
    Mutation(
        "only_the_first_chunk_is_reduced",
        "forward_backward/last_tick.py",
        "others = self.reduce_stacked(jax.tree.map(lambda leaf: leaf[1:], sums))",
        "others = jax.tree.map(lambda leaf: leaf[1:], sums)",
        "forward_backward/test_last_tick.py::test_gradients_are_those_of_one_device",
    ),
    Mutation(
        "the_last_tick_runs_twice",
        "schedules/program.py",
        "shorter = last._replace(stop=last.stop - 1)",
        "shorter = last",
        "forward_backward/test_last_tick.py::test_gradients_are_those_of_one_device",
    ),
    Mutation(
        "reduced_gradients_beside_the_sums",
        "forward_backward/last_microbatch.py",
        "zero.shape == so_far.shape, zeros, before)",
        "False, zeros, before)",
        "forward_backward/test_overlap_grad_reduce.py::test_reduced_gradients_are_written_over_the_sums",
    ),
    Mutation(
        "formula_counts_whole_gradients_where_shards_are_reduced",
        "planner/formula_memory.py",
        "if reduces_beside(config, topology) and not gathers:",
        "if reduces_beside(config, topology):",
        "planner/test_formula.py::test_memory_and_time_of_real_sizes_on_tpus_are_near_the_compilers",
    ),
    Mutation(
        "formula_overwrites_gradients_of_experts",
        "planner/formula_memory.py",
        "late = 1 + held_experts(config, sizes) / layers",
        "late = 1",
        "planner/test_formula.py::test_gradients_of_experts_wait_beside_those_that_are_summed",
    ),
    Mutation(
        "layers_reduced_in_the_loop_and_at_the_end",
        "forward_backward/strategies.py",
        "return self.reduce(grad, grad_spec, axes, spec) if cuts_layers(grad_spec) else grad",
        "return self.reduce(grad, grad_spec, axes, spec)",
        "forward_backward/test_overlap_grad_reduce.py::test_gradients_are_those_of_one_device",
    ),
    Mutation(
        "slope_of_silu_without_its_second_factor",
        "models/activations.py",
        "gate * sigmoid * (1 - sigmoid)",
        "gate * sigmoid * sigmoid",
        "models/test_activations.py::test_gradients_are_those_that_jax_derives",
    ),
    Mutation(
        "slope_of_gelu_without_its_second_factor",
        "models/activations.py",
        "+ gate * density",
        "+ density",
        "models/test_activations.py::test_gradients_are_those_that_jax_derives",
    ),
    Mutation(
        "vocabulary_over_pipe_made_whole_over_tensor",
        "parallel/tensor.py",
        "if AXIS in axes_of(entry)]",
        "if entry == AXIS]",
        "parallel/test_tensor.py::test_a_vocabulary_over_pipe_and_tensor_is_never_whole_over_tensor",
    ),
    Mutation(
        "products_computed_twice_though_the_program_fits",
        "platforms/compiler.py",
        '_COMPUTE_ONCE if kind.startswith("TPU")',
        '_COMPUTE_ONCE if kind.startswith("GPU")',
        "platforms/test_compiler.py::test_a_tpu_computes_nothing_twice_unless_a_program_is_too_large",
    ),
    Mutation(
        "limit_of_the_user_taken_for_the_tables",
        "platforms/compiler.py",
        "if one not in _COMPUTE_ONCE.items()",
        "if one[0] not in _COMPUTE_ONCE",
        "platforms/test_compiler.py::test_a_tpu_computes_nothing_twice_unless_a_program_is_too_large",
    ),
    Mutation(
        "program_that_is_too_large_not_compiled_again",
        "platforms/programs.py",
        "if size is None or fewer == self._options",
        "if size is None or fewer != self._options",
        "platforms/test_programs.py::test_what_is_too_large_is_compiled_without_options_that_take_memory",
    ),
    Mutation(
        "plan_of_a_program_in_another_form_than_its_step",
        "planner/compiled.py",
        "if (fewer := _without_memory(config, job.step.compiler_options)) is None:",
        "if (fewer := None) is None:",
        "planner/test_compiled.py::test_a_program_that_is_too_large_is_compiled_as_its_step_is",
    ),
    Mutation(
        "all_shards_converted_in_front_of_the_loop",
        "forward_backward/execution.py",
        'platform_here() == "tpu"',
        'platform_here() == "gpu"',
        "forward_backward/test_ahead.py::test_a_loop_on_a_tpu_reads_shards_as_they_are_stored",
    ),
    Mutation(
        "gathered_ahead_on_v5e",
        "forward_backward/ahead.py",
        'kind not in (None, "cpu", V5E)',
        'kind not in (None, "cpu")',
        "forward_backward/test_ahead.py::test_it_is_the_default_on_accelerators_but_v5e",
    ),
    Mutation(
        "chunk_of_layers_cut_in_every_tick",
        "forward_backward/pipeline.py",
        "if self._layout.num_chunks == 1:",
        "if self._layout.num_chunks >= 1:",
        "forward_backward/test_pipeline_structure.py::test_a_tick_reads_layers_where_they_are_in_all_chunks",
    ),
    Mutation(
        "layer_read_from_another_chunk",
        "forward_backward/slot.py",
        "return Slot(layers, chunk).get(place)",
        "return Slot(layers, 0 * chunk).get(place)",
        "forward_backward/test_pipeline.py::test_devices_that_compute_different_things_in_a_tick_change_nothing",
    ),
    Mutation(
        "inputs_on_the_host_never_waited_for",
        "planner/formula_time.py",
        "return max(_EXPOSED_OFFLOAD * moving, moving - work)",
        "return _EXPOSED_OFFLOAD * moving",
        "planner/test_formula.py::test_inputs_on_the_host_are_waited_for_where_the_link_is_slower_than_the_work",
    ),
    Mutation(
        "inputs_on_the_host_of_simulated_devices",
        "planner/search.py",
        "if topology.chip is None and config.parallel.remat",
        "if topology.chip is not None and config.parallel.remat",
        "planner/test_search.py::test_inputs_go_to_the_host_where_that_is_another_memory",
    ),
    Mutation(
        "zeros_on_the_device_for_buffers_on_the_host",
        "forward_backward/slot.py",
        "lax.empty(",
        "jnp.zeros(",
        "forward_backward/test_pipeline_structure.py::test_buffers_on_the_host_are_not_made_of_zeros_on_the_device",
    ),
    Mutation(
        "heads_turned_by_a_product_beside_a_tensor_axis",
        "models/rope.py",
        "fills and num_shards() == 1",
        "fills",
        "models/test_variants.py::test_heads_are_turned_by_a_product_where_it_pays",
    ),
    Mutation(
        "halves_of_heads_not_swapped_by_the_product",
        "models/rope.py",
        "size // 2, axis=1",
        "0, axis=1",
        "models/test_variants.py::test_a_product_turns_heads_as_slices_do",
    ),
    Mutation(
        "long_documents_turned_as_short",
        "models/rope.py",
        "jnp.where(is_long[:, :, None, None], of_long, angle)",
        "angle",
        "models/test_variants.py::test_short_and_long_documents_of_a_row_are_turned_as_alone",
    ),
    # ticks by device, frozen parameters, windows, local checkpoints, spikes
    Mutation(
        "chunks_that_change_places_on_one_device",
        "parallel/pipe.py",
        "return self.even and [stage for row in self.placement for stage in row] != in_place",
        "return self.even and [stage // self.num_chunks for row in self.placement for stage in row] != [\n"
        "            stage // self.num_chunks for stage in in_place\n        ]",
        "update/test_layer_order.py::test_chunks_of_a_device_may_be_in_any_order",
    ),
    Mutation(
        "counted_leaves_in_the_order_of_the_pipeline",
        "update/pipeline_state.py",
        "changed = order.to_pipeline(after(order.to_model(params), metrics))",
        "changed = after(params, metrics)",
        "update/test_layer_order.py::test_counted_leaves_are_changed_by_the_metrics_of_their_own_layer",
    ),
    Mutation(
        "memory_of_a_v_ignored",
        "schedules/v_blocks.py",
        '(action.kind != "F" or live < most) and ',
        "",
        "schedules/test_v_schedules.py::test_memory_is_one_half_and_one_third_of_1f1b",
    ),
    Mutation(
        "collectives_in_a_branch",
        "schedules/by_device.py",
        'INSIDE_A_STAGE = ("tensor", "context", "expert")',
        'INSIDE_A_STAGE = ("context", "expert")',
        "forward_backward/test_pipeline.py::test_a_schedule_by_device_is_refused_where_stages_have_collectives",
    ),
    Mutation(
        "bubbles_of_a_branch_computed",
        "forward_backward/pipeline.py",
        "if not self._program.by_device:",
        "if self._program:",
        "forward_backward/test_pipeline.py::test_devices_that_compute_different_things_in_a_tick_change_nothing",
    ),
    Mutation(
        "frozen_leaves_trained",
        "trainable.py",
        "return leaf if any(matches(pattern, name_of(path)) for pattern in patterns) == matched else None",
        "return leaf",
        "forward_backward/test_frozen.py::test_no_product_is_computed_for_a_frozen_weight",
    ),
    Mutation(
        "adapters_not_scaled",
        "models/lora.py",
        "return (x @ self.a) @ self.b * self.lora.scale",
        "return (x @ self.a) @ self.b",
        "models/test_lora.py::test_gradients_are_the_projected_gradients_of_the_merged_model",
    ),
    Mutation(
        "window_of_one_more",
        "models/blocked_attention.py",
        "self.first - self.oldest - look.window + 1)",
        "self.first - self.oldest - look.window)",
        "models/test_blocked_attention.py::test_equals_attention_over_whole_scores",
    ),
    Mutation(
        "local_checkpoints_unverified",
        "training/snapshot.py",
        "or _digest(body) != digest.tobytes()",
        "",
        "checkpoint/test_local_checkpoints.py::test_every_flipped_bit_and_every_cut_is_noticed",
    ),
    Mutation(
        "spikes_applied",
        "update/apply.py",
        "applied = applied & ~spike",
        "applied = applied",
        "update/test_skipped_updates.py::test_an_update_beyond_its_limits_leaves_every_bit_of_the_whole_state",
    ),
    Mutation(
        "oldest_is_the_best",
        "checkpoint/store.py",
        'scored.append((score["score"], -step))',
        'scored.append((-score["score"], -step))',
        "checkpoint/test_checkpoint.py::test_keeps_newest_and_best",
    ),
    # faults: rows of the matrix in docs/reliability.md
    Mutation(
        "no_inodes_for_a_checkpoint",
        "training/disk.py",
        "inodes < files",
        "inodes < 0",
        "checkpoint/test_sound_saves.py::test_a_disk_without_inodes_for_a_checkpoint_ends_the_run_before_its_first_update",
    ),
    Mutation(
        "damaged_checkpoint_named_as_saved",
        "checkpoint/store.py",
        "return step not in self._damaged and bool(",
        "return bool(",
        "training/test_signal_phases.py::test_a_start_up_that_is_ended_names_no_checkpoint_that_it_found_damaged",
    ),
    Mutation(
        "a_stop_at_an_evaluation_is_not_saved",
        "training/loop.py",
        "self._saves = self._saves or run_.stopped is not None",
        "pass",
        "training/test_own_model.py::test_a_run_that_an_evaluation_stops_is_saved_and_says_how_to_continue",
    ),
    Mutation(
        "a_refused_command_leaves_what_it_made",
        "training/undo.py",
        "self._back(self._before)",
        "pass",
        "training/test_run_dir.py::test_an_update_that_memory_cannot_hold_leaves_the_directory_as_it_was",
    ),
    Mutation(
        "saved_while_updates_fail",
        "training/loop.py",
        "if self._saves and not self._guard.failed:",
        "if self._saves:",
        "checkpoint/test_sound_saves.py::test_a_loss_that_is_not_finite_is_a_failed_update",
    ),
    Mutation(
        "checksums_not_compared",
        "checkpoint/manifest.py",
        "if digits != saved[name]]",
        "if False]",
        "checkpoint/test_checkpoint.py::test_a_flipped_bit_is_found_and_the_step_before_is_restored",
    ),
    Mutation(
        "digest_of_the_record_not_compared",
        "checkpoint/store.py",
        'record["format"] == FORMAT and record != sealed(record)',
        'record["format"] == FORMAT and False',
        "checkpoint/test_checkpoint.py::test_a_changed_record_is_no_record",
    ),
    Mutation(
        "last_rows_not_summed",
        "parallel/totals.py",
        "return [reduce(jax.lax.add, products), *rest] if part else rest",
        "return [reduce(jax.lax.add, products)] if part else rest",
        "parallel/test_totals.py::test_a_checksum_is_the_same_on_the_host_on_one_device_and_on_any_mesh",
    ),
    Mutation(
        "second_run_in_a_directory",
        "training/run_lock.py",
        "if error.errno in TAKEN:",
        "if False:",
        "training/test_run_dir.py::test_one_run_writes_at_a_time",
    ),
    Mutation(
        "second_signal_ignored",
        "training/interrupt.py",
        "            else:\n                self._end_now(number)",
        "            else:\n                pass",
        "training/test_signal_phases.py::test_a_signal_saves_after_the_update_in_progress_and_a_second_one_ends_at_once",
    ),
    Mutation(
        "signal_in_start_up_waits",
        "training/interrupt.py",
        "                raise Stopped(name)",
        "                pass",
        "training/test_signals.py::test_a_signal_stops_a_start_up_in_python",
    ),
    Mutation(
        "refusals_started_again",
        "cli/supervisor.py",
        "FINAL = (DONE, REFUSED,",
        "FINAL = (DONE,",
        "cli/test_supervisor.py::test_final_endings_are_not_started_again",
    ),
    Mutation(
        "one_restart_too_many",
        "cli/supervisor.py",
        "if failures > self.restarts:",
        "if failures > self.restarts + 1:",
        "cli/test_supervisor.py::test_it_gives_up_after_so_many_restarts_in_a_row",
    ),
    Mutation(
        "lost_process_not_noticed",
        "training/signs.py",
        "and now - since > self._lost_after",
        "and now - since > 9 * self._lost_after",
        "training/test_signs.py::test_a_process_without_a_sign_is_lost_for_good",
    ),
    Mutation(
        "stuck_process_not_noticed",
        "training/signs.py",
        "if now - self._moved[k] > self._stuck_after}",
        "if now - self._moved[k] > 9 * self._stuck_after}",
        "training/test_signs.py::test_one_process_watches_itself",
    ),
    Mutation(
        "suspended_time_counts",
        "training/signs.py",
        "times[other] += seconds",
        "times[other] += 0",
        "training/test_signs.py::test_time_in_which_this_process_was_suspended_does_not_count",
    ),
    Mutation(
        "slow_process_not_named",
        "training/signs.py",
        "if share > SLOW:",
        "if share > 3 * SLOW:",
        "training/test_signs.py::test_a_process_that_takes_a_fifth_longer_is_named_within_twenty_updates",
    ),
    Mutation(
        "third_run_not_asked",
        "training/rerun.py",
        "if third in (first, second):",
        "if third == first == second:",
        "guard/test_guards.py::test_a_fault_that_does_not_come_back_is_outvoted",
    ),
    Mutation(
        "half_of_the_votes_is_a_majority",
        "guard/devices.py",
        "if 2 * count > len(values):",
        "if 2 * count >= len(values):",
        "guard/test_devices.py::test_votes",
    ),
    Mutation(
        "coordinator_on_every_interface",
        "training/join.py",
        'return coordinator if host == "localhost" or _is_of_this_machine(host) else None',
        "return None",
        "training/test_hosts.py::test_a_coordinator_at_the_address_of_a_card_listens_there_alone",
    ),
    Mutation(
        "port_in_use_not_noticed",
        "training/join.py",
        "if error.errno != errno.EADDRINUSE:",
        "if True:",
        "training/test_hosts.py::test_a_port_that_is_in_use_is_said",
    ),
    Mutation(
        "row_of_another_device",
        "parallel/table.py",
        "return own // size, device * size + own % size",
        "return own // size, own % size",
        "forward_backward/test_vocabulary_parts.py::test_gradients_are_those_of_one_device",
    ),
    Mutation(
        "parts_of_a_heads_gradient_are_scaled_once_they_are_summed",
        "losses/logits.py",
        """* (scale / half)
        grads.append(table.scattered(kernel_grad if table.vocabulary == 1 else kernel_grad.T))""",
        """/ half
        grads.append(scale * table.scattered(kernel_grad if table.vocabulary == 1 else kernel_grad.T))""",
        "forward_backward/test_vocabulary_parts.py::test_devices_whose_microbatches_weigh_differently_each_scale_their_own_part",
    ),
    Mutation(
        "target_from_what_is_kept",
        "losses/part_scores.py",
        "grad = jnp.where(ids == target, exact, kept[:number].astype(factor.dtype) * factor)",
        "grad = kept[:number].astype(factor.dtype) * factor - (ids == target) * half_scale(kept)",
        "forward_backward/test_vocabulary_parts.py::test_a_confident_token_has_the_gradient_of_its_own_target_to_the_last_digit",
    ),
    Mutation(
        "neighbours_gradients_keep_their_own_scale",
        "losses/cross_entropy_by_shares.py",
        "mask = shares.together(relative * mask)",
        "mask = shares.together(mask)",
        "forward_backward/test_head_by_shares.py::test_neighbours_whose_tokens_weigh_differently_each_scale_their_own",
    ),
    Mutation(
        "an_embeddings_gradient_is_added_at_once",
        "parallel/look_up.py",
        "return lax.scan(step, sums, (places, rows))[0]",
        "return step(sums, (places, rows))[0]",
        "parallel/test_columns.py::test_the_gradient_is_added_one_device_at_a_time",
    ),
    Mutation(
        "the_formula_counts_parts_alone",
        "planner/formula_tables.py",
        "if (across := _neighbours(config, sizes, kind)) is not None:",
        "if (across := None) is not None:",
        "planner/test_formula.py::test_a_head_by_shares_is_counted_as_it_is_scored",
    ),
    Mutation(
        "padding_of_a_share_counts",
        "parallel/shares.py",
        "return ((vocab, vocab + 1),) if self._padded(table) > table.shard.shape[table.vocabulary] else ()",
        "return ()",
        "forward_backward/test_head_by_shares.py::test_gradients_are_those_of_one_device",
    ),
    Mutation(
        "rows_of_a_share_are_apart",
        "parallel/shares.py",
        "places * number + own, vocab",
        "places // self.grid.across * number + own, vocab",
        "parallel/test_shares.py::test_neighbours_have_each_column_once",
    ),
    Mutation(
        "more_neighbours_than_memory_is_for",
        "parallel/shares.py",
        "_MOST_TOKENS = 1 / 3",
        "_MOST_TOKENS = 1",
        "parallel/test_shares.py::test_as_many_neighbours_as_send_the_fewest_bytes",
    ),
    Mutation(
        "log_probs_of_neighbours_keep_their_own_scale",
        "losses/log_probs_by_shares.py",
        "relative * of_log_probs,",
        "of_log_probs,",
        "forward_backward/test_head_by_shares.py::test_log_probs_and_entropies_are_scored_together_too",
    ),
    Mutation(
        "largest_of_one_part",
        "losses/part_scores.py",
        "total = jnp.sum(each.total * jnp.exp(each.top - top), axis=0)",
        "total = jnp.sum(each.total, axis=0)",
        "forward_backward/test_vocabulary_parts.py::test_gradients_are_those_of_one_device",
    ),
    Mutation(
        "all_parts_at_once",
        "forward_backward/execution.py",
        "return table if table.num_parts > 1 else None",
        "return None",
        "forward_backward/test_vocabulary_parts.py::test_no_table_exists_whole",
    ),
    Mutation(
        "end_waits_for_the_lost",
        "training/hosts.py",
        "                    leave_coordination()",
        "                    pass",
        "training/test_hosts.py::test_a_process_that_ends_early_is_not_waited_for",
    ),
    Mutation(
        "model_beyond_the_machine",
        "training/machine.py",
        "if memory is not None and count * itemsize > memory * mesh.size:",
        "if False:",
        "training/test_machine.py::test_a_size_beyond_the_machine_is_refused_before_the_text_is_read",
    ),
    Mutation(
        "programs_of_simulated_devices_are_kept",
        "training/compile_cache.py",
        'if configured is None and jax.default_backend() == "cpu" and jax.local_device_count() > 1:',
        "if False:",
        "training/test_compile_cache.py::test_programs_of_several_cpu_devices_are_not_kept_unless_it_is_asked_for",
    ),
    Mutation(
        "pinned_memory_is_not_raised",
        "__init__.py",
        "pinned_memory.prepare()",
        "pass",
        "platforms/test_pinned_memory.py::test_the_limit_is_set_as_soon_as_jaxfb_is_imported",
    ),
    Mutation(
        "a_lack_on_the_host_is_answered_as_one_of_the_device",
        "planner/too_large.py",
        "if pinned_memory.is_exhausted(error):",
        "if False:",
        "planner/test_too_large.py::test_a_lack_of_the_hosts_memory_is_answered_with_its_limit",
    ),
    Mutation(
        "lack_of_memory_is_a_traceback",
        "planner/too_large.py",
        "return of_device or isinstance(error, MemoryError)",
        "return of_device",
        "planner/test_too_large.py::test_a_command_without_memory_ends_with_the_table_and_not_with_a_traceback",
    ),
    Mutation(
        "a_tick_waits_for_the_device_that_idles",
        "planner/branches.py",
        ".argmax(1)",
        ".argmin(1)",
        "planner/test_branches.py::test_by_device_a_tick_takes_as_long_as_in_a_simulation",
    ),
    Mutation(
        "a_head_in_every_tick",
        "planner/hlo_cost.py",
        "if share is None or len(others) != 1:",
        "if True:",
        "planner/test_branches.py::test_a_head_counts_once_a_microbatch",
    ),
    Mutation(
        "a_plan_that_does_not_know_the_schedule",
        "planner/compiled.py",
        "TakenBranches(job.schedule.program) if job.schedule else None",
        "None",
        "planner/test_branches.py::test_a_head_counts_once_a_microbatch",
    ),
    Mutation(
        "branches_without_their_names",
        "forward_backward/pipeline.py",
        "with jax.named_scope(event):",
        'with jax.named_scope("event"):',
        "planner/test_branches.py::test_a_program_names_its_branches",
    ),
    Mutation(
        "formula_forgets_that_devices_wait_for_what_is_computed_again",
        "planner/formula_by_device.py",
        " + again * whole",
        "",
        "planner/test_formula.py::test_where_devices_differ_the_most_expensive_kind_decides",
    ),
    Mutation(
        "slots_in_any_order",
        "forward_backward/slot.py",
        "self.ordered(write(self.ordered(leaf), ",
        "self.ordered(write(leaf, ",
        "parallel/test_row_order.py::test_a_slot_is_written_and_read_in_the_order_of_rows",
    ),
    Mutation(
        "slots_of_one_chunk_in_the_order_of_rows",
        "forward_backward/pipeline.py",
        "self._layout.num_chunks > 1 and",
        "self._layout.num_chunks > 0 and",
        "parallel/test_row_order.py::test_pipelines_of_several_chunks_keep_the_order",
    ),
    Mutation(
        "sums_in_any_order_behind_an_event",
        "forward_backward/pipeline.py",
        "lambda given: same(do(same(given)))",
        "lambda given: do(same(given))",
        "parallel/test_row_order.py::test_sums_leave_both_branches_of_an_event_in_the_order_of_rows",
    ),
    Mutation(
        "formula_keeps_the_answer_of_an_mlp",
        "planner/counts.py",
        "return (width + 2 * middle / sizes.num_layers)",
        "return (width + 3 * middle / sizes.num_layers)",
        "planner/test_formula.py::test_selective_keeps_what_the_backward_reads",
    ),
    Mutation(
        "formula_forgets_what_waits_for_other_pieces",
        "planner/formula_memory.py",
        "return of_layers + waiting_bytes(config, sizes)",
        "return of_layers",
        "planner/test_formula.py::test_pieces_wait_for_one_another",
    ),
    Mutation(
        "formula_lets_early_pieces_wait_for_none",
        "planner/formula_time.py",
        "* blocks * waiting_turns(config) -",
        "* blocks -",
        "planner/test_formula.py::test_memory_and_time_of_real_sizes_on_tpus_are_near_the_compilers",
    ),
    Mutation(
        "memory_of_an_update_unchecked_on_cpus",
        "training/setup.py",
        "attribute_of(*_CHECK_PROGRAM)(config)",
        "None",
        "planner/test_host_fit.py::test_every_command_refuses_an_update_larger_than_what_is_free",
    ),
    Mutation(
        "formula_has_more_in_flight_than_there_is",
        "planner/formula_memory.py",
        "return min(found, num_microbatches(config) + 1 / config.chunks)",
        "return found",
        "planner/test_formula.py::test_no_more_microbatches_are_in_flight_than_there_are",
    ),
    Mutation(
        "formula_hides_communication_beside_nothing",
        "planner/formula_time.py",
        "return max(exposed_share(config, sizes, topology) * wire, least - work)",
        "return exposed_share(config, sizes, topology) * wire",
        "planner/test_formula.py::test_no_more_communication_is_hidden_than_there_is_work",
    ),
    Mutation(
        "formula_waits_for_all_that_is_not_gathered_ahead",
        "planner/formula_time.py",
        "in_turn = _EXPOSED_IN_TURN_OF_SHARDS if config.mesh.tensor > 1 else _EXPOSED_IN_TURN",
        "in_turn = 1.0",
        "planner/test_formula.py::test_memory_and_time_of_real_sizes_on_tpus_are_near_the_compilers",
    ),
    Mutation(
        "search_compares_unlike_answers",
        "planner/search.py",
        "alone = given.verdict.compiled is not None and all(",
        "alone = False and all(",
        "planner/test_search.py::test_a_stopped_search_keeps_what_it_found_and_goes_on_from_there",
    ),
    Mutation(
        "search_lists_layouts_that_gain_nothing",
        "planner/search.py",
        "if counted.total <= (1 - LESS) * smallest.get(kind, math.inf):",
        "if True:",
        "planner/test_search.py::test_a_slower_layout_of_a_kind_is_listed_if_it_is_smaller",
    ),
    Mutation(
        "search_compiles_the_larger_of_two_alike",
        "planner/search.py",
        "best = min(alike, key=lambda one: one.verdict.needed)",
        "best = ranked[0]",
        "planner/test_search.py::test_the_smallest_of_those_as_fast_as_the_fastest_is_compiled_first",
    ),
    Mutation(
        "auto_mesh_forgets_the_run",
        "training/open_mesh.py",
        "if needed == there:",
        "if needed != there:",
        "planner/test_auto.py::test_a_run_saves_its_layout_and_keeps_it",
    ),
    Mutation(
        "auto_mesh_takes_all_memory",
        "planner/auto.py",
        "for spare in (MARGIN, 0.0):",
        "for spare in (0.0, MARGIN):",
        "planner/test_auto.py::"
        "test_a_slower_layout_is_taken_where_the_fastest_fits_more_closely_than_the_formula_can_tell",
    ),
    Mutation(
        "layouts_leave_parameters_whole",
        "planner/candidates.py",
        "if hidden_size % size == 0]",
        "if size]",
        "planner/test_auto.py::test_fsdp_has_a_size_that_cuts_the_parameters",
    ),
    Mutation(
        "grouped_products_count_all_space",
        "planner/kernels.py",
        "return share * _grouped_flops(*operands[_GROUPED_TABLES :",
        "return _grouped_flops(*operands[_GROUPED_TABLES :",
        "planner/test_routing.py::test_a_grouped_product_is_known_by_what_it_is_given",
    ),
    Mutation(
        "failed_save_swallowed",
        "checkpoint/store.py",
        "            raise self._cannot_write(self._pending_step, error) from error",
        "            return",
        "checkpoint/test_checkpoint.py::test_a_failed_write_is_raised_and_the_next_one_works",
    ),
)


def copy_with(mutation: Mutation | None, directory: Path) -> None:
    """The package and its tests in `directory`, with one mistake in it, or none."""
    shutil.copytree(ROOT / "jaxfb", directory / "jaxfb", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "tests", directory / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    for name in LINKED:
        (directory / name).symlink_to(ROOT / name)
    if mutation is not None:
        target = directory / "jaxfb" / mutation.file
        target.write_text(mutation.applied(target.read_text()))


def run(tests: list[str], directory: Path, seconds: float = 600) -> tuple[int, str]:
    """(exit status, end of the output) of pytest on these tests of a copy."""
    environment = {**os.environ, "PYTHONPATH": str(directory)}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow", "-p", "no:cacheprovider"]
    command += [f"tests/{test}" for test in tests]
    try:
        done = subprocess.run(
            command, cwd=directory, env=environment, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return 1, f"took more than {seconds} s"  # a mistake that makes a test hang is noticed
    return done.returncode, done.stdout[-2000:]


def outcome(mutation: Mutation) -> str:
    """ "caught", "SURVIVED", or what went wrong: pytest's 1 means that a test failed, 0 that all passed."""
    with tempfile.TemporaryDirectory() as directory:
        copy_with(mutation, Path(directory))
        status, output = run([mutation.test], Path(directory))
    return {0: "SURVIVED", 1: "caught"}.get(status, f"BROKEN ({status}): {output}")


def main(words: list[str]) -> int:
    """Prints a line for each mutation; the exit status is the number of those that were not caught."""
    chosen = [one for one in MUTATIONS if not words or any(word in one.name for word in words)]
    missed = 0
    for one in chosen:
        found = outcome(one)
        missed += found != "caught"
        print(f"{one.name:<42} {found:<10} {one.test}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} caught")
    return min(missed, 99)


if __name__ == "__main__":
    if "--list" in sys.argv:
        print("\n".join(f"{one.name:<42} {one.file:<34} {one.test}" for one in MUTATIONS))
        sys.exit()
    sys.exit(main(sys.argv[1:]))
