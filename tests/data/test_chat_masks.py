"""What is learnt of a conversation is what transformers counts as the assistant's, for five families' templates."""

import json

import numpy as np
import pytest

from jaxfb.data.chat import make_chat
from jaxfb.data.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def masks(golden):
    return golden("chat_masks.json")


@pytest.fixture(scope="module")
def tokenizer(golden, masks, tmp_path_factory):
    values, directory = golden("chat_templates.json")["tokenizer"], tmp_path_factory.mktemp("tokenizer")
    first, like = 1 + max(one["id"] for one in values["added_tokens"]), values["added_tokens"][0]
    more = [{**like, "id": first + k, "content": name} for k, name in enumerate(masks["added_tokens"])]
    values = {**values, "added_tokens": [*values["added_tokens"], *more]}
    (directory / "tokenizer.json").write_text(json.dumps(values))
    return load_tokenizer(directory)


@pytest.mark.parametrize("template", ["llama3", "chatml", "mistral", "gemma", "phi"])
def test_ids_and_assistant_masks_are_those_of_transformers(masks, tokenizer, template):
    chat, found = make_chat(tokenizer, masks["templates"][template]), 0
    for case in masks["cases"]:
        if case["inputs"]["template"] != template:
            continue
        (ids,), (counts,) = chat.encode([case["inputs"]["messages"]])
        np.testing.assert_array_equal(ids, case["expected"]["ids"], err_msg=case["name"])
        np.testing.assert_array_equal(counts, case["expected"]["mask"], err_msg=case["name"])
        found += 1
    assert found == 3
