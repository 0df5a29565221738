"""What a new interpreter imports first while devices are simulated (`PYTHONPATH`)."""

from __future__ import annotations

import sys

HOSTS = ("langchain_card.engine.", "multiprocessing.spawn")
"""Names in the code (`python -c`) of processes that may use a device: the engine's, and those of process pools."""

if any(name in argument for argument in sys.orig_argv[1:3] for name in HOSTS):
    from tests.simulation.cuda.children import enter

    enter()
