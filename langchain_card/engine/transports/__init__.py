"""Transports: carry commands to a drafter and its proposals back."""
