"""The one error type whose message is written for the user: what, got, expected, what to do."""


class PipelineError(ValueError):
    """Bad input. Entry points print its message without a traceback and exit with status 2."""


class NoAnswer(PipelineError):
    """The target has no answer to one text; it may have some to others."""
