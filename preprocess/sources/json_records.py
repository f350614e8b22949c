"""A parser of the records of a JSON file as its bytes arrive: the elements of one list, which may stand under "data" in
an object, objects one after the other, or one object a line.

Guarantees: memory is bounded, whatever the file holds; a record that is nested deeper than MAX_DEPTH or longer than
LONGEST is skipped and replaced by its first characters (which are no dialogue); a record counts as torn only at the
file's end.
"""

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO, Literal

MAX_DEPTH = 64  # levels of a record
LONGEST = 1 << 24  # characters, or bytes of a line, of a record
BLOCK, LINE_BLOCK, LOOKAHEAD = (
    1 << 17,
    1 << 20,
    1 << 20,
)  # bytes that are read at once, and peeked at to detect the layout
SHOWN = 200  # characters that replace a skipped record
BOM = codecs.BOM_UTF8

_parse = json.JSONDecoder().raw_decode
_SPACE = re.compile(r"[ \t\n\r]*")
_MARK = re.compile(r'\\.|["\[\]{},]', re.DOTALL)
_WRAPPED = re.compile(  # members of one word each before the list
    rb'\s*\{(?:\s*"[^"\\]*"\s*:\s*(?:"(?:[^"\\]|\\.)*"|[-+.\w]+)\s*,)*\s*"data"\s*:\s*\[\s*[\{\]]'
)
_BEGUN_NUMBER = re.compile(r"[-+.eE0-9]*")
_WORDS = ("true", "false", "null", "NaN", "Infinity", "-Infinity")


class Unparsable(Exception):
    """A parse error. `torn`: the file ends there."""

    def __init__(self, reason: str, torn: bool = False):
        super().__init__(reason)
        self.torn = torn


class NotAList(Exception):
    """An error: the file is JSON, but holds no list of records."""


class PeekableFile:
    """A file whose next bytes can be read without consuming them. A byte order mark of UTF-8 is left out.

    ``torn``: it is compressed, and stops before the end of its stream.
    """

    def __init__(self, raw: BinaryIO):
        # read1 returns the bytes of one block: nothing of it is lost when the next one is torn.
        self._read = getattr(raw, "read1", raw.read)
        self._ahead, self.torn = b"", False
        self._ahead = self.peek(4).removeprefix(BOM)

    def peek(self, size: int) -> bytes:
        """Return up to `size` bytes, which are read again later."""
        while len(self._ahead) < size and (more := self._fetch(size - len(self._ahead))):
            self._ahead += more
        return self._ahead[:size]

    def is_wide(self) -> bool:
        """Return whether the text has two or four bytes a character, which JSON does not allow."""
        head = self._ahead[:4]
        return head[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) or b"\0" in head

    def read(self, size: int) -> bytes:
        if self._ahead:
            content, self._ahead = self._ahead[:size], self._ahead[size:]
            return content
        return self._fetch(size)

    def _fetch(self, size: int) -> bytes:
        try:
            return self._read(size)
        except EOFError:
            self.torn = True
            return b""

    def lines(self) -> Iterator[bytes]:
        """Yield the lines with their line ends; a line longer than LONGEST is replaced by a short text."""
        begun: list[bytes] = []
        size = 0
        while content := self.read(LINE_BLOCK):
            *lines, last = content.split(b"\n")
            for line in lines:
                size += len(line)
                yield b"".join([*begun, line, b"\n"]) if size <= LONGEST else _TOO_LONG
                begun, size = [], 0
            size += len(last)
            begun = [*begun, last] if size <= LONGEST else []
        if size:
            yield b"".join(begun) if size <= LONGEST else _TOO_LONG


_TOO_LONG = b"(a line that is too long)\n"


def layout_of(file: PeekableFile) -> Literal["list", "wrapped", "objects", "lines"]:
    """Return the layout of a file's records. "lines": its first line is an object, or it does not begin as a list, but
    a later line is an object. "objects": its first object does not end with its line. "wrapped": it is one object that
    holds a list under "data".
    """
    begin = file.peek(BLOCK).lstrip()[:1]
    if begin == b"[":
        return "list"
    first, _, rest = file.peek(LOOKAHEAD).lstrip().partition(b"\n")
    if begin != b"{":
        return "lines" if any(_is_object(line) for line in rest.split(b"\n")) else "list"
    if _is_object(first):
        return "wrapped" if _WRAPPED.match(first) and not rest.strip() else "lines"
    if _WRAPPED.match(file.peek(LOOKAHEAD)):
        return "wrapped"
    return "objects" if rest and _begins_with_a_value(file.peek(LOOKAHEAD)) else "lines"


def _begins_with_a_value(content: bytes) -> bool:
    """Return whether the content begins with a JSON value, complete or cut off at the end of the content."""
    text = content.decode(errors="replace").lstrip()
    try:
        _parse(text)
    except json.JSONDecodeError as error:
        return _is_truncated(text, error)
    except (ValueError, RecursionError):
        return False
    return True


def _is_object(line: bytes) -> bool:
    try:
        return line.lstrip()[:1] == b"{" and isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def parsed_line(line: bytes) -> Any:
    """Return the record of a line; text in place of one that is nested too deep. Raise ValueError for a line that is no
    JSON.
    """
    try:
        record = json.loads(line)
    except RecursionError:
        return shown_line(line)
    deep = line.count(b"[") + line.count(b"{") > MAX_DEPTH and is_too_deep(record)
    return shown_line(line) if deep else record


def shown_line(line: bytes) -> str:
    return line[:SHOWN].decode(errors="replace")


