"""The target's chat template as the recipe wants it: its keywords are given, and today's date is pinned. What a record
may add to them, and by which markers a text shows that the template has rendered it.

The recipe's keywords and the date are written into the text of the template itself, in front of it. So they hold
wherever it is rendered, its fingerprint covers them, and rendering never reads the clock.
"""

import json
from dataclasses import dataclass
from functools import lru_cache
from inspect import signature
from os.path import commonprefix
from typing import Any

import jinja2.ext
import jinja2.meta
from jinja2 import nodes

from pipeline.basics.errors import PipelineError
from pipeline.lm.chat import HARMONY, SWITCHES, Unusable, probe, render, thinking
from pipeline.lm.config import TargetConfig

CLOCK = "strftime_now"  # the function by which templates print today's date
GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", CLOCK}  # by whoever renders
PINNED = "pinned_date"  # a dictionary, directive -> text, by which the date is pinned
DIRECTIVES = [*"aAbBdeFGHIjmMpSuUVwWyY", "-d", "-H", "-I", "-j", "-m", "-M", "-S"]  # of strftime, but of time zones

_MACRO = (  # the clock's name, and always the same day, at midnight
    f"{{% macro {CLOCK}(format) %}}{{% for part in format.split('%%') %}}{{% if not loop.first %}}%{{% endif %}}"
    f"{{% set day = namespace(text=part) %}}{{% for directive, text in {PINNED}.items() %}}"
    "{% set day.text = day.text.replace(directive, text) %}{% endfor %}{{ day.text }}{% endfor %}{% endmacro %}"
)


class _Generation(jinja2.ext.Extension):
    """transformers' tag around what the assistant says."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)


_JINJA = jinja2.Environment(extensions=[_Generation, "jinja2.ext.loopcontrols"], autoescape=False)  # only to read with


def apply_settings(tokenizer: Any, config: TargetConfig) -> None:
    """Gives the tokenizer's template the recipe's keywords and date. Raises PipelineError for a keyword that it does
    not know.
    """
    try:
        source = tokenizer.get_chat_template()  # of several, the one without tools
    except ValueError as error:
        raise PipelineError(f"the tokenizer of {config.model}: {error}. Set target.chat_template to one") from None
    parsed = _parsed(source, config.model)
    known = _keywords(parsed)
    for name in config.template_keywords:
        if name not in known:
            raise PipelineError(
                f"target.template_keywords.{name}: the chat template of {config.model} has no such keyword; it knows "
                f"{', '.join(known) or 'none'}"
            )
    given: dict[str, Any] = dict(sorted(config.template_keywords.items()))
    if asks := any(name.name == CLOCK for name in parsed.find_all(nodes.Name)):
        formats = f"{source} {given.values()}"
        given[PINNED] = {f"%{d}": config.template_date.strftime(f"%{d}") for d in DIRECTIVES if f"%{d}" in formats}
    before = [f"{{% if {n} is not defined %}}{{% set {n} = {_literal(v)} %}}{{% endif %}}" for n, v in given.items()]
    # Jinja drops the line break behind a block, so what follows begins a line as it did before.
    tokenizer.chat_template = "".join([*before, _MACRO if asks else "", "\n", source]) if before else source
    fixed = {*config.template_keywords, *signature(tokenizer.apply_chat_template).parameters}
    tokenizer.record_keywords = frozenset(known) - fixed


def template_settings(tokenizer: Any, config: TargetConfig) -> str:
    """What every artifact says of the template that it was made with: "thinking on, date 2024-07-26, NAME = VALUE".

    `tokenizer`: of `load_tokenizer`. The date is today's, as far as the target is told.
    """
    thinks = {True: ["thinking on"], False: ["thinking off"], None: []}[thinking(tokenizer)]
    dated = probe(tokenizer) != probe(tokenizer, **{PINNED: {}})
    given = [f"{name} = {json.dumps(value)}" for name, value in sorted(config.template_keywords.items())]
    return ", ".join([*thinks, *([f"date {config.template_date}"] if dated else []), *given])


class _WithKeywords:
    """A tokenizer whose template is given these keywords, too."""

    def __init__(self, tokenizer: Any, keywords: dict[str, Any]):
        self._tokenizer, self._keywords = tokenizer, keywords

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        return self._tokenizer(*arguments, **settings)

    def apply_chat_template(self, messages: Any, **settings: Any) -> Any:
        return self._tokenizer.apply_chat_template(messages, **{**self._keywords, **settings})


def with_keywords(tokenizer: Any, keywords: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
    """``(tokenizer, keywords)``: those of a record's keywords that the template reads, and the tokenizer that gives
    them to it. They are texts, numbers and switches, and none that the recipe sets.

    `tokenizer`: of `load_tokenizer`; one that `apply_settings` has not seen takes no keyword.
    """
    names: frozenset[str] = getattr(tokenizer, "record_keywords", frozenset())
    plain = {
        name: value
        for name, value in (keywords or {}).items()
        if name in names and isinstance(value, bool if name in SWITCHES else str | bool | int | float)
    }
    return (_WithKeywords(tokenizer, plain) if plain else tokenizer), plain


@dataclass(frozen=True)
class Markers:
    """What stands around an answer in every rendering of the target's template."""

    begin: str  # of a conversation: the token that the template begins with, or nothing
    question: str  # before a question
    answer: str  # before an answer
    opened: str  # behind `answer` in a prompt, but not in front of earlier answers
    end: str  # behind an answer

    def are_in(self, text: str) -> bool:
        """Return whether the template has rendered a text. Markers of mere words ("ASSISTANT:") may stand in any."""
        seen = [marker in text for marker in (self.question, self.answer) if marker]
        return any(seen) if any(sign in self.answer for sign in "<[|") else all(seen)

    def answers(self, text: str) -> list[tuple[int, int]]:
        """Return where the answers of a rendered conversation begin and end, in characters."""
        spans, at = [], 0
        while (begin := text.find(self.answer, at)) >= 0:
            first = begin + len(self.answer)
            first += len(self.opened) if text.startswith(self.opened, first) else 0
            last = text.find(self.end, first)
            at = len(text) if last < 0 else last + len(self.end)
            spans.append((first, len(text.rstrip()) if last < 0 else at))
        return [(first, last) for first, last in spans if first < last]


