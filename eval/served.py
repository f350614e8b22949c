"""Measure a running server with OpenAI's API: acceptance length and tokens a second.

    python -m eval.served RECIPE --url http://127.0.0.1:8000 [--plain-url URL] [--concurrency 1 4 16] [--model NAME]

The recipe's benchmarks go to ``/v1/chat/completions`` with its temperatures, sampling and `max_new_tokens`.
`--plain-url` names a server of the same target without a draft; the two take turns. If the server requires a key, set
the environment variable OPENAI_API_KEY. The rows are written to results.jsonl of the run one after the other; "over
plain" is tokens a second over those of the plain server.

tau is 1 + accepted guesses / passes, by the server's own counts: llama.cpp's in each answer, of all passes; SGLang's in
each answer and vLLM's in ``/metrics``, of passes that verified guesses (no other client may use vLLM meanwhile). A
server without counts gets no tau, nor does a level whose ``/metrics`` count more than its answers: the server was
restarted, or answers are left out. Tokens a second are all tokens of a benchmark over the time it took, with prompts,
HTTP and waiting; no level takes a prompt's forward from an earlier one's cache. What a server adds to the sampling by
default is switched off.
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
from eval.measure.prompts import BenchmarkPrompt
from eval.measure.tasks import load_tasks
from pipeline.artifacts.provenance import provenance
from pipeline.artifacts.reports import ResultRow, replace_rows
from pipeline.basics.errors import NoAnswer, PipelineError
from pipeline.basics.progress import Progress
from pipeline.basics.public import public_name
from pipeline.features.engines.openai import OpenAI, excerpt
from pipeline.lm.chat import prompt_ids
from pipeline.lm.model import load_tokenizer
from pipeline.recipe.load import add_recipe_arguments, load_recipe
from pipeline.recipe.recipe import Recipe
from pipeline.running import entry

TABLE_FIGURES = ["tau", "tokens/s", "over plain"]
VLLM_PREFIX = "vllm:spec_decode_num_"
START_METRIC = "process_start_time_seconds"
# Finish reasons of complete answers. None: the server gives no reason.
FINISH_REASONS = {None, "stop", "length", "tool_calls", "function_call", "eos_token", "stop_sequence"}
WITHHELD = "counters refused"  # the figure of a level that has no tau because of its counters
_FAILURES = (httpx2.HTTPError, httpx2.InvalidURL, ValueError, KeyError, IndexError, TypeError, AttributeError)


@dataclass
class Counts:
    """A server's counts of its draft tokens."""

    passes: int = 0  # of the target, that verified draft tokens
    drafted: int = 0
    accepted: int = 0
    by_depth: dict[int, int] = field(default_factory=dict)  # accepted draft tokens, from depth 1 on; vLLM's

    @property
    def tau(self) -> float | None:
        return 1 + self.accepted / self.passes if self.passes else None

    def __add__(self, second: "Counts") -> "Counts":
        return self._combine(second, 1)

    def __sub__(self, second: "Counts") -> "Counts":
        return self._combine(second, -1)

    def _combine(self, second: "Counts", sign: int) -> "Counts":
        places = {place: n + sign * second.by_depth.get(place, 0) for place, n in self.by_depth.items()}
        return Counts(
            self.passes + sign * second.passes,
            self.drafted + sign * second.drafted,
            self.accepted + sign * second.accepted,
            places,
        )


Sample = tuple[str, tuple[tuple[str, str], ...]]  # name and labels


