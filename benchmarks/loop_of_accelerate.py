"""The plain Accelerate loop of a transformers Llama, driven by `loops.py`; needs torch_requirements.txt and no JAX.

    python loop_of_accelerate.py JOB_FOLDER [compiled]

Answers each line it reads with one update: `accelerator.accumulate` over the microbatches, the loss summed and divided
by the targets of the whole update (`num_items_in_batch`, as the transformers Trainer does since 4.46), clipping, fused
AdamW, LambdaLR with warmup. Attention is SDPA; float32, or bfloat16 by autocast; "compiled" is `torch.compile`.
"""

import json
import resource
import sys
import time
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from torch.optim.lr_scheduler import LambdaLR
from transformers import LlamaConfig, LlamaForCausalLM

IGNORED = -100
OUTER = {"embed.embedding": "model.embed_tokens", "norm.scale": "model.norm", "head.kernel": "lm_head"}
LAYER = {
    "attention_norm.scale": "input_layernorm",
    "mlp_norm.scale": "post_attention_layernorm",
    **{
        f"attention.{name}.kernel": f"self_attn.{name[0]}_proj"
        for name in ("query", "key", "value", "output")
    },
    **{f"mlp.{name}.kernel": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}


class Run:
    """A prepared model, optimizer and scheduler, and the microbatches of each batch."""

    def __init__(self, folder: Path, compiled: bool):
        job = json.loads((folder / "job.json").read_text())
        self.num_microbatches, self.max_norm = job["num_microbatches"], job["optimizer"]["max_grad_norm"]
        self.accelerator = Accelerator(
            cpu=job["device"] == "cpu",
            mixed_precision={"float32": "no", "bfloat16": "bf16"}[job["dtype"]],
            gradient_accumulation_steps=self.num_microbatches,
            dynamo_backend="inductor" if compiled else "no",
        )
        with np.load(folder / "weights.npz") as weights:
            model = llama(job["model"], weights)
        optimizer, scheduler = adamw(model, job["optimizer"])
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(model, optimizer, scheduler)
        arrays = np.load(folder / "batches.npz")
        batches = zip(arrays["tokens"], arrays["lengths"], strict=True)
        self.batches = [self.collated(tokens, lengths, compiled) for tokens, lengths in batches]

    def collated(self, tokens, lengths, full_length: bool) -> list[dict]:
        """Microbatches as a padding collator makes them; a mask only where there is padding."""
        parts = zip(
            np.split(tokens, self.num_microbatches), np.split(lengths, self.num_microbatches), strict=True
        )
        uneven = bool((lengths < tokens.shape[1]).any())
        return [padded(*part, tokens.shape[1] if full_length else part[1].max(), uneven) for part in parts]

    def update(self, batch: list[dict]) -> float:
        """One optimizer step over all its microbatches; the loss of all of them."""
        device = self.accelerator.device
        targets = torch.stack([(part["labels"][:, 1:] != IGNORED).sum() for part in batch]).sum().to(device)
        total = torch.zeros((), device=device)
        for part in batch:
            part = {name: value.to(device, non_blocking=True) for name, value in part.items()}
            with self.accelerator.accumulate(self.model):
                loss = self.model(**part, use_cache=False, num_items_in_batch=targets).loss
                # backward divides by the number of microbatches, but the targets of the update have divided already
                self.accelerator.backward(loss * self.num_microbatches)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), self.max_norm)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            total += loss.detach()
        return total.item()

    def peak_bytes(self) -> int:
        if self.accelerator.device.type == "cuda":
            return torch.cuda.max_memory_allocated()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def llama(sizes: dict, weights) -> LlamaForCausalLM:
    """The Llama of a `TransformerConfig`, float32."""
    config = LlamaConfig(
        vocab_size=sizes["vocab_size"], hidden_size=sizes["hidden_size"], intermediate_size=sizes["mlp_size"],
        num_hidden_layers=sizes["num_layers"], num_attention_heads=sizes["num_heads"],
        num_key_value_heads=sizes["num_kv_heads"], head_dim=sizes["head_size"], rms_norm_eps=sizes["norm_eps"],
        tie_word_embeddings=sizes["tied_embeddings"], max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": sizes["rope_theta"]},
        attn_implementation="sdpa",
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    tensors = {
        f"{name}.weight": turned(ours, weights[ours]) for ours, name in OUTER.items() if ours in weights
    }
    for ours, name in LAYER.items():
        stacked = weights[f"layers.{ours}"]
        tensors |= {f"model.layers.{i}.{name}.weight": turned(ours, layer) for i, layer in enumerate(stacked)}
    if sizes["tied_embeddings"]:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model.load_state_dict(tensors)
    return model.train()


def turned(ours: str, array: np.ndarray) -> torch.Tensor:
    """Our matrices are [in, out], theirs [out, in]."""
    return torch.from_numpy(array.T if ours.endswith("kernel") else array)


def adamw(model: LlamaForCausalLM, settings: dict):
    """Fused AdamW that decays matrices but for the embedding, and a linear rise and fall of the learning rate."""
    decays = {name: p.ndim >= 2 and "embed" not in name for name, p in model.named_parameters()}
    groups = [
        {"params": [p for name, p in model.named_parameters() if decays[name] is kind], "weight_decay": decay}
        for kind, decay in ((True, settings["weight_decay"]), (False, 0.0))
    ]
    betas = (settings["b1"], settings["b2"])
    optimizer = torch.optim.AdamW(groups, settings["learning_rate"], betas, settings["eps"], fused=True)
    warmup, total = settings["warmup"], settings["total"]
    scheduler = LambdaLR(
        optimizer, lambda at: at / warmup if at < warmup else (total - at) / (total - warmup)
    )
    return optimizer, scheduler


def padded(tokens: np.ndarray, lengths: np.ndarray, width: int, masked: bool) -> dict[str, torch.Tensor]:
    real = torch.from_numpy(np.arange(width) < lengths[:, None])
    ids = torch.from_numpy(tokens[:, :width]).long()
    made = {"input_ids": ids, "labels": ids.masked_fill(~real, IGNORED)}
    return made | ({"attention_mask": real.long()} if masked else {})


def forget_peak() -> None:
    """Resident memory has its peak from here on: without what compilation needed."""
    path = Path("/proc/self/clear_refs")
    if path.exists():
        path.write_text("5")


def main() -> None:
    torch.set_float32_matmul_precision("high")
    run, updates = Run(Path(sys.argv[1]), "compiled" in sys.argv[2:]), 0
    while sys.stdin.readline():
        began = time.perf_counter()
        try:
            loss = run.update(run.batches[updates % len(run.batches)])
        except torch.OutOfMemoryError:
            print("{}", flush=True)
            break
        seconds, updates = time.perf_counter() - began, updates + 1
        if updates <= len(run.batches):
            forget_peak()
        print(json.dumps({"loss": loss, "seconds": seconds, "peak_bytes": run.peak_bytes()}), flush=True)


if __name__ == "__main__":
    main()
