"""A chat in the terminal: the draft's tokens are coloured; each answer's tau and tokens per second stand below it.

python -m pipeline chat RECIPE-or-RELEASE [--plain]
"""

import sys

from pipeline.lm.chat import parse_answer
from pipeline.serving.load import GeneratedAnswer, LoadedRelease

GREEN, GREY, OFF = "\033[30;48;5;151m", "\033[90m", "\033[0m"
END = ("", "/quit")


def chat(loaded: LoadedRelease, max_new_tokens: int, temperature: float, compare_plain: bool) -> None:
    """Answer questions until one is empty. `compare_plain`: every answer is decoded without the draft, too."""
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
        printer = TokenPrinter(loaded, GREEN if colours else "")
        answer = loaded.generate(messages, max_new_tokens, temperature, on_tokens=printer)
        printer.end()
        print(f"\n{GREY if colours else ''}{format_footer(answer)}", end="")
        if compare_plain:
            plain_answer = loaded.generate(
                messages, max_new_tokens, temperature, plainly=True, on_tokens=TokenPrinter(loaded, None)
            )
            comparison = "the same tokens" if plain_answer.tokens == answer.tokens else "OTHER tokens"
            print(f"; plain decoding {plain_answer.tokens_per_second:.1f} tokens/s, {comparison}", end="")
        print(OFF if colours else "")
        messages.append(parse_answer(loaded.target.tokenizer, answer.tokens))


def format_footer(answer: GeneratedAnswer) -> str:
    return f"{len(answer.tokens)} tokens, tau {answer.tau:.2f}, {answer.tokens_per_second:.1f} tokens/s"


class TokenPrinter:
    """A printer of tokens as rounds give them; parts of a character wait until it is complete. All tokens of a round
    but its last are shown as the draft's; where the end cuts a round, its last may be, too. With `colour` None it
    prints nothing, but takes as long.
    """

    def __init__(self, loaded: LoadedRelease, colour: str | None):
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
        complete = text if last else text.rstrip("\ufffd")
        piece = complete[len(self._shown) :]
        if piece:
            marked = f"{self._colour}{piece}{OFF}" if is_guess and self._colour else piece
            print("" if self._colour is None else marked, end="", flush=True)
            self._shown = complete
