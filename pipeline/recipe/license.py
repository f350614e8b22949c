"""The licenses that a card may name, as of 2026: the Hub refuses an upload with any other."""

import difflib
import re
from typing import Annotated

from pydantic import AfterValidator

PAGE = "https://huggingface.co/docs/hub/repositories-licenses"
_NAMES = """
    afl-3.0 agpl-3.0 apache-2.0 apple-amlr apple-ascl artistic-2.0 bigcode-openrail-m bigscience-bloom-rail-1.0
    bigscience-openrail-m bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear bsl-1.0 c-uda cc cc-by-2.0 cc-by-2.5
    cc-by-3.0 cc-by-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0
    cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cc-by-nd-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc0-1.0 cdla-permissive-1.0
    cdla-permissive-2.0 cdla-sharing-1.0 creativeml-openrail-m deepfloyd-if-license ecl-2.0 epl-1.0 epl-2.0 etalab-2.0
    eupl-1.1 eupl-1.2 fair-noncommercial-research-license gemma gfdl gpl gpl-2.0 gpl-3.0 grok2-community h-research
    intel-research isc lgpl lgpl-2.1 lgpl-3.0 lgpl-lr llama2 llama3 llama3.1 llama3.2 llama3.3 llama4 lppl-1.3c mit
    mpl-2.0 ms-pl ncsa odbl odc-by ofl-1.1 open-mdw openmdw-1.0 openmdw-1.1 openrail openrail++ osl-3.0 other pddl
    postgresql unknown unlicense wtfpl zlib
"""
LICENSES = frozenset(_NAMES.split())


def _license(name: str) -> str:
    if name not in LICENSES:
        near = difflib.get_close_matches(re.sub(r"[\s_]+", "-", name.strip().lower()), sorted(LICENSES), 1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(
            f"{name!r} is no license identifier of the Hub{hint} Expected one of {PAGE}, or 'other' for a license "
            "that is not listed"
        )
    return name


License = Annotated[str, AfterValidator(_license)]
