"""`python -m infra.check` by the name that the index of pages has."""

from infra.check.__main__ import main
from pipeline.running import entry

if __name__ == "__main__":
    entry.run(main)
