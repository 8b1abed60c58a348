"""What a CUDA GPU is given to run, as far as one can tell without it: the program lowered for it, not its numbers."""

import re

import jax
import jax.numpy as jnp
import pytest

import jaxfb
from jaxfb.models.attention import choose_backend, packed_attention
from jaxfb.models.attention_kernels import cudnn
from jaxfb.models.config import TransformerConfig
from jaxfb.models.transformer import init_params, transformer

ROWS, LENGTH, HEADS, KV_HEADS, SIZE = 2, 32, 4, 2, 16
MODEL = TransformerConfig(
    vocab_size=32, num_layers=3, hidden_size=HEADS * SIZE, num_heads=HEADS, num_kv_heads=KV_HEADS, mlp_size=32,
    attention="cudnn",
)  # fmt: skip
FORWARD, BACKWARD = r"__cudnn\$fmha\w*Softmax\(", r"__cudnn\$fmha\w*SoftmaxBackward\("


@pytest.fixture(autouse=True)
def cudnn_is_there(monkeypatch):
    """Its version is asked for while tracing; nothing else of it is, before the program is compiled."""
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91000)


def lowered_for_cuda(function, *arguments) -> str:
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def calls(text: str) -> tuple[int, int]:
    """Calls of flash attention in the program's text: forward, backward."""
    return len(re.findall(FORWARD, text)), len(re.findall(BACKWARD, text))


def attention_program(
    dtype=jnp.bfloat16, segments=False, backend="cudnn", kv_heads=KV_HEADS, window=None
) -> str:
    """Of attention and its gradient."""

    def loss(query, key, value, segments):
        out = packed_attention(query, key, value, segments=segments, backend=backend, window=window)
        return out.astype(jnp.float32).sum()

    query, key = (jax.ShapeDtypeStruct((ROWS, LENGTH, heads, SIZE), dtype) for heads in (HEADS, kv_heads))
    told = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32) if segments else None
    return lowered_for_cuda(jax.grad(loss, argnums=(0, 1, 2)), query, key, key, told)


def update_program(remat: str, packed: bool = False) -> str:
    """Of a model's gradients on one device."""
    fb = jaxfb.get_forward_backward_func(compute_dtype="bfloat16", remat=remat)
    plan, tokens = jaxfb.BatchPlan(rows=4, rows_per_microbatch=2), jnp.zeros((4, LENGTH), jnp.int32)
    batch = {"tokens": tokens, "targets": tokens, "loss_mask": jnp.ones((4, LENGTH), jnp.float32)}
    batch |= {"segments": tokens + 1} if packed else {}
    params = jax.eval_shape(lambda: init_params(MODEL, jax.random.key(0)))
    return lowered_for_cuda(lambda p, b: fb(transformer(MODEL), p, b, plan).grads, params, batch)


@pytest.mark.parametrize("kv_heads", [HEADS, KV_HEADS, 1])
def test_causal_rows_are_flash_attention_without_a_mask(kv_heads):
    text = attention_program(kv_heads=kv_heads)
    assert calls(text) == (1, 1)
    assert text.count("mask_type\\22: \\22CAUSAL") == 2 and "Bias" not in text
    assert f"{LENGTH}x{LENGTH}x" not in text  # neither scores nor a mask
    assert f"tensor<{ROWS}x{LENGTH}x{HEADS}x{SIZE}xbf16>" in text


def test_packed_rows_are_flash_attention_with_a_bias_of_one_head():
    text = attention_program(segments=True)
    assert calls(text) == (1, 1) and text.count("mask_type\\22: \\22CAUSAL") == 2
    assert f"tensor<{ROWS}x1x{LENGTH}x{LENGTH}xbf16>" in text
    assert f"tensor<{ROWS}x{HEADS}x{LENGTH}x{LENGTH}x" not in text