def is_too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        below = (item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list))
        level = [inner for values in below for inner in values]
        if not level:
            return False
    return any(isinstance(item, dict | list) for item in level)


def list_items(file: PeekableFile) -> Iterator[Any]:
    """Yield the elements of one list. Raise Unparsable, NotAList, and the errors of reading the file."""
    text = _Text(file)
    if (first := text.next_mark()) != "[":
        if not first:
            raise Unparsable("it is empty", torn=True)
        text.at -= 1
        text.record()
        raise NotAList
    if mark := text.next_mark():
        text.at -= 1
    if mark == "]":
        raise NotAList
    yield from _elements(text)
    if mark := text.next_mark():
        raise Unparsable(f"{mark!r} after the end of the list")


def _elements(text: "_Text") -> Iterator[Any]:
    """Yield a list's elements, from after its opening bracket to its end."""
    while True:
        yield text.record()
        mark = text.next_mark()
        if mark == "]":
            return
        if mark != ",":
            raise Unparsable(f"{mark!r} between two records", torn=not mark)


def wrapped_items(file: PeekableFile) -> Iterator[Any]:
    """Yield the elements of the list under "data" of one object. Raise the errors of `list_items`."""
    text = _Text(file)
    text.expect("{")
    mark = ","
    while mark == ",":
        key = text.record()
        text.expect(":")
        if key == "data":
            text.expect("[")
            if text.next_mark() == "]":
                raise NotAList
            text.at -= 1
            yield from _elements(text)
        else:
            text.record()
        mark = text.next_mark()
    if mark != "}":
        raise Unparsable(f"{mark!r} after a value", torn=not mark)
    if mark := text.next_mark():
        raise Unparsable(f"{mark!r} after the end of the object")


def objects(file: PeekableFile) -> Iterator[Any]:
    """Yield values that follow each other. Raise Unparsable and the errors of reading the file."""
    text = _Text(file)
    while text.next_mark():
        text.at -= 1
        yield text.record()


class _Text:
    """A file's text from `at` on. It grows at its end and is cut at its beginning."""

    def __init__(self, file: PeekableFile):
        self.text, self.at = "", 0
        self._file, self._broken = file, None
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def _read_more(self) -> bool:
        """Read as much again as is unparsed: a long record is parsed only each time its length has doubled."""
        if self._broken is not None:
            raise Unparsable(str(self._broken))
        content = self._file.read(max(BLOCK, len(self.text) - self.at))
        try:
            new = self._decoder.decode(content)
        except UnicodeDecodeError as error:  # the text before the error is parsed first
            new, self._broken = error.object[: error.start].decode(), error
        self.text, self.at = self.text[self.at :] + new, 0
        return bool(content)

    def next_mark(self) -> str:
        """Consume and return the next character that is no white space; "" at the end of the file."""
        while (at := _SPACE.match(self.text, self.at).end()) == len(self.text):
            self.at = at
            if not self._read_more():
                return ""
        self.at = at + 1
        return self.text[at]

    def expect(self, mark: str) -> None:
        """Consume the next character. Raise Unparsable for another one than `mark`."""
        if (actual := self.next_mark()) != mark:
            raise Unparsable(f"{actual!r} where {mark!r} is expected", torn=not actual)

    def record(self) -> Any:
        """Return the next value, or its first characters. Raise Unparsable."""
        if self.next_mark():
            self.at -= 1
        while True:
            try:
                value, end = _parse(self.text, self.at)
            except RecursionError:
                return self._skip_record()
            except json.JSONDecodeError as error:
                if not _is_truncated(self.text, error):
                    raise Unparsable(str(error)) from None
                if len(self.text) - self.at > LONGEST:
                    return self._skip_record()
                if not self._read_more():
                    raise Unparsable(str(error), torn=True) from None
                continue
            except ValueError:  # a number of thousands of digits
                return self._skip_record()
            if end == len(self.text) and isinstance(value, int | float) and self._read_more():  # it may continue
                continue
            return self._limit_record(value, end)

    def _limit_record(self, value: Any, end: int) -> Any:
        begin, self.at = self.at, end
        brackets = self.text.count("[", begin, end) + self.text.count("{", begin, end)
        too_long = end - begin > LONGEST
        return self.text[begin:end][:SHOWN] if too_long or (brackets > MAX_DEPTH and is_too_deep(value)) else value

    def _skip_record(self) -> str:
        """Skip a value and return its first characters. Raise Unparsable where the file ends first."""
        shown, depth, quoted = self.text[self.at : self.at + SHOWN], 0, False
        while True:
            for match in _MARK.finditer(self.text, self.at):
                mark = match[0]
                self.at = match.end()
                if quoted or mark == '"':
                    quoted = mark != '"' if quoted else True
                elif depth == 0 and mark in ",]":  # after a number
                    self.at = match.start()
                    return shown
                else:
                    depth += (mark in "[{") - (mark in "]}")
                if depth == 0 and not quoted and mark in '"]}':
                    return shown
            lone = self.text.endswith("\\") and self.at < len(self.text)  # the first half of an escape
            self.at = len(self.text) - lone
            if not self._read_more():
                raise Unparsable("it ends in a record", torn=True)


def _is_truncated(text: str, error: json.JSONDecodeError) -> bool:
    """Return whether the text could be JSON that is cut off at its end."""
    rest = text[error.pos :]
    return (
        error.msg.startswith("Unterminated string")
        or (error.msg.startswith("Invalid \\") and len(rest) < 7)
        or _BEGUN_NUMBER.fullmatch(rest.rstrip()) is not None
        or any(word.startswith(rest) for word in _WORDS)
    )
