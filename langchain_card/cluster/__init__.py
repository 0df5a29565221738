"""Engines on a Ray cluster, behind a relay. The only folder that imports ray (`pip install 'langchain-card[ray]'`)."""
