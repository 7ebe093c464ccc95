"""The practitioner's workflow: one model folder, and a function for each command that works on it."""