def test_long_packed_rows_are_blocks_that_keep_no_bias(monkeypatch):
    """Four blocks in a loop and one after them, of each of the two groups; run forward once, also for the backward."""
    monkeypatch.setattr(cudnn, "LARGEST_WHOLE", 0)
    monkeypatch.setattr(cudnn, "GROUPS", 2)
    monkeypatch.setattr(cudnn, "block_size", lambda query, keys: 6)
    text = attention_program(segments=True)
    assert calls(text) == (4, 4) and text.count("mask_type\\22: \\22NO_MASK") == 8
    assert f"x{LENGTH}x{LENGTH}x" not in text
    of_blocks = rf"tensor<(\d+x)*{ROWS}x1x(4|6)x({LENGTH // 2}|{LENGTH})xbf16>"
    assert {found[1] for found in re.finditer(of_blocks, text)} == {None}  # no loop stacks those of its turns


@pytest.mark.parametrize("remat, forward", [("none", 4), ("selective", 4), ("full", 8)])
def test_an_update_runs_blocks_forward_once_unless_layers_are_recomputed_whole(monkeypatch, remat, forward):
    monkeypatch.setattr(cudnn, "LARGEST_WHOLE", 0)
    monkeypatch.setattr(cudnn, "GROUPS", 4)
    text = update_program(remat, packed=True)
    assert calls(text) == (forward, 4)


def test_a_window_is_the_kernels_own_or_in_the_bias_of_packed_rows():
    text = attention_program(window=7)
    assert calls(text) == (1, 1) and len(re.findall(r"sliding_window_length\\22: 7\b", text)) == 2
    assert f"{LENGTH}x{LENGTH}x" not in text
    packed = attention_program(segments=True, window=7)
    assert calls(packed) == (1, 1) and len(re.findall(r"sliding_window_length\\22: 0\b", packed)) == 2


def test_auto_without_a_gpu_is_xla():
    assert calls(attention_program(backend="auto")) == (0, 0)


@pytest.mark.parametrize(
    "dtype, length, size, packed, nearest",
    [
        (jnp.float32, 32, 64, False, "takes bfloat16 and float16, not float32; use compute_dtype='bfloat16'"),
        (jnp.bfloat16, 32, 20, False, "multiples of 8 up to 128, not 20; use head_size=16"),
        (jnp.bfloat16, 32, 192, False, "up to 128, not 192; use head_size=128"),
        (jnp.bfloat16, 31, 64, True, "even length, not 31; use a sequence length of 32"),
    ],
)
def test_asking_for_cudnn_where_it_cannot_run_is_refused(dtype, length, size, packed, nearest):
    query = jax.ShapeDtypeStruct((2, length, 4, size), dtype)
    with pytest.raises(ValueError, match=re.escape(nearest)):
        choose_backend("cudnn", query, query, packed=packed)
    assert choose_backend("auto", query, query, packed=packed) == "xla"


@pytest.mark.parametrize("remat, forward", [("none", 1), ("selective", 1), ("full", 2)])
def test_an_update_runs_flash_attention_forward_once_unless_layers_are_recomputed_whole(remat, forward):
    assert calls(update_program(remat)) == (forward, 1)


@pytest.mark.parametrize("sizes", [{"fsdp": 4}, {"data": 2, "tensor": 2}])
@pytest.mark.parametrize("packed", [False, True])
def test_on_a_mesh_a_device_runs_flash_attention_on_its_own_heads(sizes, packed):
    """Left to XLA's partitioner beside an automatic axis, of size 1 too, it does not compile for several GPUs."""
    mesh = jaxfb.make_mesh(**sizes)
    fb = jaxfb.get_forward_backward_func(mesh, compute_dtype="bfloat16")
    plan = jaxfb.BatchPlan(rows=4, rows_per_microbatch=1, data_parallel=4 // mesh.shape["tensor"])
    tokens = jnp.zeros((4, LENGTH), jnp.int32)
    batch = {"tokens": tokens, "targets": tokens, "loss_mask": jnp.ones((4, LENGTH), jnp.float32)}
    batch |= {"segments": tokens + 1} if packed else {}
    params = jax.eval_shape(lambda: init_params(MODEL, jax.random.key(0)))
    text = lowered_for_cuda(lambda p, b: fb(transformer(MODEL), p, b, plan).grads, params, batch)
    assert calls(text) == (1, 1) and "CustomSPMDPartitioning" not in text
    assert f"tensor<1x{LENGTH}x{HEADS // mesh.shape['tensor']}x{SIZE}xbf16>" in text
