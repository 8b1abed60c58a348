"""Tasks for a policy: problems whose answers can be checked, and the reward of an answer.

Any object with the members of `Task` is a task.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from traceback import extract_tb
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from jaxfb.config.policy import each_once
from jaxfb.data.chat import Chat, Message
from jaxfb.data.conversations import ROLES
from jaxfb.platforms.compat import config_value
from jaxfb.process.forks import ending_children
from jaxfb.process.position import here
from jaxfb.refusal import Refused, choice, function, refuse, shown, text
from jaxfb.training.job.agreement import FLAGS

LISTED = 200_000
LARGEST_REWARD = 1e18
"""In size; squares of what advantages are made of are then below the largest float32, 3.4e38."""


class Problem(NamedTuple):
    """A prompt, a string or the messages of a conversation, and its right answer."""

    prompt: str | Sequence[Message]
    answer: str


def messages_of(problem: Problem) -> Sequence[Message]:
    """Returns the conversation that waits for an answer: a prompt that is a string becomes the user's message."""
    return (
        [{"role": "user", "content": problem.prompt}] if isinstance(problem.prompt, str) else problem.prompt
    )


class Response(str):
    """The text of a response up to its stop token, special tokens by name, and the ids that it was decoded from.

    ids:   i32[n], as sampled, the stop token included where it came.
    ended: whether a stop token ended it; False where it was cut at the longest length.
    """

    ids: np.ndarray
    ended: bool

    @classmethod
    def of(cls, text: str, ids: np.ndarray, ended: bool) -> Response:
        """Makes a response from its text and ids."""
        made = cls(text)
        made.ids, made.ended = ids, bool(ended)
        return made


class Task(Protocol):
    """The members of a task.

    train, held_out: disjoint; accuracy is measured on the second.
    """

    @property
    def train(self) -> list[Problem]: ...

    @property
    def held_out(self) -> list[Problem]: ...

    def reward(self, problem: Problem, response: Response) -> float:
        """Returns the reward of a response, a finite number; `response` is a str with its ids."""
        ...

    def is_correct(self, problem: Problem, response: Response) -> bool:
        """Returns whether the response counts as solved."""
        ...


class BadJudgement(Refused):
    """Raised where a task returns a reward that is not a finite number or an `is_correct` that is not a bool,
    raises, or changes its problem.
    """


def checked_reward(task: Task, problem: Problem, response: Response) -> float:
    """Returns the task's reward of a response.

    Raises:
      BadJudgement: it is not a finite number, or one whose square overflows, or the task raised an error or changed the
        problem; the message has the prompt and the response.
    """
    reward = _judged(task, "reward", problem, response)
    number = _as_array(reward)
    if number.shape != () or number.dtype.kind not in "biuf" or not np.isfinite(number):
        rule = "a finite number; return 0.0 for a response that cannot be judged"
        raise BadJudgement(_refusal("reward", reward, rule, problem, response))
    if abs(float(number)) > LARGEST_REWARD:
        rule = f"a number between {-LARGEST_REWARD:g} and {LARGEST_REWARD:g}, so that its square is finite; divide it"
        raise BadJudgement(_refusal("reward", reward, rule, problem, response))
    return float(number)


def checked_correct(task: Task, problem: Problem, response: Response) -> bool:
    """Returns whether the task counts a response as solved.

    Raises:
      BadJudgement: it is neither True nor False, or the task raised an error or changed the problem; the message has
        the prompt and the response.
    """
    correct = _judged(task, "is_correct", problem, response)
    answer = _as_array(correct)
    if answer.shape != () or answer.dtype.kind not in "biu":
        raise BadJudgement(_refusal("is_correct", correct, "True or False", problem, response))
    return bool(answer)


def _judged(task: Task, name: str, problem: Problem, response: Response) -> Any:
    """Calls a task's function; an error of it becomes a refusal, before which a run saves what is done."""
    before = _asked(problem)
    try:
        with ending_children(), _same_settings(name):
            judged = getattr(task, name)(problem, response)
    except (Exception, SystemExit) as error:  # a reward may run code of a response, which may end the program
        line = extract_tb(error.__traceback__)[-1]
        raise BadJudgement(
            f"[task] {name} raised {shown(error, 300)} in {Path(line.filename).name}, line {line.lineno}, for prompt "
            f"{_short(problem.prompt)} and response {_short(response)}; catch it there and return "
            f"{'0.0' if name == 'reward' else 'False'} for a response that cannot be judged"
        ) from error
    here.tick()  # a rollout has many, each of which may take long
    if _asked(problem) != before:
        raise BadJudgement(
            f"[task] {name} changed the messages of the prompt {_short(problem.prompt)}, from which later rollouts "
            "begin; change a copy of them"
        )
    return judged