@dataclass(frozen=True)
class Counters:
    """vLLM's counters of draft tokens at one moment, and the times at which vLLM says that they started."""

    values: dict[Sample, float]
    starts: dict[Sample, float]

    @property
    def counts(self) -> Counts:
        total: Counter[str] = Counter()
        places: Counter[int] = Counter()
        for (name, labels), value in self.values.items():
            if name == f"{VLLM_PREFIX}accepted_tokens_per_pos_total":
                places[int(dict(labels).get("position", 0)) + 1] += int(value)
            else:
                total[name] += int(value)
        names = (f"{VLLM_PREFIX}{name}_total" for name in ("drafts", "draft_tokens", "accepted_tokens"))
        return Counts(*(total[name] for name in names), dict(sorted(places.items())))

    def count_since(self, before: "Counters") -> Counts:
        """Return the counts since `before`. Raise PipelineError if the two are not of one run of the server, or hold a
        value that is no count.
        """
        for (name, _), value in [*before.values.items(), *self.values.items()]:
            if not (math.isfinite(value) and value >= 0 and value == int(value)):
                raise PipelineError(f"{name} is {value}, expected a count")
        restarted = [
            name for (name, labels), value in before.values.items() if self.values.get((name, labels), 0) < value
        ]
        restarted += [
            name for (name, labels), value in before.starts.items() if self.starts.get((name, labels)) != value
        ]
        if restarted:
            raise PipelineError(f"the server was restarted: {restarted[0]} went back, or is another")
        counts = self.counts - before.counts
        if counts.accepted > counts.drafted or max(counts.by_depth.values(), default=0) > counts.passes:
            raise PipelineError(f"more was accepted than there was: {counts}")
        return counts


@dataclass(frozen=True)
class ServedAnswer:
    server: str  # the name that it gives itself
    text: str
    prompt_tokens: int
    tokens: int
    counts: Counts | None  # None: the answer has no counts
    failed: str | None = None  # its finish reason, if that is none of a complete answer


@dataclass
class ServedConversation:
    """The answers to a prompt's turns, up to the one that failed."""

    answers: list[ServedAnswer] = field(default_factory=list)
    refused: NoAnswer | None = None  # set if a turn was refused; then the other answers do not count

    @property
    def valid(self) -> list[ServedAnswer]:
        return [] if self.refused else [answer for answer in self.answers if not answer.failed]


class ServerClient:
    """A server at one address. Its methods raise PipelineError if it does not answer as it should."""

    def __init__(self, url: str, recipe: Recipe, model: str | None = None):
        self._server, self._config = OpenAI(url, "the server's address"), recipe.eval
        self.url = self._server.url
        self._keywords = recipe.target.template_keywords
        self._seed = recipe.seed
        self.model = model or self._server.only_model("choose one with --model")
        self.answering: Any = None  # the model named in its answers

    def ask(self, messages: list[dict[str, str]], temperature: float, level: str) -> ServedAnswer:
        """Return the answer to a conversation. Levels share no cache. Raise NoAnswer, PipelineError."""
        config = self._config
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "temperature": temperature,
            "max_tokens": config.max_new_tokens,
            "top_p": config.top_p,
            "seed": self._seed,
            # a server takes missing keys from the model's generation_config.json, or from its own defaults
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
        response = self._server.ask("POST", "/v1/chat/completions", body)
        try:
            (choice, *_), usage = response["choices"], response["usage"]
            finish_reason, name = choice.get("finish_reason"), excerpt(str(response.get("system_fingerprint") or ""))
            model = response.get("model") or self.model
            self.answering = self.answering or model  # a gateway may answer with the name that an alias stands for
            if model not in (self.answering, self.model):
                raise ValueError(f"it is of model {model!r}, the first was of {self.answering!r}")
            tokens = read_count(usage, "prompt_tokens"), read_count(usage, "completion_tokens")
            failed = None if finish_reason in FINISH_REASONS else excerpt(str(finish_reason))
            return ServedAnswer(name, choice["message"]["content"] or "", *tokens, read_counts(response), failed)
        except _FAILURES as error:
            raise PipelineError(
                f"{self._server.url} does not answer as /v1/chat/completions should: {type(error).__name__}: "
                f"{excerpt(str(error))}, got {excerpt(response)}"
            ) from error

    def counters(self) -> Counters | None:
        """Return vLLM's counters of all answers since it started; None for a server that has none."""
        try:
            response = self._server.client.get(f"{self._server.url}/metrics")
            return parse_counters(response.text) if response.status_code == 200 else None
        except _FAILURES:
            return None


def parse_counters(metrics: str) -> Counters | None:
    """Return vLLM's counters of draft tokens from Prometheus' text; None if there are none."""
    result = Counters({}, {})
    for sample in (sample for family in text_string_to_metric_families(metrics) for sample in family.samples):
        key = sample.name, tuple(sorted(sample.labels.items()))
        if sample.name.startswith(VLLM_PREFIX) and sample.name.endswith("_total"):
            int(sample.labels.get("position", 0))  # ValueError: these are not vLLM's
            result.values[key] = sample.value
        elif sample.name == START_METRIC or (sample.name.startswith(VLLM_PREFIX) and sample.name.endswith("_created")):
            result.starts[key] = sample.value
    return result if any(name == f"{VLLM_PREFIX}drafts_total" for name, _ in result.values) else None


