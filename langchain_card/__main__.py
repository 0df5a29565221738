"""`python -m langchain_card COMMAND`."""

import sys

from langchain_card.cli import main

sys.exit(main())
