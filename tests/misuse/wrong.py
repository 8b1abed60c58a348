"""Calls with one wrong argument, drawn from a seed, and what may come of each.

A `Call` is a public function with arguments that are legal; `failures` replaces one of them at a time by a value of
the pool. What is not legal by the argument's rule must be refused: a `ValueError` raised by jaxfb, one sentence that
names the argument. What is legal may be accepted, or refused in the same way because it does not fit the rest.
"""

import contextlib
import dataclasses
import datetime
import decimal
import fractions
import math
import pathlib
import random
import re
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxfb

PACKAGE = str(pathlib.Path(jaxfb.__file__).parent)
REFUSED, ACCEPTED = "refused by name", "accepted"

SECONDS = 120
"""A call that takes longer hangs: one that compiles takes a tenth of it on a busy machine."""


class Unprintable:
    """An object of somebody else's, whose repr fails."""

    def __repr__(self):
        raise RuntimeError("no repr")


def circular() -> list:
    """A list that holds itself. Not in the pool: as a pytree it upsets JAX's own counting of recursion for good."""
    values = []
    values.append(values)
    return values


POOL: tuple[Callable[[], Any], ...] = (
    *(lambda v=v: v for v in (None, True, False, math.nan, math.inf, -math.inf, 0.0, 1.5, -2.5, 1e300)),
    *(lambda v=v: v for v in (-1, 0, 10**9, 10**30, -(10**30), 10**400, 10**5000, 1 + 2j)),
    *(lambda v=v: v for v in ("", "two", "2", "nan", "true", "NONE", "\0", "x" * 10_000, "漢字", b"2")),
    *(lambda v=v: v for v in (decimal.Decimal("NaN"), fractions.Fraction(1, 3), datetime.date(2024, 1, 1))),
    *(list, tuple, dict, set, lambda: [1], lambda: (1, 2), lambda: {"a": 1}, lambda: [[1], [2, 3]]),
    *(lambda: [None], lambda: ["F0.0"], lambda: {None: None}, lambda: iter([1]), lambda: range(3)),
    *(lambda v=v: v for v in (np.float32(math.nan), np.float64(0.25), np.int64(3), np.True_, np.int8(-1))),
    *(
        lambda: np.zeros(0),
        lambda: np.zeros((2, 3)),
        lambda: np.array("x"),
        lambda: np.array([None, object()]),
    ),
    *(lambda: jnp.float32(1.5), lambda: jnp.arange(3), lambda: jax.ShapeDtypeStruct((2, 3), jnp.float32)),
    *(object, Unprintable, lambda: int, lambda: print, lambda: lambda *args, **kwargs: None, lambda: math),
    *(lambda: pathlib.Path("nowhere"), lambda: ValueError("an error"), lambda: jaxfb.BatchPlan),
)


def pool(seed: int, count: int | None = None) -> list[Callable[[], Any]]:
    """The pool and a few random numbers and words; or `count` of them, drawn from the seed."""
    rng = random.Random(seed)
    more = [rng.randrange(-(10**k), 10**k) for k in range(1, 12)]
    more += [rng.uniform(-1, 1) * 10.0**k for k in range(-9, 9, 3)]
    more += ["".join(rng.choices("abcdefgz_.,: 0123456789\n-=", k=k)) for k in (1, 4, 12, 40)]
    values = [*POOL, *((lambda v=v: v) for v in more)]
    return values if count is None else rng.sample(values, count)


