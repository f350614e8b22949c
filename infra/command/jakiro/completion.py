"""A script that completes `jakiro` in a shell: its commands, their options, recipes by name, files.

    jakiro completion bash > ~/.local/share/bash-completion/completions/jakiro
    jakiro completion zsh > ~/.zfunc/_jakiro        (with fpath+=~/.zfunc before compinit)

It reads every command's --help, and that takes some seconds.
"""

import argparse
import contextlib
import io
import re

import shtab

import jakiro
from pipeline.recipe.read import shipped
from pipeline.running import entry

NAMES = " ".join(shipped())
SHELLS = {
    "bash": f'_jakiro_recipe() {{ compgen -W "{NAMES}" -- "$1"; compgen -f -- "$1"; }}',
    "zsh": f"_jakiro_recipe() {{ compadd -- {NAMES}; _files }}",
}


def help_of(name: str) -> str:
    """What `jakiro NAME --help` prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        jakiro.begin(name, ["--help"])
    return printed.getvalue()


def all_commands() -> argparse.ArgumentParser:
    """A parser of all commands, with the options that their help names."""
    whole = argparse.ArgumentParser(prog="jakiro")
    commands = whole.add_subparsers()
    for name, command in jakiro.COMMANDS.items():
        text, options = help_of(name), commands.add_parser(name, help=command.does)
        takes_recipe = re.search(r"^  (recipe|place)\b", text, re.M)
        words = options.add_argument("words", nargs="*")
        words.complete = dict.fromkeys(SHELLS, "_jakiro_recipe") if takes_recipe else shtab.FILE
        for flag, value in re.findall(r"^  (--[\w-]+)(?: (\S+))?", text, re.M):
            if value.startswith("{"):
                options.add_argument(flag, choices=value.strip("{}").split(","))
            elif value:
                options.add_argument(flag, action="append").complete = shtab.FILE
            else:
                options.add_argument(flag, action="store_true")
    return whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shell", choices=SHELLS)
    shell = parser.parse_args().shell
    print(shtab.complete(all_commands(), shell, preamble={shell: SHELLS[shell]}))


if __name__ == "__main__":
    entry.run(main)
