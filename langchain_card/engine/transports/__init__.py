"""How commands reach a drafter and proposals come back."""
