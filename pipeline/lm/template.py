"""Apply the recipe's settings to the target's chat template: its keywords are set, and today's date is pinned. Also:
the keywords that a record may add, and the markers by which a rendered text is recognised.

The recipe's keywords and the date are written into the template itself, at its beginning. So they hold wherever it is
rendered, its fingerprint covers them, and rendering never reads the clock.
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
from pipeline.lm.chat import HARMONY, SWITCHES, Unusable, is_thinking, render, render_probe
from pipeline.lm.config import TargetConfig

CLOCK = "strftime_now"  # the function by which templates print today's date
# Names that the renderer sets.
RENDERER_NAMES = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", CLOCK}
PINNED = "pinned_date"  # a dictionary, directive -> text, that pins the date
# The directives of strftime, without those of time zones.
DIRECTIVES = [*"aAbBdeFGHIjmMpSuUVwWyY", "-d", "-H", "-I", "-j", "-m", "-M", "-S"]

_MACRO = (  # replaces the clock by a fixed day, at midnight
    f"{{% macro {CLOCK}(format) %}}{{% for part in format.split('%%') %}}{{% if not loop.first %}}%{{% endif %}}"
    f"{{% set day = namespace(text=part) %}}{{% for directive, text in {PINNED}.items() %}}"
    "{% set day.text = day.text.replace(directive, text) %}{% endfor %}{{ day.text }}{% endfor %}{% endmacro %}"
)


class _Generation(jinja2.ext.Extension):
    """A parser of transformers' tag around the assistant's text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)


_JINJA = jinja2.Environment(extensions=[_Generation, "jinja2.ext.loopcontrols"], autoescape=False)  # for parsing only


def apply_settings(tokenizer: Any, config: TargetConfig) -> None:
    """Write the recipe's keywords and date into the tokenizer's template. Raise PipelineError for a keyword that the
    template does not have.
    """
    try:
        source = tokenizer.get_chat_template()  # of several, the one without tools
    except ValueError as error:
        raise PipelineError(f"the tokenizer of {config.model}: {error}. Set target.chat_template to one") from None
    parsed = _parse(source, config.model)
    keywords = _keywords(parsed)
    for name in config.template_keywords:
        if name not in keywords:
            raise PipelineError(
                f"target.template_keywords.{name}: the chat template of {config.model} has no such keyword; it has "
                f"{', '.join(keywords) or 'none'}"
            )
    settings: dict[str, Any] = dict(sorted(config.template_keywords.items()))
    if reads_clock := any(name.name == CLOCK for name in parsed.find_all(nodes.Name)):
        formats = f"{source} {settings.values()}"
        settings[PINNED] = {f"%{d}": config.template_date.strftime(f"%{d}") for d in DIRECTIVES if f"%{d}" in formats}
    assignments = [
        f"{{% if {n} is not defined %}}{{% set {n} = {_literal(v)} %}}{{% endif %}}" for n, v in settings.items()
    ]
    # Jinja drops the line break after a block, so the template still begins at the start of a line.
    tokenizer.chat_template = (
        "".join([*assignments, _MACRO if reads_clock else "", "\n", source]) if assignments else source
    )
    fixed = {*config.template_keywords, *signature(tokenizer.apply_chat_template).parameters}
    tokenizer.record_keywords = frozenset(keywords) - fixed


def template_settings(tokenizer: Any, config: TargetConfig) -> str:
    """Format the template's settings for every artifact made with it: "thinking on, date 2024-07-26, NAME = VALUE".

    `tokenizer`: from `load_tokenizer`. The date is the one shown to the target as today's.
    """
    thinking_text = {True: ["thinking on"], False: ["thinking off"], None: []}[is_thinking(tokenizer)]
    dated = render_probe(tokenizer) != render_probe(tokenizer, **{PINNED: {}})
    keywords = [f"{name} = {json.dumps(value)}" for name, value in sorted(config.template_keywords.items())]
    return ", ".join([*thinking_text, *([f"date {config.template_date}"] if dated else []), *keywords])


class _WithKeywords:
    """A tokenizer that passes these keywords to its template."""

    def __init__(self, tokenizer: Any, keywords: dict[str, Any]):
        self._tokenizer, self._keywords = tokenizer, keywords

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        return self._tokenizer(*arguments, **settings)

    def apply_chat_template(self, messages: Any, **settings: Any) -> Any:
        return self._tokenizer.apply_chat_template(messages, **{**self._keywords, **settings})


