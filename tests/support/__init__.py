"""What several tests share; `ROOT` is the checkout, `SMALL` the real model that `make test` downloads."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
SMALL = "smollm2-135m"
