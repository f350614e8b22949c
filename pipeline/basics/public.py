"""What may be shown of addresses that hold credentials: in artifacts, errors, logs and the process list.

An address is a path, a name of the Hub, or a URL. Its private parts are a URL's userinfo, its query and fragment, what
looks like a token in its path, and the folders of a local path.
"""

import re
from pathlib import Path
from urllib.parse import unquote

HIDDEN = "***"
_NO_USERINFO = {
    "abfs",
    "abfss",
    "adl",
    "az",
    "hf",
    "wasb",
    "wasbs",
}  # container@account and name@revision, unless with a ":"
_URL = re.compile(r"""[A-Za-z][A-Za-z0-9+.-]*://[^\s"'<>]*""")
_NAMED = re.compile(r"(?i)((?:token|key|secret|password|passwd|pwd|signature|sig|auth)=)[^/&;,]+")
_ISSUED = re.compile(r"\b(?:hf|gh[pousr]|github_pat|glpat|sk|xox[abprs])[_-][A-Za-z0-9_-]{8,}|\bAKIA[A-Z0-9]{12,}")
_RANDOM = re.compile(  # all three kinds of characters, or letters and digits of a length that nobody types
    r"(?<![A-Za-z0-9])(?=[A-Za-z]*[0-9])(?=[0-9]*[A-Za-z])"
    r"(?:[A-Za-z0-9]{32,}|(?=[A-Z0-9]*[a-z])(?=[a-z0-9]*[A-Z])[A-Za-z0-9]{20,})"
)
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def public_name(source: str) -> str:
    """A model or data address without the private part of a local path, and without a URL's credentials and query."""
    if "::" in source and "@" not in source:  # fsspec's chains
        return "::".join(map(public_name, source.split("::")))
    scheme, colon, rest = source.partition("://")
    if colon:
        return Path(rest).name if scheme == "file" else _without_credentials(source)
    path = Path(source)
    local = path.is_absolute() or source.startswith("~") or ".." in path.parts
    return path.name if local else source


def scrubbed(text: str, *addresses: str) -> str:
    """Any text, without the credentials of the URLs in it, and without those of the given addresses wherever they
    stand.
    """
    for address in addresses:
        if "://" in address:
            text = text.replace(address, _without_credentials(address))
            for secret in _secrets(address):
                text = text.replace(secret, HIDDEN)
    return _URL.sub(lambda found: _without_credentials(found[0]), text)


def _without_credentials(url: str) -> str:
    scheme, _, rest = url.partition("://")
    _, place = _split(scheme, rest)
    return f"{scheme}://{_without_tokens(re.split(r'[?#]', place, maxsplit=1)[0])}"


def _split(scheme: str, rest: str) -> tuple[str, str]:
    """(userinfo, what follows it) of what stands behind a URL's scheme. A secret may hold any character, so where there
    is a ":" all up to the last "@" is taken for user:secret.
    """
    before, at, after = rest.rpartition("@")
    if not at:
        return "", rest
    if ":" in before or (scheme.rpartition("::")[2].lower() not in _NO_USERINFO and "/" not in before):
        return before, after
    return "", rest


def _without_tokens(place: str) -> str:
    place = _ISSUED.sub(HIDDEN, _NAMED.sub(rf"\g<1>{HIDDEN}", place))
    return _RANDOM.sub(lambda found: found[0] if _COMMIT.fullmatch(found[0]) else HIDDEN, place)


def _secrets(url: str) -> list[str]:
    """The private parts of a URL by themselves, as they stand there and decoded; the longest first."""
    scheme, _, rest = url.partition("://")
    userinfo, place = _split(scheme, rest)
    user, colon, password = userinfo.partition(":")
    found = {userinfo, password if colon else user}
    query = re.split(r"[?#]", place, maxsplit=1)[1:]
    found |= {part.partition("=")[2] or part for whole in query for part in re.split(r"[&;#]", whole)}
    found |= {unquote(one) for one in found}
    return sorted((one for one in found if len(one) > 3), key=len, reverse=True)