def bind_keywords(tokenizer: Any, keywords: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
    """Return ``(tokenizer, keywords)``: those of a record's keywords that the template reads, and a tokenizer that
    passes them to it. They are texts, numbers and switches, and none that the recipe sets.

    `tokenizer`: from `load_tokenizer`; one that `apply_settings` has not changed takes no keyword.
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
    """The texts around an answer in every rendering of the target's template."""

    begin: str  # of a conversation: the template's first token, or nothing
    question: str  # before a question
    answer: str  # before an answer
    opened: str  # after `answer` in a prompt, but not before earlier answers
    end: str  # after an answer

    def occur_in(self, text: str) -> bool:
        """Return whether the template has rendered a text. Markers that are plain words ("ASSISTANT:") may occur in
        any.
        """
        matches = [marker in text for marker in (self.question, self.answer) if marker]
        return any(matches) if any(symbol in self.answer for symbol in "<[|") else all(matches)

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


_DIALOGUE = [
    {"role": "user" if number % 2 == 0 else "assistant", "content": text}
    for number, text in enumerate(["first question", "first answer", "second question", "second answer"])
]


def find_markers(tokenizer: Any) -> Markers | None:
    """Return the template's markers; None where an answer has none before it. `end` is empty where answers have none
    after them, and in the format harmony, whose answers consist of several messages.
    """
    return _markers(tokenizer, tokenizer.chat_template)


def special_tokens(tokenizer: Any, markers: Markers) -> list[str]:
    """Return the tokenizer's special tokens that the markers of turns contain."""
    shown = f"{markers.question} {markers.answer} {markers.end}"
    return [
        token.content for token in tokenizer.added_tokens_decoder.values() if token.special and token.content in shown
    ]


@lru_cache(maxsize=4)
def _markers(tokenizer: Any, template: str) -> Markers | None:
    try:
        dialogue, prompt = render(tokenizer, _DIALOGUE, False), render(tokenizer, _DIALOGUE[:1], True)
    except Unusable:
        return None
    texts = [turn["content"] for turn in _DIALOGUE]
    places = [dialogue.find(text) for text in texts]
    if min(places) < 0 or places != sorted(places) or texts[0] not in prompt:
        return None
    gaps = [dialogue[at + len(text) : then] for at, text, then in zip(places, texts, [*places[1:], None], strict=True)]
    after_question = prompt[prompt.index(texts[0]) + len(texts[0]) :]
    before, end = (commonprefix(pair) for pair in ([gaps[0], after_question], [gaps[1], gaps[3]]))  # noqa: RUF071
    answer = (before.removeprefix(end) if before.removeprefix(end).strip() else before).lstrip()
    begin = tokenizer.bos_token if tokenizer.bos_token and prompt.startswith(tokenizer.bos_token) else ""
    end_marker = "" if HARMONY in template else end.strip()
    opened = after_question[len(before) :]
    return Markers(begin, gaps[1][len(end) :].strip(), answer, opened, end_marker) if answer else None


def _parse(source: str, model: str) -> nodes.Template:
    try:
        return _JINJA.parse(source)
    except jinja2.TemplateSyntaxError as error:
        raise PipelineError(
            f"the chat template of {model} is no Jinja template: {error.message}, line {error.lineno}. Set "
            "target.chat_template to one"
        ) from None


def _keywords(parsed: nodes.Template) -> list[str]:
    """Return the names that the template reads without having set them, except for those of the renderer. Jinja also
    names what all branches of an `if` set: a name that is set somewhere is a keyword only where the template tests
    whether it is defined.
    """
    tested: list[Any] = [test.node for test in parsed.find_all(nodes.Test) if test.name in ("defined", "undefined")]
    tested += [filter_.node for filter_ in parsed.find_all(nodes.Filter) if filter_.name in ("default", "d")]
    tested_names = {node.name for node in tested if isinstance(node, nodes.Name)}
    assigned = {name.name for name in parsed.find_all(nodes.Name) if name.ctx == "store"} - tested_names
    read = jinja2.meta.find_undeclared_variables(parsed) - RENDERER_NAMES - assigned
    return sorted(name for name in read if not name.endswith("_token"))  # bos_token, ... are the tokenizer's


def _literal(value: Any) -> str:
    """Format the value as a literal of Jinja."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(key)}: {_literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return ascii(value)  # the same in Python and Jinja, in ASCII
