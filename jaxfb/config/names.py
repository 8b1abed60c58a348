"""Lists what people who come from other trainers type, and what it is called here."""

from __future__ import annotations

# What people coming from other trainers type, and what it is called here.
ALIASES = {
    "mesh.pp": "mesh.pipe",
    "mesh.dp": "mesh.data",
    "mesh.ep": "mesh.expert",
    "mesh.cp": "mesh.context",
    "mesh.tp": "mesh.tensor",
}

SYNONYMS = {
    "batch_size": "batch.rows",
    "size": "batch.rows",
    "per_device_train_batch_size": "batch.rows_per_microbatch",
    "per_device_batch_size": "batch.rows_per_microbatch",
    "global_batch_size": "batch.rows",
    "micro_batch_size": "batch.rows_per_microbatch",
    "microbatch_size": "batch.rows_per_microbatch",
    "gradient_accumulation_steps": "batch.num_microbatches",
    "optimizer_sharding": "optimizer.sharding",
    "lr": "optimizer.learning_rate",
    "peak": "optimizer.learning_rate",
    "clip_grad": "optimizer.max_grad_norm",
    "grad_clip": "optimizer.max_grad_norm",
    "zero": "optimizer.sharding",
    "steps": "run.updates",
    "max_steps": "run.updates",
    "train_iters": "run.updates",
    "num_train_epochs": "run.epochs",
    "output_dir": "run.dir",
    "eval_every": "eval.every",
    "save_every": "checkpoint.every",
    "log_every": "log.every",
    "dtype": "precision.compute_dtype",
    "warmup_steps": "lr.warmup",
    "num_chunks": "chunks",
    "num_pieces": "parallel.pieces",
    "iterations_to_skip": "run.skip_updates",
    "exit_duration_in_mins": "run.minutes",
    "exit_interval": "run.stop_at",
    "seed": "run.seed",
    "stage": "mesh.pipe",
    "mesh.model": "mesh.tensor",
    "mesh.sequence": "mesh.context",
    **{
        f"{name}_parallel{ending}": f"mesh.{axis}"
        for ending in ("", "ism", "_size", "_degree")
        for name, axis in {
            "pipeline": "pipe",
            "pipeline_model": "pipe",
            "data": "data",
            "expert": "expert",
            "expert_model": "expert",
            "context": "context",
            "tensor": "tensor",
            "tensor_model": "tensor",
        }.items()
    },
    **dict.fromkeys(
        ("seq_len", "seq_length", "block_size", "context_length", "max_length"), "data.sequence_length"
    ),
    **dict.fromkeys(("column", "text_column", "text_key", "content_key"), "data.text_field"),
    **dict.fromkeys(("d_model", "n_embd", "hidden_dim", "dim"), "model.hidden_size"),
    **dict.fromkeys(("n_layer", "n_layers", "depth"), "model.num_layers"),
    **dict.fromkeys(("n_head", "n_heads"), "model.num_heads"),
}

# What arguments of optimizers are called, here and in other libraries -> their key in optimizer.options.
OPTIMIZER_OPTIONS = {
    **{name: name for name in ("b1", "b2", "eps", "momentum", "nesterov")},
    **dict.fromkeys(("beta1", "adam_beta1"), "b1"),
    **dict.fromkeys(("beta2", "adam_beta2"), "b2"),
    **dict.fromkeys(("adam_eps", "epsilon"), "eps"),
}

# What verl calls the numbers of a rollout.
POLICY_SYNONYMS = {
    "train_batch_size": "rollout.prompts",
    "n": "rollout.samples_per_prompt",
    "ppo_mini_batch_size": "rollout.rows_per_update",
    "ppo_epochs": "rollout.epochs",
    "ppo_micro_batch_size_per_gpu": "plans.train.rows_per_microbatch",
    "log_prob_micro_batch_size_per_gpu": "plans.logprob_old.rows_per_microbatch",
    "forward_micro_batch_size_per_gpu": "plans.value.rows_per_microbatch",
    "ppo_max_token_len_per_gpu": "plans.train.max_tokens_per_microbatch",
    "clip_ratio": "policy.options",
    "kl_loss_coef": "policy.kl_coef",
    "entropy_coeff": "policy.entropy_coef",
    "loss_agg_mode": "policy.aggregation",
    "adv_estimator": "advantage.name",
    "remat_policy": "parallel.remat",
}
