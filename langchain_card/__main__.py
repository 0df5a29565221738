"""`python -m langchain_card COMMAND`."""

import sys

from langchain_card.cli import main

if __name__ == "__main__":
    sys.exit(main())