def read_count(fields: dict[str, Any], name: str, default: int | None = None) -> int:
    """Return the count `name`. Raise ValueError if it is no count, KeyError if it is missing without a default."""
    value = fields[name] if default is None else fields.get(name, default)
    if type(value) is not int or not 0 <= value < 1 << 53:
        raise ValueError(f"{name} is {value!r}, expected a count")
    return value


def read_counts(response: dict[str, Any]) -> Counts | None:
    """Return the counts in an answer: llama.cpp's ``timings``, SGLang's ``sglext``; None without either. Raise
    ValueError for a value that is no count.
    """
    if timings := response.get("timings"):
        # each pass emits the accepted tokens and one more; the first token is that of the prefill
        drafted, accepted = read_count(timings, "draft_n", 0), read_count(timings, "draft_n_accepted", 0)
        counts = Counts(max(read_count(timings, "predicted_n") - 1 - accepted, 0), drafted, accepted)
    else:
        extra = response.get("sglext") or response["choices"][0].get("sglext") or {}
        details = extra.get("spec_tokens_details") or {}
        if not details.get("spec_verify_ct"):
            return None
        names = ("verify_ct", "num_proposed_drafts", "num_correct_drafts")
        counts = Counts(*(read_count(details, f"spec_{name}") for name in names))
    if counts.accepted > counts.drafted:
        raise ValueError(f"of {counts.drafted} guesses it accepted {counts.accepted}")
    return counts


def converse(server: ServerClient, task: EvalTask, level: str) -> ServedConversation:
    """Ask all turns of a prompt, each after the server's own earlier answers; stop after a turn that failed."""
    messages, conversation = task.prompt.messages(), ServedConversation()
    for turn in task.prompt.turns:
        messages.append({"role": "user", "content": turn})
        try:
            conversation.answers.append(server.ask(messages, task.temperature, level))
        except NoAnswer as error:
            conversation.refused = error
            break
        if conversation.answers[-1].failed:
            break
        messages.append({"role": "assistant", "content": conversation.answers[-1].text})
    return conversation


def measure_level(
    server: ServerClient, tasks: list[EvalTask], concurrency: int, progress: Progress
) -> tuple[dict[str, float], list[ServedConversation], str]:
    """Measure a benchmark at one temperature with `concurrency` requests at once. Return the figures; the
    conversations, by task; and the reason why the server's counters give no tau, empty if they do.
    """
    name = f"{tasks[0].benchmark} {tasks[0].temperature} {concurrency} {time.time()}"
    before, begin = server.counters(), time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        conversations = []
        for conversation in pool.map(lambda task: converse(server, task, name), tasks):
            conversations.append(conversation)
            progress.advance(1, benchmark=tasks[0].benchmark, concurrency=concurrency)
    seconds, after = time.perf_counter() - begin, server.counters()
    valid_answers = [answer for conversation in conversations for answer in conversation.valid]
    refused = [conversation.refused for conversation in conversations if conversation.refused]
    failed = [answer.failed for conversation in conversations for answer in conversation.answers if answer.failed]
    if not valid_answers:
        message = f"{server.url}: all answers failed, got finish_reason {failed[:1]}, expected stop or length"
        raise refused[0] if refused else PipelineError(f"{message}. See the server's log")
    figures = {"answers": len(valid_answers), "refused": len(refused), "failed": len(failed)}
    figures["tokens/s"] = sum(answer.tokens for answer in valid_answers) / seconds
    answer_counts, reason = [answer.counts for answer in valid_answers if answer.counts is not None], ""
    counts = sum(answer_counts, Counts())
    if not answer_counts and (before or after):
        try:
            counts = subtract_counters(
                before, after, sum(len(conversation.answers) for conversation in conversations) - len(valid_answers)
            )
        except PipelineError as error:
            reason, figures[WITHHELD] = str(error), 1
    if counts.drafted and counts.tau:
        figures["tau"] = counts.tau
        for place, accepted in counts.by_depth.items():
            figures[f"accepted at depth {place}"] = accepted / counts.passes
    return figures, conversations, reason