_TALK = [
    {"role": "user" if number % 2 == 0 else "assistant", "content": text}
    for number, text in enumerate(["first question", "first answer", "second question", "second answer"])
]


def markers_of(tokenizer: Any) -> Markers | None:
    """Return the template's markers; None where an answer has none in front of it. `end` is empty where answers have
    none behind them, and in the format harmony, whose answers are of several messages.
    """
    return _markers(tokenizer, tokenizer.chat_template)


def special_tokens(tokenizer: Any, markers: Markers) -> list[str]:
    """Return the tokenizer's special tokens of which its template makes the markers of turns."""
    shown = f"{markers.question} {markers.answer} {markers.end}"
    return [
        token.content for token in tokenizer.added_tokens_decoder.values() if token.special and token.content in shown
    ]


@lru_cache(maxsize=4)
def _markers(tokenizer: Any, template: str) -> Markers | None:
    try:
        talk, prompt = render(tokenizer, _TALK, False), render(tokenizer, _TALK[:1], True)
    except Unusable:
        return None
    texts = [turn["content"] for turn in _TALK]
    places = [talk.find(text) for text in texts]
    if min(places) < 0 or places != sorted(places) or texts[0] not in prompt:
        return None
    gaps = [talk[at + len(text) : then] for at, text, then in zip(places, texts, [*places[1:], None], strict=True)]
    asked = prompt[prompt.index(texts[0]) + len(texts[0]) :]
    before, end = (commonprefix(pair) for pair in ([gaps[0], asked], [gaps[1], gaps[3]]))  # noqa: RUF071
    answer = (before.removeprefix(end) if before.removeprefix(end).strip() else before).lstrip()
    begin = tokenizer.bos_token if tokenizer.bos_token and prompt.startswith(tokenizer.bos_token) else ""
    end_marker = "" if HARMONY in template else end.strip()
    opened = asked[len(before) :]
    return Markers(begin, gaps[1][len(end) :].strip(), answer, opened, end_marker) if answer else None


def _parsed(source: str, model: str) -> nodes.Template:
    try:
        return _JINJA.parse(source)
    except jinja2.TemplateSyntaxError as error:
        raise PipelineError(
            f"the chat template of {model} is no Jinja template: {error.message}, line {error.lineno}. Set "
            "target.chat_template to one"
        ) from None


def _keywords(parsed: nodes.Template) -> list[str]:
    """What the template reads without having set it, but for what is given. Jinja also names what all branches of an
    `if` set: a name that is set somewhere is a keyword only where the template asks whether it is defined.
    """
    asking: list[Any] = [test.node for test in parsed.find_all(nodes.Test) if test.name in ("defined", "undefined")]
    asking += [found.node for found in parsed.find_all(nodes.Filter) if found.name in ("default", "d")]
    asked = {node.name for node in asking if isinstance(node, nodes.Name)}
    own = {name.name for name in parsed.find_all(nodes.Name) if name.ctx == "store"} - asked
    read = jinja2.meta.find_undeclared_variables(parsed) - GIVEN - own
    return sorted(name for name in read if not name.endswith("_token"))  # bos_token, ...: the tokenizer's


def _literal(value: Any) -> str:
    """The value as a literal of Jinja."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(key)}: {_literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return ascii(value)  # what Python and Jinja write alike, in ASCII