@contextmanager
def _same_settings(name: str) -> Iterator[None]:
    """Undoes a change of those settings of jax that decide the bits, as a library that a reward imports may make one.

    What follows would be computed otherwise, or, since process 0 alone judges, otherwise than on the other processes.
    """
    before = {flag: config_value(flag) for flag in FLAGS}
    try:
        yield
    finally:
        for flag, value in before.items():
            if (now := config_value(flag)) != value:
                jax.config.update(flag, value)
                warnings.warn(
                    f"[task] {name} changed {flag} from {value} to {now}, by which training would compute otherwise; "
                    "it is changed back",
                    stacklevel=4,
                )


def _as_array(value: Any) -> np.ndarray:
    """Returns a judgement as an array, of no numbers where it cannot be one, such as a tensor that keeps gradients."""
    try:
        return np.asarray(value)
    except Exception:  # of a list of lists, or of another library
        return np.array(None)


def _asked(problem: Problem) -> list[tuple[Any, Any]]:
    """Returns (role, content) of the messages that wait for an answer."""
    return [(message.get("role"), message.get("content")) for message in messages_of(problem)]


def _refusal(name: str, value: Any, rule: str, problem: Problem, response: Response) -> str:
    where = f"for prompt {_short(problem.prompt)} and response {_short(response)}"
    rule, _, use = rule.partition("; ")
    return f"[task] {name}={shown(value)} must be {rule}, {where}{'; ' * bool(use)}{use}"


class Problems(NamedTuple):
    """The problems of a task as a run found them when it began; every process draws from these alone."""

    train: list[Problem]
    held_out: list[Problem]


def check_task(task: Any, chat: Chat) -> tuple[Problems, list[np.ndarray]]:
    """Checks a task before a run, so that it cannot fail in the middle.

    Returns:
      Its problems, and their prompts as token ids, those of `train` first.
    Raises:
      ValueError: a member is missing or of another kind, there is nothing to train on or to measure on, a problem is
        none, a prompt is empty, or the reward of a problem's own answer is not a finite number or too large a one.
    """
    _check_members(task)
    train = _listed("train", task.train, "rollouts draw their prompts from it")
    problems = Problems(train, _listed("held_out", task.held_out, "accuracy is measured on it"))
    each = [*problems.train, *problems.held_out]
    prompts = chat.prompts([messages_of(problem) for problem in each])
    if empties := [problem for problem, ids in zip(each, prompts, strict=True) if not len(ids)]:
        empty = empties[0]
        raise Refused(
            f"[task] the prompt of {empty!r} is empty, and sampling starts from a prompt; give it some text"
        )
    first = train[0]
    (ids,) = chat.tokenizer.encode([str(first.answer)])
    response = Response.of(str(first.answer), np.append(ids, chat.stop_tokens[0]), True)
    checked_reward(task, first, response)
    checked_correct(task, first, response)
    check_unchanged(task, problems, [0])
    return problems, prompts


def check_unchanged(task: Task, problems: Problems, places: Iterable[int]) -> None:
    """Checks that a task still lists as many problems to train on, and the same ones at these places.

    A reward that changes them, such as one that drops what is solved, does so on the process alone that judges.

    Raises:
      BadJudgement: it does not.
    """
    now, before = task.train, problems.train
    if len(now) != len(before):
        change = f"has {len(now)} problems and had {len(before)}"
    elif others := [at for at in places if _read(now[at]) != _read(before[at])]:
        at = others[0]
        change = f"has {_short(now[at].prompt)} as problem {at} and had {_short(before[at].prompt)}"
    else:
        return
    raise BadJudgement(
        f"[task] train {change} when the run began: every process draws from the list of then, and so does a resumed "
        "run; keep the list as it is, and to go on with other problems resume the run with allow_changes=True"
    )


def fingerprint(problems: Problems, prompts: Sequence[np.ndarray]) -> str:
    """Returns 16 hexadecimal digits of the problems of a task, in their order; its functions are left out.

    prompts: as `check_task` returns them.
    """
    state = hashlib.blake2b(f"{len(problems.train)}".encode(), digest_size=8)
    for problem, ids in zip([*problems.train, *problems.held_out], prompts, strict=True):
        answer = str(problem.answer).encode()
        state.update(f"{len(ids)} {len(answer)} ".encode() + np.asarray(ids, np.int32).tobytes() + answer)
    return state.hexdigest()


