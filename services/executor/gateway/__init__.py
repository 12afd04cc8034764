"""The way to models: providers, parsing of their answers, and the record of every call (EX-6, EX-8)."""
