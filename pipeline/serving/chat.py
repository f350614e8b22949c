"""A chat in the terminal: what the draft guessed is coloured, and each answer's tau and tokens a second stand below it.

python -m pipeline chat RECIPE-or-RELEASE [--plain]
"""

import sys

from pipeline.lm.chat import as_message
from pipeline.serving.load import Answered, Loaded

GREEN, GREY, OFF = "\033[30;48;5;151m", "\033[90m", "\033[0m"
END = ("", "/quit")


def chat(loaded: Loaded, max_new_tokens: int, temperature: float, beside_plain: bool) -> None:
    """Reads questions until one is empty. `beside_plain`: every answer is decoded without the draft, too."""
    colours, messages = sys.stdout.isatty(), []
    print(f"Coloured: guessed by the draft. An empty line ends the chat. temperature {temperature:g}")
    while True:
        try:
            question = input("> ").strip()
        except EOFError:
            return
        if question in END:
            return
        messages.append({"role": "user", "content": question})
        shown = Shown(loaded, GREEN if colours else "")
        found = loaded.generate(messages, max_new_tokens, temperature, on_tokens=shown)
        shown.end()
        print(f"\n{GREY if colours else ''}{foot(found)}", end="")
        if beside_plain:
            plainly = loaded.generate(
                messages, max_new_tokens, temperature, plainly=True, on_tokens=Shown(loaded, None)
            )
            same = "the same tokens" if plainly.tokens == found.tokens else "OTHER tokens"
            print(f"; plain decoding {plainly.tokens_per_second:.1f} tokens/s, {same}", end="")
        print(OFF if colours else "")
        messages.append(as_message(loaded.target.tokenizer, found.tokens))


def foot(found: Answered) -> str:
    return f"{len(found.tokens)} tokens, tau {found.tau:.2f}, {found.tokens_per_second:.1f} tokens/s"


class Shown:
    """Prints tokens as rounds give them, part of a letter when the letter is whole. All tokens of a round but its last
    are shown as the draft's; where the end cuts a round, its last may be, too. Without a colour to mark these with
    (None) it prints nothing, and takes as long.
    """

    def __init__(self, loaded: Loaded, colour: str | None):
        self._tokenizer, self._colour = loaded.target.tokenizer, colour
        self._tokens: list[int] = []
        self._shown = ""

    def __call__(self, new: list[int]) -> None:
        for place, token in enumerate(new):
            self._tokens.append(token)
            self._show(place < len(new) - 1, last=False)

    def end(self) -> None:
        self._show(False, last=True)

    def _show(self, is_guess: bool, last: bool) -> None:
        text = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        whole = text if last else text.rstrip("\ufffd")
        piece = whole[len(self._shown) :]
        if piece:
            marked = f"{self._colour}{piece}{OFF}" if is_guess and self._colour else piece
            print("" if self._colour is None else marked, end="", flush=True)
            self._shown = whole
