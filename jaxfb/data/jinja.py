"""Chat templates in Jinja, as the files of Hugging Face's tokenizers have them, run in a sandbox.

Used by `chat.py`. A template comes with a model from elsewhere, so it can neither reach Python's
internals nor change what it is given. It cannot ask for today's date either: rows would depend on the day.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from jaxfb.refusal import Refused


def compile_template(source: str) -> Callable[..., str]:
    """Returns a function of the template's variables (messages, add_generation_prompt, bos_token, ...) to its text.

    Raises:
      ValueError: the source is not a template; calling it: the template refuses its messages, or reads what is missing.
    """
    from jinja2 import TemplateError

    try:
        template = _environment().from_string(source)
    except TemplateError as error:
        raise Refused(f"[start] the chat template cannot be read: {_line(error)}") from None

    def render(**variables: Any) -> str:
        try:
            return template.render(tools=None, documents=None, **variables)
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            hint = "; a date must be written into the template" if "strftime_now" in str(error) else ""
            raise Refused(f"[start] the chat template refuses the messages: {_line(error)}{hint}") from None

    return render


def _environment() -> Any:
    """Makes the environment in which transformers renders chat templates, without the date."""
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _generation_tag()]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    return environment


def _generation_tag() -> type:
    """Makes the tag {% generation %}, with which templates mark the assistant's words; here it changes nothing."""
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return Generation


def _refuse(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Writes plain JSON: Jinja's filter escapes characters for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