def _check_members(task: Any) -> None:
    if isinstance(task, type):
        raise Refused(f"[task] task must be an instance of {task.__name__}, not the class; call it")
    missing = [name for name in ("train", "held_out", "reward", "is_correct") if not hasattr(task, name)]
    if missing:
        raise Refused(f"[task] {task!r} lacks {', '.join(missing)}; see jaxfb.rl.tasks.Task")
    for name in ("reward", "is_correct"):
        function(name, getattr(task, name), "(problem, response)", who="[task]")


def _read(problem: Problem) -> tuple[Any, str]:
    """Returns what is read of a problem: it may be any object, and made anew each time that its list is read."""
    return problem.prompt, problem.answer


def _listed(name: str, problems: Any, use: str) -> list[Problem]:
    """Returns the problems as a list of the run; refuses what cannot be drawn from by number, is empty or has something
    else than problems in it.
    """
    has_numbers = hasattr(problems, "__len__") and hasattr(problems, "__getitem__")
    if not has_numbers or isinstance(problems, str | Mapping):
        refuse(name, problems, "a list of problems", who="[task]")
    if len(problems) == 0:
        raise Refused(f"[task] {name} is empty, but {use}; give at least one problem")
    kept = [problems[number] for number in range(len(problems))]
    for number, problem in enumerate(kept):
        if not (hasattr(problem, "prompt") and hasattr(problem, "answer")):
            refuse(f"{name}[{number}]", problem, "a Problem(prompt, answer)", who="[task]")
        _check_problem(problem, f"[task] {name}[{number}]:")
    return kept


def _check_problem(problem: Any, where: str) -> None:
    prompt = problem.prompt
    text("answer", problem.answer, who=where)
    if isinstance(prompt, str):
        text("prompt", prompt, who=where)
        return
    if not (isinstance(prompt, Sequence) and prompt and all(isinstance(one, Mapping) for one in prompt)):
        refuse("prompt", prompt, 'a string, or messages {"role", "content"}', who=where)
    for message in prompt:
        choice("role", message.get("role"), ROLES, who=where)
        text("content", message.get("content"), who=where)


def _short(text: Any) -> str:
    shown = repr(text if isinstance(text, tuple | list) else str(text))
    return shown if len(shown) < 80 else shown[:77] + "..."


@dataclass(frozen=True)
class Arithmetic:
    """`47+85=` is to be answered with `132`: reward 1 for exactly that, else 0.

    digits: of each operand, at most. operations: any of "+", "-", "*", each once. num_held_out: how many are never
    trained on.

    Raises:
      ValueError: an operation is given twice; when problems are read, all of them would be held out.
    """

    digits: int = 2
    operations: str = "+"
    num_held_out: int = 512
    seed: int = 0

    def __post_init__(self):
        each_once(self.operations)

    @property
    def train(self) -> list[Problem]:
        return self._split[1]

    @property
    def held_out(self) -> list[Problem]:
        return self._split[0]

    @cached_property
    def _split(self) -> tuple[list[Problem], list[Problem]]:
        return self._problems[: self.num_held_out], self._problems[self.num_held_out :]

    def reward(self, problem: Problem, response: str) -> float:
        return float(self.is_correct(problem, response))

    def is_correct(self, problem: Problem, response: str) -> bool:
        return response == problem.answer

    @cached_property
    def _problems(self) -> list[Problem]:
        """Lists all problems, or the first LISTED of them, in an order drawn from the seed."""
        base = 10**self.digits
        total = base * base * len(self.operations)
        rng = np.random.default_rng(self.seed)
        codes = rng.permutation(total) if total <= LISTED else np.unique(rng.integers(0, total, LISTED))
        if len(codes) <= self.num_held_out:
            raise Refused(
                f"[task] held_out={self.num_held_out} leaves none of the {len(codes)} problems to train on; use at "
                f"most {len(codes) - 1}",
                [{"held_out": len(codes) - 1}],
            )
        return [self._problem(int(code), base) for code in rng.permutation(codes)]

    def _problem(self, code: int, base: int) -> Problem:
        rest, second = divmod(code, base)
        operation, first = divmod(rest, base)
        sign = self.operations[operation]
        value = {"+": first + second, "-": first - second, "*": first * second}[sign]
        return Problem(f"{first}{sign}{second}=", str(value))