@dataclasses.dataclass(frozen=True)
class Call:
    """A public function, legal keyword arguments for it, and the rule of each argument that is put to the test.

    rules:   argument -> what is legal for it, a function value -> bool (`legal.py`).
    names:   argument -> a pattern of other words by which a refusal may name it.
    use:     what is done with the result, so that nothing is put off until later.
    """

    name: str
    function: Callable
    legal: Callable[[], dict[str, Any]]
    rules: Mapping[str, Callable[[Any], bool]]
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    use: Callable[[Any], Any] = lambda result: None

    def __call__(self, **changes: Any) -> Any:
        result = self.function(**{**self.legal(), **changes})
        self.use(result)
        return result

    def without(self, name: str) -> Any:
        """The call that lacks one argument."""
        return self.function(**{key: value for key, value in self.legal().items() if key != name})

    def failures(self, values: list[Callable[[], Any]], legal_too: bool = True) -> list[str]:
        """What is wrong with the answers to one wrong argument each.

        legal_too: values that are legal are tried as well; without them nothing needs to be compiled.
        """
        return [
            f"{self.name}({argument}={value}): {answer}"
            for argument, value, answer in self.answers(values, legal_too)
            if answer not in (REFUSED, ACCEPTED)
        ]

    def answers(
        self, values: list[Callable[[], Any]], legal_too: bool = True
    ) -> Iterator[tuple[str, str, str]]:
        """Yields (argument, value, answer) of calls with one changed argument each.

        The answer is REFUSED, ACCEPTED where that is legal, or what is wrong with it.
        """
        for argument, rule in self.rules.items():
            for make in values:
                is_legal = rule(make())
                if legal_too or not is_legal:
                    yield argument, text_of(make()), self._answer(argument, make, is_legal)

    def _answer(self, argument: str, make: Callable[[], Any], is_legal: bool) -> str:
        error = outcome(lambda: self(**{argument: make()}))
        if error is None:
            return ACCEPTED if is_legal else "accepted, which is not legal"
        return refusal_problem(error, argument, self.names.get(argument, argument)) or REFUSED

    def signature_failures(self) -> list[str]:
        """What is wrong with the answers to an argument left out and to one that does not exist."""
        found = [
            (f"without {name}", name, outcome(lambda name=name: self.without(name))) for name in self.legal()
        ]
        found.append(("with no_such_argument", "no_such_argument", outcome(lambda: self(no_such_argument=1))))
        problems = [(what, _signature_problem(error, name)) for what, name, error in found]
        return [f"{self.name} {what}: {problem}" for what, problem in problems if problem]


def outcome(call: Callable[[], Any]) -> BaseException | None:
    """The exception of a call, None if it returned; a call that takes too long is a TimeoutError."""
    try:
        with _time_limit(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call()
    except Exception as error:
        return error
    return None


def refusal_problem(error: BaseException, *names: str) -> str | None:
    """Why an exception is no refusal of jaxfb's that names one of these; None if it is one."""
    kind = f"{type(error).__name__}: {str(error)[:200]}"
    if not isinstance(error, ValueError):
        return kind
    *_, (last, _) = traceback.walk_tb(error.__traceback__)
    if not last.f_code.co_filename.startswith(PACKAGE):
        return f"raised outside jaxfb: {kind}"
    sentence, *table = str(error).split("\n")
    if table and not any(line.startswith(("tick", "  ")) for line in table):
        return f"more than one line: {kind}"
    if len(sentence) > 1000:
        return f"a sentence of {len(sentence)} characters: {kind}"
    if not any(re.search(rf"(?<!\w)({name})", sentence) for name in names):
        return f"does not name {' or '.join(names)}: {kind}"
    return None


def _signature_problem(error: BaseException | None, name: str) -> str | None:
    """As `refusal_problem`, but Python's own error about the arguments will do, and so will a default."""
    python = r"missing \d+ required|unexpected keyword argument|got multiple values|takes \d+ positional"
    if error is None:
        return "accepted" if name == "no_such_argument" else None
    if isinstance(error, TypeError) and re.search(python, str(error)):
        return None
    return refusal_problem(error, name)


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    def stop(*_):
        raise TimeoutError(f"the call took more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    # again and again: an exception that is raised inside a garbage collection is lost
    signal.setitimer(signal.ITIMER_REAL, SECONDS, 0.5)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def text_of(value: Any) -> str:
    """The repr of any value, on a few characters."""
    try:
        return f"{value!r}"[:60]
    except Exception:
        return type(value).__name__
