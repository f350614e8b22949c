"""The error type whose message is written for the user: what happened, what was expected, what to do."""


class PipelineError(ValueError):
    """An error in the input. Entry points print its message without a traceback and exit with status 2."""


class NoAnswer(PipelineError):
    """An error for one text that the target cannot answer; it may answer others."""
