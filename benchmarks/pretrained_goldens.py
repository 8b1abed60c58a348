"""Makes the tiny models of `tests/golden/hf_*_tiny` that have an expected.json, with the numbers of transformers.

    python benchmarks/pretrained_goldens.py tests/golden olmo2 gemma      # or no names: all that are listed below

and, named changed_keys, the logits of some of them with other keys in config.json.

Needs torch and transformers, which the tests do not. Weights are stored in float32 and computed with in float64, but
for what transformers computes in float32 whatever the dtype: norms, rotary tables, a router's softmax.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import modeling_layers

COMMON = {
    "vocab_size": 37,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
ROPE = {"rope_theta": 10000.0, "rope_type": "default"}
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16,
    "mscale": 1.0, "mscale_all_dim": 0.7,
}  # fmt: skip
DEEPSEEK = {
    "kv_lora_rank": 10, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 8, "first_k_dense_replace": 0,
    "moe_intermediate_size": 12, "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3, "n_group": 4,
    "topk_group": 2, "num_key_value_heads": 4, "num_nextn_predict_layers": 0, "routed_scaling_factor": 1.5,
}  # fmt: skip
MODELS = {
    "llama_bias": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 6}),
    "phi3": ("Phi3", {}),
    "phi4": (
        "Phi3",
        {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.7}},
    ),
    "olmo2": ("Olmo2", {}),
    "deepseek_v3": ("DeepseekV3", {**DEEPSEEK, "q_lora_rank": 12}),
    "deepseek_v3_dense": (
        "DeepseekV3",
        {**DEEPSEEK, "q_lora_rank": 12, "first_k_dense_replace": 1, "num_hidden_layers": 3},
    ),
    "deepseek_v3_yarn": (
        "DeepseekV3",
        {
            **DEEPSEEK,
            "q_lora_rank": None,
            "rope_interleave": False,
            "rope_parameters": YARN,
            "norm_topk_prob": False,
        },
    ),
    "gemma": ("Gemma", {"head_dim": 8}),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 8,
            "num_hidden_layers": 3,
            "sliding_window": 5,
            "query_pre_attn_scalar": 6,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "Gemma3Text",
        {
            "head_dim": 8,
            "num_hidden_layers": 5,
            "sliding_window": 5,
            "query_pre_attn_scalar": 12,
            "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
            "rope_parameters": {
                "sliding_attention": ROPE,
                "full_attention": {"rope_theta": 100000.0, "rope_type": "linear", "factor": 8.0},
            },
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            "head_dim": 8,
            "num_hidden_layers": 4,
            "sliding_window": 5,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "hidden_size": 16,
            "intermediate_size": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000.0,
                "factor": 4.0,
                "beta_fast": 4.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "qwen3_moe_sparse": (
        "Qwen3Moe",
        {
            "num_hidden_layers": 5,
            "decoder_sparse_step": 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "head_dim": 8,
        },
    ),
    "smollm3": (
        "SmolLM3",
        {
            "num_hidden_layers": 5,
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 6,
        },
    ),
}
# what else a config.json may hold, with the weights of another tiny model: name -> (its directory, the keys)
FACTORS = {**ROPE, "short_factor": [1.0, 1.2, 1.5], "long_factor": [1.5, 3.0, 6.0], "rope_type": "longrope"}
LENGTH = "original_max_position_embeddings"
CHANGED = {
    "gelu": ("hf_llama_tiny", {"hidden_act": "gelu"}),
    "gelu_tanh": ("hf_qwen2_tiny", {"hidden_act": "gelu_pytorch_tanh"}),
    "final_softcap": ("hf_gemma3_tiny", {"final_logit_softcapping": 2.0}),
    "short_documents": ("hf_phi3_tiny", {"rope_parameters": FACTORS, LENGTH: 32}),
    "long_documents": ("hf_phi3_tiny", {"rope_parameters": FACTORS, LENGTH: 16}),
}  # fmt: skip


def changed_keys(directory: Path) -> None:
    """Writes hf_changed_keys.json."""
    cases = []
    for name, (weights, keys) in CHANGED.items():
        torch.manual_seed(0)
        config = transformers.AutoConfig.from_pretrained(directory / weights, **copy.deepcopy(keys))
        model = transformers.AutoModelForCausalLM.from_pretrained(
            directory / weights, config=config, attn_implementation="eager"
        )
        tokens, positions = torch.randint(0, COMMON["vocab_size"], (2, 20)), [0, 1, 7, 18, 19]
        with torch.no_grad():
            logits = rounded(model.eval().double()(tokens).logits[:, positions])
        inputs = {"model_dir": weights, "config": keys, "input_ids": tokens.tolist(), "positions": positions}
        cases.append({"name": name, "inputs": inputs, "expected": {"logits": logits}})
    function = "from_pretrained(model_dir, config=config.json with these keys).double()(input_ids).logits"
    source = {"package": "transformers", "version": transformers.__version__, "function": function}
    (directory / "hf_changed_keys.json").write_text(json.dumps({"source": source, "cases": cases}) + "\n")


def make(directory: Path, name: str) -> None:
    kind, options = MODELS[name]
    torch.manual_seed(sum(name.encode()))
    config = getattr(transformers, f"{kind}Config")(**{**COMMON, **options})
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    for leaf, weight in model.named_parameters():
        center = (
            1.0 if leaf.endswith("norm.weight") and kind not in ("Gemma", "Gemma2", "Gemma3Text") else 0.0
        )
        weight.data = center + torch.randn_like(weight) * (0.3 if weight.ndim > 1 or center else 0.2)
    for leaf, buffer in model.named_buffers():
        if leaf.endswith("correction_bias"):
            buffer.copy_(torch.randn_like(buffer) * 0.2)
    target = directory / f"hf_{name}_tiny"
    model.save_pretrained(target)
    (target / "generation_config.json").unlink(missing_ok=True)
    (target / "expected.json").write_text(json.dumps(numbers(model.double())) + "\n")


def multi_token(directory: Path) -> None:
    """Makes hf_deepseek_v3_mtp_tiny, whose third layer predicts one token further (transformers' MtpLayer)."""
    torch.manual_seed(7)
    options = {**DEEPSEEK, "q_lora_rank": 12, "num_hidden_layers": 3, "num_nextn_predict_layers": 1}
    config = transformers.DeepseekV3Config(**{**COMMON, **options})
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    last = model.model.layers[2]
    further = modeling_layers.MtpLayer(config, type(last), type(model.model.norm), 2)
    further.mtp_block = last
    for leaf, weight in [*model.named_parameters(), *further.named_parameters()]:
        center = 1.0 if leaf.endswith("norm.weight") else 0.0
        weight.data = center + torch.randn_like(weight) * 0.3
    for layer in model.model.layers:
        layer.mlp.gate.e_score_correction_bias.copy_(torch.randn(config.n_routed_experts) * 0.2)
    target = directory / "hf_deepseek_v3_mtp_tiny"
    model.save_pretrained(target)
    (target / "generation_config.json").unlink(missing_ok=True)
    own = {"enorm": further.enorm, "hnorm": further.hnorm, "eh_proj": further.eh_proj}
    own |= {"shared_head.norm": further.post_norm, "embed_tokens": model.model.embed_tokens}
    own |= {"shared_head.head": model.lm_head}
    names = {f"model.layers.2.{name}.weight": module for name, module in own.items()}
    stored = load_file(target / "model.safetensors")
    stored |= {name: module.weight.detach().clone() for name, module in names.items()}
    save_file(stored, target / "model.safetensors", metadata={"format": "pt"})
    values = {**json.loads((target / "config.json").read_text()), "num_hidden_layers": 2}
    (target / "config.json").write_text(json.dumps(values, indent=2) + "\n")

    model.double(), further.double()
    config.num_hidden_layers = model.config.num_hidden_layers = 2
    tokens = torch.randint(0, COMMON["vocab_size"], (2, 20))
    hidden = model.model(tokens).last_hidden_state
    places = torch.arange(1, 20)[None].expand(2, -1)
    seen = torch.full((19, 19), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    turned = model.model.rotary_emb(hidden[:, 1:], places)
    embedded = model.model.embed_tokens(tokens[:, 1:])
    answer = model.lm_head(further(embedded, hidden[:, :-1], turned, seen, places, None))
    losses = [
        cross_entropy(model.lm_head(hidden)[:, :-1], tokens[:, 1:]),
        cross_entropy(answer[:, :-1], tokens[:, 2:]),
    ]
    (losses[0] + 0.3 * losses[1]).backward()
    norms = {name: module.weight.grad.norm().item() for name, module in names.items()}
    norms = {
        name: norm for name, norm in norms.items() if "embed_tokens" not in name and "head.head" not in name
    }
    config.num_hidden_layers = model.config.num_hidden_layers = 3
    norms |= gradient_norms(model)
    found = {
        "transformers": transformers.__version__,
        "input_ids": tokens.tolist(),
        "losses": [round(loss.item(), 10) for loss in losses],
        "grad_norms": {name: float(f"{norm:.8g}") for name, norm in norms.items()},
    }
    (target / "multi_token.json").write_text(json.dumps(found) + "\n")


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return -logits.log_softmax(-1).gather(-1, targets[..., None]).mean()


def numbers(model: torch.nn.Module) -> dict:
    tokens = torch.randint(0, COMMON["vocab_size"], (2, 20))
    logits = model(tokens).logits
    log_probs = logits[:, :-1].log_softmax(-1)
    loss = -log_probs.gather(-1, tokens[:, 1:, None]).mean()
    loss.backward()
    norms = gradient_norms(model)
    positions = [0, 1, 7, 18, 19]
    return {
        "transformers": transformers.__version__,
        "input_ids": tokens.tolist(),
        "positions": positions,
        "logits": rounded(logits[:, positions]),
        "loss": round(loss.item(), 10),
        "grad_norms": {name: float(f"{norm:.8g}") for name, norm in norms.items()},
    }


def gradient_norms(model: torch.nn.Module) -> dict[str, float]:
    """Returns the norms by the names of the tensors that are stored, which may be parts of the model's own."""
    for weight in model.parameters():
        weight.data = torch.zeros_like(weight) if weight.grad is None else weight.grad
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        stored = load_file(Path(directory) / "model.safetensors")
    return {name: grad.norm().item() for name, grad in stored.items() if "correction_bias" not in name}


def rounded(x: torch.Tensor) -> list:
    return [[[round(one, 8) for one in row] for row in rows] for rows in x.tolist()]


if __name__ == "__main__":
    others = {"changed_keys": changed_keys, "deepseek_v3_mtp": multi_token}
    for each in sys.argv[2:] or [*MODELS, *others]:
        others.get(each, partial(make, name=each))(Path(sys.argv[1]))
