"""Measures a running server that speaks OpenAI's API: acceptance length and tokens a second.

    python -m eval.served RECIPE --url http://127.0.0.1:8000 [--plain-url URL] [--concurrency 1 4 16] [--model NAME]

The recipe's benchmarks go to ``/v1/chat/completions`` with its temperatures, sampling and `max_new_tokens`.
`--plain-url` names a server of the same target without a draft; the two take turns. A key, where the server wants one,
stands in the environment variable OPENAI_API_KEY. The rows go to results.jsonl of the run as they come;
"over plain" is tokens a second over those of the plain server.

tau is 1 + accepted guesses / passes, by the server's own counts: llama.cpp's in each answer, of all passes; SGLang's in
each answer and vLLM's in ``/metrics``, of passes that verified guesses (nobody else may use vLLM meanwhile). A server
that tells none gets no tau, nor does a level whose ``/metrics`` are not of its answers alone: the server was started
anew, or answers are left out. Tokens a second are all tokens of a benchmark over the time it took, with prompts, HTTP
and waiting; no level takes a prompt's forward from an earlier one's cache. What a server adds to the sampling by itself
is switched off.
"""

import argparse
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from typing import Any

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from eval import results
from eval.measure.harness import EvalTask
from eval.measure.prompts import Prompt
from eval.measure.tasks import tasks_of
from pipeline.artifacts.provenance import provenance
from pipeline.artifacts.reports import Row, put_rows
from pipeline.basics.errors import NoAnswer, PipelineError
from pipeline.basics.progress import Progress
from pipeline.basics.public import public_name
from pipeline.features.engines.openai import OpenAI, excerpt
from pipeline.lm.chat import prompt_ids
from pipeline.lm.model import load_tokenizer
from pipeline.recipe.load import add_recipe_arguments, load_recipe
from pipeline.recipe.recipe import Recipe
from pipeline.running import entry

SHOWN = ["tau", "tokens/s", "over plain"]
VLLM = "vllm:spec_decode_num_"
START = "process_start_time_seconds"
FINISHED = {
    None,
    "stop",
    "length",
    "tool_calls",
    "function_call",
    "eos_token",
    "stop_sequence",
}  # None: it does not say
WITHHELD = "counters refused"  # the figure of a level that has no tau because of its counters
_FAILED = (httpx2.HTTPError, httpx2.InvalidURL, ValueError, KeyError, IndexError, TypeError, AttributeError)


@dataclass
class Counts:
    """What a server says of its guesses."""

    passes: int = 0  # of the target, that verified guesses
    drafted: int = 0
    accepted: int = 0
    by_place: dict[int, int] = field(default_factory=dict)  # accepted guesses, the first of a pass at place 1; vLLM's

    @property
    def tau(self) -> float | None:
        return 1 + self.accepted / self.passes if self.passes else None

    def __add__(self, other: "Counts") -> "Counts":
        return self._with(other, 1)

    def __sub__(self, other: "Counts") -> "Counts":
        return self._with(other, -1)

    def _with(self, other: "Counts", sign: int) -> "Counts":
        places = {place: n + sign * other.by_place.get(place, 0) for place, n in self.by_place.items()}
        return Counts(
            self.passes + sign * other.passes,
            self.drafted + sign * other.drafted,
            self.accepted + sign * other.accepted,
            places,
        )


Sample = tuple[str, tuple[tuple[str, str], ...]]  # name and labels


@dataclass(frozen=True)
class Counters:
    """vLLM's of guesses at one moment, and when it says that they began."""

    values: dict[Sample, float]
    starts: dict[Sample, float]

    @property
    def counts(self) -> Counts:
        total: Counter[str] = Counter()
        places: Counter[int] = Counter()
        for (name, labels), value in self.values.items():
            if name == f"{VLLM}accepted_tokens_per_pos_total":
                places[int(dict(labels).get("position", 0)) + 1] += int(value)
            else:
                total[name] += int(value)
        names = (f"{VLLM}{name}_total" for name in ("drafts", "draft_tokens", "accepted_tokens"))
        return Counts(*(total[name] for name in names), dict(sorted(places.items())))

    def since(self, before: "Counters") -> Counts:
        """What came after `before`. Raises PipelineError where the two are not of one run of the server, or hold what
        is no count.
        """
        for (name, _), value in [*before.values.items(), *self.values.items()]:
            if not (math.isfinite(value) and value >= 0 and value == int(value)):
                raise PipelineError(f"{name} is {value}, expected a count")
        back = [name for (name, labels), value in before.values.items() if self.values.get((name, labels), 0) < value]
        back += [name for (name, labels), value in before.starts.items() if self.starts.get((name, labels)) != value]
        if back:
            raise PipelineError(f"the server was started anew: {back[0]} went back, or is another")
        found = self.counts - before.counts
        if found.accepted > found.drafted or max(found.by_place.values(), default=0) > found.passes:
            raise PipelineError(f"more was accepted than there was: {found}")
        return found


