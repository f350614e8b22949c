"""The target's chat template as the recipe wants it: its keywords are given, and today's date is pinned.

Both are written into the text of the template itself, in front of it. So they hold wherever it is rendered, its
fingerprint covers them, and rendering never reads the clock.
"""

import json
from typing import Any

import jinja2.ext
import jinja2.meta
from jinja2 import nodes

from pipeline.basics.errors import PipelineError
from pipeline.lm.chat import probe, thinking
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


def template_settings(tokenizer: Any, config: TargetConfig) -> str:
    """What every artifact says of the template that it was made with: "thinking on, date 2024-07-26, NAME = VALUE".

    `tokenizer`: of `load_tokenizer`. The date is today's, as far as the target is told.
    """
    thinks = {True: ["thinking on"], False: ["thinking off"], None: []}[thinking(tokenizer)]
    dated = probe(tokenizer) != probe(tokenizer, **{PINNED: {}})
    given = [f"{name} = {json.dumps(value)}" for name, value in sorted(config.template_keywords.items())]
    return ", ".join([*thinks, *([f"date {config.template_date}"] if dated else []), *given])


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
