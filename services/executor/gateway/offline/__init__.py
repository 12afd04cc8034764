"""The offline provider: answers computed from the prompt's own text, the same every time. It is no model."""