@dataclass(frozen=True)
class Answer:
    server: str  # what it calls itself
    text: str
    prompt_tokens: int
    tokens: int
    counts: Counts | None  # None: this answer does not say
    failed: str | None = None  # how it ended, where that is no end of an answer


@dataclass
class Conversation:
    """The answers to a prompt's turns, up to the one that failed."""

    answers: list[Answer] = field(default_factory=list)
    refused: NoAnswer | None = None  # a turn was; then the others count as little

    @property
    def valid(self) -> list[Answer]:
        return [] if self.refused else [answer for answer in self.answers if not answer.failed]


class Server:
    """One address. Raises PipelineError where it does not answer as it should."""

    def __init__(self, url: str, recipe: Recipe, model: str | None = None):
        self._server, self._config = OpenAI(url, "the server's address"), recipe.eval
        self.url = self._server.url
        self._keywords = recipe.target.template_keywords
        self._seed = recipe.seed
        self.model = model or self._server.only_model("choose one with --model")
        self.answering: Any = None  # the model that its answers name

    def ask(self, messages: list[dict[str, str]], temperature: float, level: str) -> Answer:
        """The answer to a conversation. `level`: its caches are not those of others. Raises NoAnswer, PipelineError."""
        config = self._config
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "temperature": temperature,
            "max_tokens": config.max_new_tokens,
            "top_p": config.top_p,
            "seed": self._seed,
            # what is left out a server takes from the model's generation_config.json, or from defaults of its own
            "top_k": -1 if config.top_k is None else config.top_k,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "cache_salt": level,  # vLLM's and SGLang's
            "cache_prompt": False,  # llama.cpp's
            "return_spec_tokens_details": True,  # SGLang's
        }
        if self._keywords:
            body["chat_template_kwargs"] = self._keywords
        found = self._server.ask("POST", "/v1/chat/completions", body)
        try:
            (choice, *_), usage = found["choices"], found["usage"]
            why, name = choice.get("finish_reason"), excerpt(str(found.get("system_fingerprint") or ""))
            model = found.get("model") or self.model
            self.answering = self.answering or model  # a gateway may answer with the name behind an alias
            if model not in (self.answering, self.model):
                raise ValueError(f"it is of model {model!r}, the first was of {self.answering!r}")
            tokens = count(usage, "prompt_tokens"), count(usage, "completion_tokens")
            failed = None if why in FINISHED else excerpt(str(why))
            return Answer(name, choice["message"]["content"] or "", *tokens, counts_of(found), failed)
        except _FAILED as error:
            raise PipelineError(
                f"{self._server.url} does not answer as /v1/chat/completions should: {type(error).__name__}: "
                f"{excerpt(str(error))}, got {excerpt(found)}"
            ) from error

    def counters(self) -> Counters | None:
        """vLLM's, of all answers since it started; None for a server that has none."""
        try:
            got = self._server.client.get(f"{self._server.url}/metrics")
            return counters(got.text) if got.status_code == 200 else None
        except _FAILED:
            return None


def counters(metrics: str) -> Counters | None:
    """vLLM's of guesses, in Prometheus' text; None where there are none."""
    found = Counters({}, {})
    for sample in (sample for family in text_string_to_metric_families(metrics) for sample in family.samples):
        key = sample.name, tuple(sorted(sample.labels.items()))
        if sample.name.startswith(VLLM) and sample.name.endswith("_total"):
            int(sample.labels.get("position", 0))  # ValueError: these are not vLLM's
            found.values[key] = sample.value
        elif sample.name == START or (sample.name.startswith(VLLM) and sample.name.endswith("_created")):
            found.starts[key] = sample.value
    return found if any(name == f"{VLLM}drafts_total" for name, _ in found.values) else None


