"""Job type `structured_generation`: a prompt and a JSON Schema in, a JSON object that fits the schema out."""