def subtract_counters(before: Counters | None, after: Counters | None, left_out: int) -> Counts:
    """Return the counts of a level from the server's counters before and after it. Raise PipelineError if they also
    count other answers.
    """
    if not (before and after):
        raise PipelineError("/metrics had the counters only before it, or only after it")
    counts = after.count_since(before)
    if left_out:
        raise PipelineError("answers are left out, and /metrics counts their passes")
    return counts


def measure(recipe: Recipe, servers: dict[bool, ServerClient], concurrency: list[int]) -> tuple[list[ResultRow], int]:
    """Measure all benchmarks, temperatures and concurrencies. Return the rows, and how many prompts have another length
    on the server than on this machine. `servers` by whether they draft; they take turns. The rows so far are written
    after each turn.
    """
    tasks, lengths, differ = load_tasks(recipe), _prompt_lengths(recipe), set()
    for server in servers.values():
        converse(server, tasks[0], "warm-up")  # a server's first answer includes compilation
    rows: list[ResultRow] = []
    facts = provenance(recipe)  # of this machine, which sends the requests; the server's hardware is unknown
    origin = {"run": recipe.name, "recipe_hash": facts["recipe_hash"], "code_revision": facts["code_revision"]}
    origins = {draft: origin | {"model": excerpt(public_name(server.model))} for draft, server in servers.items()}
    with Progress("served", len(tasks) * len(concurrency) * len(servers), "prompts") as progress:
        for group, size in product(_group_tasks(tasks), concurrency):
            figures: dict[bool, dict[str, float]] = {}
            reasons: dict[bool, str] = {}
            for draft, server in servers.items():
                figures[draft], conversations, reasons[draft] = measure_level(server, group, size, progress)
                for task, answers in zip(group, (conversation.valid for conversation in conversations), strict=True):
                    if not answers:
                        continue
                    origins[draft]["server"] = answers[0].server
                    if answers[0].prompt_tokens != lengths(task.prompt):
                        differ.add((task.benchmark, task.prompt.question_id))
            if False in figures:
                figures[True]["over plain"] = figures[True]["tokens/s"] / figures[False]["tokens/s"]
            place = {"benchmark": group[0].benchmark, "temperature": group[0].temperature}
            for draft, draft_figures in figures.items():
                row_facts = {**place, "setting": {"at once": size}, "origin": origins[draft]}
                method = "server" if draft else "plain"
                details = {WITHHELD: {"why": reasons[draft]}}
                rows += [
                    ResultRow("served", method, figure, value, **row_facts, details=details.get(figure, {}))
                    for figure, value in draft_figures.items()
                ]
            replace_rows(recipe.paths.eval, rows, all_methods=True)
    return rows, len(differ)


def _prompt_lengths(recipe: Recipe) -> Callable[[BenchmarkPrompt], int]:
    """Return a function that counts the tokens of a prompt's first turn under the recipe's template."""
    tokenizer = load_tokenizer(recipe.target)
    return cache(lambda prompt: len(prompt_ids(tokenizer, prompt.messages(1))))


def _group_tasks(tasks: list[EvalTask]) -> Iterator[list[EvalTask]]:
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
    servers = {True: ServerClient(arguments.url, recipe, arguments.model)}
    if arguments.plain_url:
        servers[False] = ServerClient(arguments.plain_url, recipe, arguments.model)
    rows, differ = measure(recipe, servers, arguments.concurrency)
    available = {row.figure for row in rows}
    print(results.format_table(rows, [figure for figure in TABLE_FIGURES if figure in available]))
    if refused := sum(row.value or 0 for row in rows if row.figure == "refused"):
        print(f"{refused} prompts were refused (status 400, 413 or 422) and are left out: too long for the server?")
    if failed := sum(row.value or 0 for row in rows if row.figure == "failed"):
        print(f"{failed} answers failed (they end neither with stop nor length) and are left out: see its log")
    for reason, levels in Counter(row.details["why"] for row in rows if row.figure == WITHHELD).items():
        print(f"{levels} measurements have no tau, for the server's counters are not those of the answers: {reason}")
    if differ:
        print(f"{differ} prompts have other lengths on the server than here: its chat template is another one")


if __name__ == "__main__":
    entry.run(main)
