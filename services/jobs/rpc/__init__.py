"""Where messages stop: each servicer translates, calls one use case and translates back."""
