"""A model of jaxfb for lm-evaluation-harness (`pip install "jaxfb[lm-eval]"`).

    import lm_eval
    from jaxfb.inference.harness import HarnessModel

    found = lm_eval.simple_evaluate(model=HarnessModel("runs/tuned"), tasks=["hellaswag"])

Where the harness is installed, this module also registers the class under the name "jaxfb".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxfb.inference.complete import Sampling, complete, encode_texts
from jaxfb.inference.model import open_model
from jaxfb.inference.scores import Scorer
from jaxfb.inference.tasks import encode_pair
from jaxfb.refusal import Refused
from jaxfb.training.compile_cache import use_compile_cache

try:
    from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]  # an extra
    from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]  # an extra
except ImportError:
    LM, register_model = object, None


_Base: Any = LM
TOKENS = (
    "max_gen_toks",
    "max_new_tokens",
    "max_tokens",
    "max_completion_tokens",
)  # the first that is given counts


class HarnessModel(_Base):
    """The interface that the harness calls: loglikelihood, loglikelihood_rolling, generate_until.

    A request is any object whose `args` are the arguments of that kind. The numbers are those of the harness's own
    class for transformers (`hf`): contexts are cut from the left, texts are scored in windows, and what the tokenizer
    puts before every text (Llama's and Gemma's start token) stands before contexts and texts that do not begin with it.
    In `loglikelihood_rolling` such a token is scored too, after another one, as there.

    Args:
      path: a run, a config, or a directory of Hugging Face files.
      batch_size: rows at the same time on each replica. max_length: tokens that are looked at; None is the run's
        sequence length. max_gen_toks: of a continuation whose request does not set it.
      overrides: of the config, such as ["mesh.fsdp=8"].
    """

    def __init__(
        self,
        path: str,
        batch_size: int | str = 8,
        max_length: int | str | None = None,
        max_gen_toks: int | str = 256,
        overrides: Sequence[str] = (),
        **_: Any,
    ):
        super().__init__()
        use_compile_cache()
        given = overrides.split() if isinstance(overrides, str) else list(overrides)
        self.model = open_model(path, given, on_mesh=True)
        self._batch = int(batch_size)
        self.scorer = Scorer(self.model, None if max_length is None else int(max_length), self._batch)
        self._tokens = int(max_gen_toks)

    @property
    def max_length(self) -> int:
        """Returns the tokens that are looked at."""
        return self.scorer.length

    @property
    def tokenizer_name(self) -> str:
        """Returns what distinguishes this model's requests in the harness's cache."""
        return self.model.tokenizer.fingerprint

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Returns the template's text; "" without one."""
        return self.model.chat.template if chat_template and self.model.chat is not None else ""

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Returns the text of messages, as the harness gives it back in requests.

        add_generation_prompt: what opens an answer follows. Otherwise the last message is left open, to be continued.
        """
        if self.model.chat is None:
            return "\n".join(message["content"] for message in chat_history)
        text = self.model.chat.render(chat_history, opening=add_generation_prompt)
        return text if add_generation_prompt else _open(text, chat_history[-1]["content"])

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Returns (log-probability of the continuation, whether it is the greedy one) of (context, continuation)."""
        pairs = [self._pair(*request.args) for request in requests]
        return [(score.log_prob, score.greedy) for score in self.scorer.score(pairs)]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Returns the log-probability of each whole text, of requests (text,)."""
        texts = encode_texts(self.model.tokenizer, [request.args[0] for request in requests], rendered=True)
        return [self.scorer.score_text(ids).log_prob for ids in texts]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Returns continuations of (context, settings).

        settings: until, max_gen_toks, temperature, do_sample, top_k, top_p, min_p. Of a context the last
          max_length - max_gen_toks tokens are looked at.

        Raises:
          ValueError: none would be left.
        """
        return [self._continuation(*request.args) for request in requests]

    def _pair(self, context: str, continuation: str) -> tuple[Any, Any]:
        if context:
            return encode_pair(self.model.tokenizer, context, continuation, rendered=True)
        (ids,) = self.model.tokenizer.encode_template([continuation], [False])
        begun = int(len(ids) > 0 and ids[0] == self.scorer.first_token)  # one start token is enough
        return ids[:begun], ids[begun:]

    def _continuation(self, context: str, settings: dict[str, Any]) -> str:
        until = settings.get("until") or []
        stops = [until] if isinstance(until, str) else list(until)
        tokens = int(
            next((settings[name] for name in TOKENS if settings.get(name) is not None), self._tokens)
        )
        if tokens >= self.max_length:
            raise Refused(
                f"[eval] max_gen_toks={tokens} leaves none of max_length={self.max_length} tokens for the context; use "
                f"max_gen_toks={max(self.max_length // 2, 1)}, or max_length={2 * tokens}"
            )
        sampled = settings.get("do_sample", float(settings.get("temperature") or 0) > 0)
        how = Sampling(tokens)
        if sampled:
            top_k, top_p, min_p = (settings.get(name) for name in ("top_k", "top_p", "min_p"))
            how = Sampling(tokens, float(settings.get("temperature") or 1.0), top_k, top_p, min_p)
        stops = [stop for stop in stops if stop]
        last = self.max_length - tokens
        return complete(self.model, [context], how, rendered=True, batch=1, stops=stops, last=last)[0][0]


def _open(text: str, last: str) -> str:
    """Returns the text of a chat up to the end of its last message, as transformers cuts it to be continued."""
    at = text.rfind(last.strip())
    if at < 0:  # the template writes it otherwise
        return text
    whole = text[at : at + len(last.lstrip())] == last.lstrip()
    return text[: at + len(last.lstrip() if whole else last.strip())]


if register_model is not None:
    register_model("jaxfb")(HarnessModel)