def count(found: dict[str, Any], name: str, default: int | None = None) -> int:
    """Raises ValueError for what is no count, KeyError where there is none and no default."""
    value = found[name] if default is None else found.get(name, default)
    if type(value) is not int or not 0 <= value < 1 << 53:
        raise ValueError(f"{name} is {value!r}, expected a count")
    return value


def counts_of(found: dict[str, Any]) -> Counts | None:
    """What an answer says of its guesses: llama.cpp's ``timings``, SGLang's ``sglext``. Raises ValueError for what is
    no count.
    """
    if timings := found.get("timings"):
        # each pass gives what it accepts and one token; the first token is the prompt's
        drafted, accepted = count(timings, "draft_n", 0), count(timings, "draft_n_accepted", 0)
        counts = Counts(max(count(timings, "predicted_n") - 1 - accepted, 0), drafted, accepted)
    else:
        extra = found.get("sglext") or found["choices"][0].get("sglext") or {}
        details = extra.get("spec_tokens_details") or {}
        if not details.get("spec_verify_ct"):
            return None
        names = ("verify_ct", "num_proposed_drafts", "num_correct_drafts")
        counts = Counts(*(count(details, f"spec_{name}") for name in names))
    if counts.accepted > counts.drafted:
        raise ValueError(f"of {counts.drafted} guesses it accepted {counts.accepted}")
    return counts


def converse(server: Server, task: EvalTask, level: str) -> Conversation:
    """All turns of a prompt, each with the server's own earlier answers before it; none after one that failed."""
    messages, found = task.prompt.asked(), Conversation()
    for turn in task.prompt.turns:
        messages.append({"role": "user", "content": turn})
        try:
            found.answers.append(server.ask(messages, task.temperature, level))
        except NoAnswer as error:
            found.refused = error
            break
        if found.answers[-1].failed:
            break
        messages.append({"role": "assistant", "content": found.answers[-1].text})
    return found


def level(
    server: Server, tasks: list[EvalTask], concurrency: int, progress: Progress
) -> tuple[dict[str, float], list[Conversation], str]:
    """The figures of a benchmark at one temperature, so many answers asked for at once; the conversations, by task; and
    why the server's counters give no tau, if they do not.
    """
    name = f"{tasks[0].benchmark} {tasks[0].temperature} {concurrency} {time.time()}"
    before, begin = server.counters(), time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        found = []
        for conversation in pool.map(lambda task: converse(server, task, name), tasks):
            found.append(conversation)
            progress.advance(1, benchmark=tasks[0].benchmark, concurrency=concurrency)
    seconds, after = time.perf_counter() - begin, server.counters()
    flat = [answer for one in found for answer in one.valid]
    refused = [one.refused for one in found if one.refused]
    failed = [answer.failed for one in found for answer in one.answers if answer.failed]
    if not flat:
        reason = f"{server.url}: all answers failed, got finish_reason {failed[:1]}, expected stop or length"
        raise refused[0] if refused else PipelineError(f"{reason}. See the server's log")
    figures = {"answers": len(flat), "refused": len(refused), "failed": len(failed)}
    figures["tokens/s"] = sum(answer.tokens for answer in flat) / seconds
    told, why = [answer.counts for answer in flat if answer.counts is not None], ""
    counts = sum(told, Counts())
    if not told and (before or after):
        try:
            counts = counts_between(before, after, sum(len(one.answers) for one in found) - len(flat))
        except PipelineError as error:
            why, figures[WITHHELD] = str(error), 1
    if counts.drafted and counts.tau:
        figures["tau"] = counts.tau
        for place, accepted in counts.by_place.items():
            figures[f"accepted at depth {place}"] = accepted / counts.passes
    return figures, found, why


def counts_between(before: Counters | None, after: Counters | None, left_out: int) -> Counts:
    """By a server's counters around a level. Raises PipelineError where they are of other answers than those here."""
    if not (before and after):
        raise PipelineError("/metrics had the counters only before it, or only after it")
    found = after.since(before)
    if left_out:
        raise PipelineError("answers are left out, and /metrics counts their passes")
    return found


