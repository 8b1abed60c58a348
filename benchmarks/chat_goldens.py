"""Makes tests/golden/chat_masks.json: which tokens of a conversation transformers counts as the assistant's.

    python benchmarks/chat_goldens.py tests/golden

Needs transformers, which the tests do not. The templates are those of chat_templates.json, and Phi's, with the tag
{% generation %} around what the assistant writes; transformers returns the mask of what stands in it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import tokenizers
import transformers

PHI = (
    "{% for message in messages %}{% if message['role'] == 'system' %}{{'<|system|>\\n' + message['content'] + "
    "'<|end|>\\n'}}{% elif message['role'] == 'user' %}{{'<|user|>\\n' + message['content'] + '<|end|>\\n'}}"
    "{% elif message['role'] == 'assistant' %}{{'<|assistant|>\\n'}}{% generation %}{{message['content'] + '<|end|>'}}"
    "{% endgeneration %}{{'\\n'}}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}"
    "{% endif %}"
)
ADDED = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
# what a template writes of an answer -> the same with the tag
TAGGED = {
    "llama3": (
        "+ message['content'] | trim + '<|eot_id|>' }}",
        "}}{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] | trim + '<|eot_id|>' }}"
        "{% endgeneration %}{% else %}{{ message['content'] | trim + '<|eot_id|>' }}{% endif %}",
    ),
    "chatml": ("", ""),
    "mistral": (
        '{{- " " + message["content"]|trim + eos_token }}',
        '{% generation %}{{- " " + message["content"]|trim + eos_token }}{% endgeneration %}',
    ),
    "gemma": (
        "+ message['content'] | trim + '<end_of_turn>\\n' }}",
        "}}{% if role == 'model' %}{% generation %}{{ message['content'] | trim + '<end_of_turn>' }}"
        "{% endgeneration %}{% else %}{{ message['content'] | trim + '<end_of_turn>' }}{% endif %}{{ '\\n' }}",
    ),
}
ASKED = {"role": "user", "content": "What is two plus two?"}
AGAIN = {"role": "user", "content": "Hello"}
CONVERSATIONS = {
    "one answer": [ASKED, {"role": "assistant", "content": "It is four."}],
    "two answers": [
        ASKED,
        {"role": "assistant", "content": "It is '4'\nor four"},
        AGAIN,
        {"role": "assistant", "content": "how are you today?"},
    ],
    "no answer at the end": [ASKED, {"role": "assistant", "content": "four"}, AGAIN],
}


def main(directory: Path) -> None:
    given = json.loads((directory / "chat_templates.json").read_text())
    tokenizer = with_tokens(given["tokenizer"], ADDED)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(json.dumps(tokenizer)),
        bos_token="<|begin_of_text|>",
        eos_token="<|end_of_text|>",
    )
    templates, cases = {"phi": PHI}, []
    for name, (plain, tagged) in TAGGED.items():
        assert plain in given["templates"][name]
        templates[name] = (
            given["templates"][name].replace(plain, tagged) if plain else given["templates"][name]
        )
    for template, source in templates.items():
        for name, messages in CONVERSATIONS.items():
            found = fast.apply_chat_template(
                messages, chat_template=source, return_dict=True, return_assistant_tokens_mask=True
            )
            expected = {"ids": list(found["input_ids"]), "mask": list(found["assistant_masks"])}
            assert sum(expected["mask"])
            inputs = {"template": template, "messages": messages}
            cases.append({"name": f"{template}, {name}", "inputs": inputs, "expected": expected})
    source = {
        "package": "transformers",
        "version": transformers.__version__,
        "function": "apply_chat_template(return_assistant_tokens_mask=True)",
    }
    values = {"source": source, "added_tokens": ADDED, "templates": templates, "cases": cases}
    (directory / "chat_masks.json").write_text(json.dumps(values) + "\n")


def with_tokens(tokenizer: dict, names: list[str]) -> dict:
    """Returns a tokenizer.json with further special tokens."""
    first = 1 + max(one["id"] for one in tokenizer["added_tokens"])
    like = tokenizer["added_tokens"][0]
    more = [{**like, "id": first + k, "content": name} for k, name in enumerate(names)]
    return {**tokenizer, "added_tokens": [*tokenizer["added_tokens"], *more]}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
