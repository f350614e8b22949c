"""A script that completes `jakiro` in a shell: its commands, their options, recipes by name.

    jakiro completion bash > ~/.local/share/bash-completion/completions/jakiro
    jakiro completion zsh > ~/.zfunc/_jakiro        (with fpath+=~/.zfunc before compinit)

It asks every command for its options, and that takes some seconds.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import shtab

import jakiro
from pipeline.recipe.read import shipped
from pipeline.running import entry

PREAMBLE = {
    "bash": '_jakiro_recipe() {{ compgen -W "{names}" -- "$1"; compgen -f -X "!*.toml" -- "$1"; compgen -d -- "$1"; }}',
    "zsh": "_jakiro_recipe() {{ compadd -- {names}; _files -g '*.toml' }}",
}


RECIPE = dict.fromkeys(PREAMBLE, "_jakiro_recipe")


class _Asked(BaseException):
    """Nothing between a command's parser and here catches it."""


@contextmanager
def _asking() -> Iterator[list[argparse.ArgumentParser]]:
    """In the block, a command that parses its arguments ends there, and its parser is in the list. (`parse_args` asks
    `parse_known_args`.)
    """
    found: list[argparse.ArgumentParser] = []

    def asked(parser: argparse.ArgumentParser, *_: object) -> None:
        found.append(parser)
        raise _Asked

    kept, argparse.ArgumentParser.parse_known_args = argparse.ArgumentParser.parse_known_args, asked
    try:
        yield found
    except _Asked:
        pass
    finally:
        argparse.ArgumentParser.parse_known_args = kept


def parser_of(name: str) -> argparse.ArgumentParser:
    """The parser of a command's own arguments."""
    with _asking() as found:
        jakiro.begin(name, [])
    parser = found[0]
    if jakiro.COMMANDS[name].runs == "pipeline":
        parser = next(iter(parser._subparsers._group_actions)).choices[name]
    return parser


def whole() -> argparse.ArgumentParser:
    """One parser of all commands."""
    parser = argparse.ArgumentParser(prog="jakiro")
    commands = parser.add_subparsers()
    for name, command in jakiro.COMMANDS.items():
        added = commands.add_parser(name, parents=[parser_of(name)], add_help=False, help=command.does)
        for action in added._actions:
            if action.dest in ("recipe", "place"):
                action.complete = RECIPE
            elif action.type is Path or action.dest in ("folder", "runs"):
                action.complete = shtab.FILE
    return parser


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shell", choices=sorted(PREAMBLE))
    shell = parser.parse_args().shell
    preamble = {shell: PREAMBLE[shell].format(names=" ".join(shipped()))}
    print(shtab.complete(whole(), shell, root_prefix="jakiro", preamble=preamble))


if __name__ == "__main__":
    entry.run(main)