def measure(recipe: Recipe, servers: dict[bool, Server], concurrency: list[int]) -> tuple[list[Row], int]:
    """The rows of all benchmarks, temperatures and concurrencies, and how many prompts have other lengths on the server
    than here. `servers`: whether one drafts; they take turns. The rows so far are written after each turn.
    """
    tasks, lengths, differ = tasks_of(recipe), _lengths(recipe), set()
    for server in servers.values():
        converse(server, tasks[0], "warm-up")  # a server's first answer pays for what it compiles
    rows: list[Row] = []
    found = provenance(recipe)  # of this machine, which asks; the server's hardware is not known
    origin = {"run": recipe.name, "recipe_hash": found["recipe_hash"], "code_revision": found["code_revision"]}
    origins = {draft: origin | {"model": excerpt(public_name(server.model))} for draft, server in servers.items()}
    with Progress("served", len(tasks) * len(concurrency) * len(servers), "prompts") as progress:
        for group, size in product(_groups(tasks), concurrency):
            figures: dict[bool, dict[str, float]] = {}
            why: dict[bool, str] = {}
            for draft, server in servers.items():
                figures[draft], conversations, why[draft] = level(server, group, size, progress)
                for task, answers in zip(group, (one.valid for one in conversations), strict=True):
                    if not answers:
                        continue
                    origins[draft]["server"] = answers[0].server
                    if answers[0].prompt_tokens != lengths(task.prompt):
                        differ.add((task.benchmark, task.prompt.question_id))
            if False in figures:
                figures[True]["over plain"] = figures[True]["tokens/s"] / figures[False]["tokens/s"]
            where = {"benchmark": group[0].benchmark, "temperature": group[0].temperature}
            for draft, own in figures.items():
                what = {**where, "setting": {"at once": size}, "origin": origins[draft]}
                method = "server" if draft else "plain"
                details = {WITHHELD: {"why": why[draft]}}
                rows += [
                    Row("served", method, figure, value, **what, details=details.get(figure, {}))
                    for figure, value in own.items()
                ]
            put_rows(recipe.paths.eval, rows, whole=True)
    return rows, len(differ)


def _lengths(recipe: Recipe) -> Callable[[Prompt], int]:
    """How many tokens a prompt's first turn has by our template."""
    tokenizer = load_tokenizer(recipe.target)
    return cache(lambda prompt: len(prompt_ids(tokenizer, prompt.asked(1))))


def _groups(tasks: list[EvalTask]) -> Iterator[list[EvalTask]]:
    for key in dict.fromkeys((task.benchmark, task.temperature) for task in tasks):
        yield [task for task in tasks if (task.benchmark, task.temperature) == key]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_recipe_arguments(parser)
    parser.add_argument("--url", required=True, help="the server that drafts")
    parser.add_argument("--plain-url", help="a server of the same target without a draft")
    parser.add_argument("--model", help="of the server's models; needed where it serves several")
    parser.add_argument(
        "--concurrency", type=int, nargs="+", default=[1, 4, 16], help="answers asked for at the same time"
    )
    arguments = parser.parse_args()
    if min(arguments.concurrency) < 1:
        raise PipelineError(f"--concurrency {arguments.concurrency}: expected numbers from 1 on")
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    servers = {True: Server(arguments.url, recipe, arguments.model)}
    if arguments.plain_url:
        servers[False] = Server(arguments.plain_url, recipe, arguments.model)
    rows, differ = measure(recipe, servers, arguments.concurrency)
    known = {row.figure for row in rows}
    print(results.table(rows, [figure for figure in SHOWN if figure in known]))
    if refused := sum(row.value or 0 for row in rows if row.figure == "refused"):
        print(f"{refused} prompts were refused (status 400, 413 or 422) and are left out: too long for the server?")
    if failed := sum(row.value or 0 for row in rows if row.figure == "failed"):
        print(f"{failed} answers failed (they end neither with stop nor length) and are left out: see its log")
    for why, levels in Counter(row.details["why"] for row in rows if row.figure == WITHHELD).items():
        print(f"{levels} measurements have no tau, for the server's counters are not those of the answers: {why}")
    if differ:
        print(f"{differ} prompts have other lengths on the server than here: its chat template is another one")


if __name__ == "__main__":
    entry.run(main)
