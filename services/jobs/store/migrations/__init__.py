"""The schema's history: one revision a step forward."""
