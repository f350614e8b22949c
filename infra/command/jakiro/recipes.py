"""List the recipes that come with the project, each with its target, its drafts and its first sentence.

jakiro recipes [WORD]
"""

import argparse
import shutil
import textwrap
import tomllib

from pipeline.recipe.read import RECIPES, shipped_recipes
from pipeline.running import entry


def summarise(name: str) -> tuple[str, str, str]:
    """Return (target, drafts, first sentence of the comment) of a recipe."""
    text = (RECIPES / f"{name}.toml").read_text()
    tree = tomllib.loads(text)
    comment = " ".join(line.lstrip("# ") for line in text.partition("\nname =")[0].splitlines())
    drafts = ", ".join(dict.fromkeys(draft["kind"] for draft in tree["draft"].values()))
    return tree["target"]["model"], drafts, comment.partition(". ")[0].rstrip(".")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("word", nargs="?", default="", help="only recipes with this in their name, target or drafts")
    word = parser.parse_args().word.lower()
    width = shutil.get_terminal_size().columns
    for name in shipped_recipes():
        target, drafts, comment = summarise(name)
        if word in f"{name} {target} {drafts}".lower():
            print(f"{name}: {target}; {drafts}")
            print(textwrap.fill(comment, width, initial_indent="    ", subsequent_indent="    "))


if __name__ == "__main__":
    entry.run(main)
