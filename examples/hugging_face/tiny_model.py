"""Makes a directory of Hugging Face files with a tiny random Llama, to try the commands of docs/pretrained.md with.

python examples/hugging_face/tiny_model.py runs/tiny-llama

In its place stands, with a real model, the directory that was downloaded. It has config.json, model.safetensors, a
byte-level tokenizer.json, a chat template and a generation config. Neither torch nor transformers is needed.
"""

import json
import sys
from pathlib import Path

import jax
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxfb.models.config import TransformerConfig
from jaxfb.models.transformer import init_params
from jaxfb.pretrained import export_model
from jaxfb.pretrained.architectures import describe

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make(directory: Path, **sizes) -> Path:
    """Writes the files; sizes: fields of `TransformerConfig` that are to differ."""
    given = {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "mlp_size": 128}
    config = TransformerConfig(vocab_size=320, **{**given, **sizes})
    export_model(directory, init_params(config, jax.random.key(0), jax.numpy.float32), describe(config))
    (directory / "tokenizer.json").write_text(_bytes_with(SPECIAL).to_str())
    ends = {
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(ends))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, 258]}))
    return directory


def _bytes_with(special: tuple[str, ...]) -> Tokenizer:
    """Makes a tokenizer whose ids 0 to 255 are bytes, and then the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(special))
    return made


if __name__ == "__main__":
    print(f"wrote {make(Path(sys.argv[1]))}")
